"""Which host fetches from which.

Blocks are divided among several trees in turn (block ``b`` goes through tree ``b`` modulo their
number). The client is above the first host of each tree, so every byte leaves it once, however many
hosts there are. A host is an inner node of one tree and a leaf of the others, so that it sends
about as much as it receives, and no link carries more than another. The idea is that of SplitStream
(Castro and others, SOSP 2003).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from wheelmount.hosts.names import expand

FANOUT = 4
"""Children of a host in one tree, and number of trees."""

SMALL = 1 << 20
"""Bytes for all hosts together up to which the client sends directly, as a tree takes longer."""

LEAST_BLOCK, MOST_BLOCK = 256 << 10, 4 << 20
"""Smallest and largest block, bytes. Larger ones gain nothing, and take memory in all rings."""

PARTS = 512
"""Fewest blocks of a delivery by streams. A block for a reader comes behind one or two that
are on their way, and so within a hundredth of the time of the delivery, over any link."""

SHARE = 2
"""Fewest blocks on their way to a host in each tree, so that no link waits for what another
brings."""

BLOCK_COST = 32_000
"""Bytes that a link of 1 Gbit/s could carry in the time that one more block costs: 1.5 ms (see
``benchmarks.rdma``), and six are on their way at once."""

NO_RACKS: Mapping[str, str] = MappingProxyType({})

REPORT = 0.25
"""Least seconds between reports of arrived bytes to the client; more for many hosts."""


def block_size(size: int, hosts: int, fanout: int = 0, *, device: bool = False) -> int:
    """Choose the size of a block in bytes, a power of two.

    The last block is passed on once for each step of the way, behind others, which takes
    ``steps * SHARE * block``; all blocks together cost ``size / block * BLOCK_COST``. The sum is
    least at the root of their quotient. On faster links blocks matter less in both ways.

    By streams a reader may ask for a block ahead of others, which should arrive soon over a slow
    link too: there are at least ``PARTS`` blocks.

    Args:
        size: bytes that each host gets.
        hosts: number of hosts.
        fanout: see ``Topology``.
        device: whether bytes are sent by RDMA.
    """
    children = fanout or FANOUT
    steps, reached = 1, children
    while reached < hosts:
        reached = (reached + 1) * children
        steps += 1
    best = math.sqrt(size * BLOCK_COST / (steps * SHARE))
    if not device:
        best = min(best, size / PARTS)
    return min(max(1 << round(math.log2(max(best, 1))), LEAST_BLOCK), MOST_BLOCK)


class Peers(Mapping[str, Any]):
    """Agents of hosts by name, each made of its pickled form when it is first asked for.

    Each host receives references to about twenty agents, and calls a few of these. Monarch takes
    milliseconds to pickle or to unpickle a reference.

    Args:
        pickled: of the agents, by name of the host.
    """

    def __init__(self, pickled: Mapping[str, bytes]) -> None:
        self._pickled = pickled
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = pickle.loads(self._pickled[name])  # noqa: S301 - from the client
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pickled)

    def __len__(self) -> int:
        return len(self._pickled)


@dataclass(frozen=True, slots=True)
class Route:
    """The hosts that one host asks for blocks.

    Attributes:
        trees: for each tree the hosts to ask, as of ``Topology.route``.
        peers: the agents of the hosts named there.
        below: for each tree, how many ask this host first.
        report: seconds between reports to the client.
        first: blocks that are fetched ahead of all others, in this order; see ``Order``.
    """

    trees: tuple[tuple[str, ...], ...] = ((),)
    peers: Mapping[str, Any] = field(default_factory=dict)
    below: tuple[int, ...] = (0,)
    report: float = REPORT
    first: tuple[int, ...] = ()


def routes(
    agents: Mapping[str, Any],
    size: int,
    fanout: int,
    later: Collection[str] = (),
    racks: Mapping[str, str] = NO_RACKS,
    first: tuple[int, ...] = (),
) -> dict[str, Route]:
    """Compute the route of each host.

    Args:
        agents: of all hosts, by name.
        size: bytes that each host gets.
        fanout: see ``Topology``.
        later: see ``Topology``.
        racks: see ``Topology``.
        first: see ``Route``.
    """
    early = [name for name in agents if name not in later]
    topology = Topology(early, size, fanout, list(later), racks)
    report = max(REPORT, len(agents) / 256)
    # Not when they are sent: Monarch then takes references out of what it pickles.
    pickled = {name: pickle.dumps(agent) for name, agent in agents.items()}
    found = {}
    for name in agents:
        trees = topology.route(name)
        peers = Peers({host: pickled[host] for above in trees for host in above})
        found[name] = Route(trees, peers, topology.below(name), report, first)
    return found


def named_racks(text: str) -> dict[str, str]:
    """Return the rack of each host.

    Args:
        text: the setting ``racks``.

    Raises:
        InputError: it does not name hosts.
    """
    return {host: rack for rack in text.split() for host in expand(rack)}


class Topology:
    """The trees through which hosts get a layout's blocks.

    Args:
        hosts: their names.
        size: bytes that each host gets.
        fanout: children of a host in one tree; 0 to choose by size and number of hosts.
        later: names of hosts that were added. They are below all others, which need not be told.
        racks: racks of hosts, by name. Hosts of one rack are near each other in each tree, so that
            few bytes come from another one.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        size: int,
        fanout: int = 0,
        later: Sequence[str] = (),
        racks: Mapping[str, str] = NO_RACKS,
    ) -> None:
        direct = not fanout and size * len(hosts) <= SMALL
        self._fanout = fanout or FANOUT
        stripes = 1 if direct else max(1, min(self._fanout, len(hosts)))
        self._places: list[dict[str, int]] = []
        self._orders: list[list[str]] = []
        self._direct = direct
        near = {host: racks.get(host, "") for host in hosts}
        apart = len(set(near.values())) > 1
        if apart:
            hosts = sorted(hosts, key=near.__getitem__)
        for stripe in range(stripes):
            # A tree's inner nodes are at its first places: other hosts in each tree. Where those
            # are too few by one, the last of the next tree's helps: it has the least to do there.
            order = [*hosts[stripe::stripes]]
            for step in range(1, stripes):
                order += reversed(hosts[(stripe + step) % stripes :: stripes])
            if apart:
                order = _by_rack(order, self._fanout, near)
            order += later
            self._orders.append(order)
            self._places.append({host: place for place, host in enumerate(order)})

    def route(self, host: str) -> tuple[tuple[str, ...], ...]:
        """Return the hosts that one host asks for blocks.

        Returns:
            For each tree the hosts to ask, the nearest first; above the last is the client.
        """
        return tuple(tuple(self._above(tree, host)) for tree in range(len(self._orders)))

    def below(self, host: str) -> tuple[int, ...]:
        """Return how many hosts ask the given one first, in each tree."""
        if self._direct:
            return (0,)
        return tuple(
            max(0, min(self._fanout, len(order) - 1 - places[host] * self._fanout))
            for order, places in zip(self._orders, self._places, strict=True)
        )

    def _above(self, tree: int, host: str) -> list[str]:
        order, place = self._orders[tree], self._places[tree][host]
        if self._direct or not place:
            return []
        parent = (place - 1) // self._fanout
        above = [order[parent]]
        # If the parent is lost or slow, its children form a chain: not all of them then burden the
        # host above it. Each still waits only for hosts at earlier places.
        if place - 1 > self._fanout * parent:
            above.append(order[place - 1])
        while parent:
            parent = (parent - 1) // self._fanout
            above.append(order[parent])
        return above


def _by_rack(order: Sequence[str], fanout: int, racks: Mapping[str, str]) -> list[str]:
    """Rearrange the places of a tree so that hosts of one rack are near each other in it.

    Inner nodes stay inner nodes: rack by rack, where the tree is walked from its root, every
    branch to its end. Leaves are below inner nodes of their rack, as far as there is room.
    """
    count = len(order)
    inner = -(-(count - 1) // fanout)
    nodes = sorted(order[:inner], key=racks.__getitem__, reverse=True)
    placed, walk = {}, [0]
    while nodes:
        place = walk.pop()
        placed[place] = nodes.pop()
        first = place * fanout + 1
        walk += reversed(range(first, min(first + fanout, inner)))
    leaves: dict[str, list[str]] = {}
    for host in order[inner:]:
        leaves.setdefault(racks[host], []).append(host)
    for place in range(max(1, inner), count):
        if here := leaves.get(racks[placed[(place - 1) // fanout]]):
            placed[place] = here.pop(0)
    left = [host for each in leaves.values() for host in each]
    return [placed.get(place) or left.pop(0) for place in range(count)]
