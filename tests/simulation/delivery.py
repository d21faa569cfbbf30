"""One delivery to a cluster, in simulated time: when each host has all, and what the client does.

Receivers, relays, rings and trees are those of wheelmount. A block is one byte here, which stands
for a whole one on the wire and for the processors. So that ten thousand hosts do not take hours,
only the first blocks of a large delivery are simulated, twice: the others take as long as those
between.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from blake3 import blake3

from tests.simulation.clock import Loop
from tests.simulation.network import (
    FRAME,
    SEGMENT,
    Costs,
    Line,
    Link,
    Network,
    Node,
    Processors,
    Slots,
)
from wheelmount.config import Settings
from wheelmount.hosts.runtime import POLL_INTERVAL
from wheelmount.mount.serve.traffic import CLIENT, Traffic
from wheelmount.mount.transfer import receiver, relay, ring
from wheelmount.mount.transfer.laggards import Laggards
from wheelmount.mount.transfer.rdma import BlockInfo
from wheelmount.mount.transfer.receiver import Receiver
from wheelmount.mount.transfer.ring import Ring, Staged
from wheelmount.mount.transfer.topology import block_size, routes

NOTICED = 3.6
"""Seconds until the client knows that a host is dead (see ``benchmarks.faults``)."""

DIGEST = blake3(b"\0").digest()


@dataclass(frozen=True)
class Cluster:
    """Machines and their network.

    Attributes:
        hosts: how many there are, besides the client.
        rate: of each one's link in each direction, bytes a second.
        latency: seconds from one to another.
        cores: of each machine.
        one_machine: whether all share the processors of one, as on a test-bed.
        rack: hosts on one switch; 0: all are.
        oversubscription: how much more the links of a rack's hosts carry than its own link.
        burst: bytes that a link carries at once after a rest.
        loss: part of the segments that are lost.
        known: whether wheelmount knows the racks.
        slow: rates of other links, by number of the host.
    """

    hosts: int
    rate: float
    latency: float = 20e-6
    cores: int = 16
    one_machine: bool = False
    rack: int = 0
    oversubscription: float = 1.0
    burst: float = 0.0
    loss: float = 0.0
    known: bool = True
    slow: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What is delivered.

    Attributes:
        size: bytes.
        files: number of files.
        block: bytes of a block; 0 to choose as wheelmount does.
        settings: as a user has them.
        killed: seconds at which a host is lost, by its number.
        late: seconds at which a host is added, by its number.
        first: blocks that are to come first.
    """

    size: float
    files: int = 1
    block: int = 0
    settings: Settings = field(default_factory=Settings)
    killed: Mapping[int, float] = field(default_factory=dict)
    late: Mapping[int, float] = field(default_factory=dict)
    first: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a delivery took.

    Attributes:
        seconds: until the last host had all.
        hosts: seconds until each host had all, by its number; not of lost ones.
        egress: bytes of files that left the client.
        crossed: bytes that went from one rack to another.
        processor: seconds of the client's processors.
        calls: calls of actors.
        order: of the simulated blocks, as they came to each host, by its number.
    """

    seconds: float
    hosts: Mapping[int, float]
    egress: float
    crossed: float
    processor: float
    calls: int
    order: Mapping[int, list[int]] = field(default_factory=dict)


class _Blocks:
    """As much of a ``Layout`` as a delivery asks for: blocks of one byte."""

    key = (b"simulated", True, 0)

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.size = blocks * block_size

    def length(self, _block: int) -> int:
        return 1


class _Store:
    """As much of a ``Store``: which blocks there are."""

    def __init__(self, layout: _Blocks, node: Node) -> None:
        self.layout = layout
        self._node = node
        self._have = bytearray(layout.blocks)
        self.order: list[int] = []

    @property
    def held(self) -> int:
        """Number of blocks that are there."""
        return sum(self._have)

    def missing(self) -> list[int]:
        return [block for block, there in enumerate(self._have) if not there]

    def has(self, block: int) -> bool:
        return bool(self._have[block])

    def write(self, block: int, _data: memoryview, _digest: bytes) -> None:
        self._have[block] = 1
        self.order.append(block)

    def read_block(self, _block: int, _view: memoryview) -> None:
        self._node.filled = True

    def mark_changed(self, _inode: int) -> None:
        raise AssertionError("no file changes")


class _Client:
    """The client's end: its ring, over a source of nothing."""

    def __init__(self, layout: _Blocks, node: Node, slots: int) -> None:
        self.layout = layout
        self._node = node
        self._ring = Ring(self, slots=slots, lease=30, readers=lambda _: 1)  # type: ignore[arg-type]

    def fill(self, _block: int, _view: memoryview) -> BlockInfo:
        self._node.filled = True
        return DIGEST, ()

    async def digest(self, _block: int, *, urgent: bool = False) -> BlockInfo:
        del urgent
        return DIGEST, ()

    def lend(
        self, block: int, packed: bool
    ) -> contextlib.AbstractContextManager[tuple[Staged, memoryview]]:
        return self._ring.lend(block, packed)


class _World:
    """A cluster with one delivery."""

    def __init__(self, cluster: Cluster, job: Job, costs: Costs, blocks: int, chunks: int) -> None:
        self._cluster, self._job = cluster, job
        size, settings = int(job.size), job.settings
        cut = job.block or block_size(size, cluster.hosts, settings.fanout)
        self._layout = _Blocks(min(blocks, -(-size // cut)), cut)
        self._scale = size / -(-size // cut)
        self._files = job.files / -(-size // cut)
        self._chunks = chunks
        self._costs = costs
        self.network = Network(
            Random(1),  # noqa: S311 - the same every time
            cluster.latency, loss=cluster.loss, framed=FRAME / SEGMENT, costs=costs,
        )  # fmt: skip
        self.names = [f"host{number}" for number in range(cluster.hosts)]
        self._receivers: dict[str, Receiver] = {}
        self.stores: dict[str, _Store] = {}
        self._make_nodes()

    def _make_nodes(self) -> None:
        cluster, network = self._cluster, self.network
        shared = Processors(cluster.cores) if cluster.one_machine else None
        for number, name in enumerate([*self.names, CLIENT]):
            rate = cluster.slow.get(number, cluster.rate)
            machine = shared or Processors(cluster.cores)
            network.nodes[name] = Node(name, rate, machine, cluster.burst)
        if cluster.rack:
            rate = cluster.rate * cluster.rack / cluster.oversubscription
            for first in range(0, cluster.hosts, cluster.rack):
                rack = Link(rate), Link(rate)
                for name in self.names[first : first + cluster.rack]:
                    network.racks[name] = rack
            network.racks[CLIENT] = Link(rate), Link(rate)

    async def run(self) -> dict[int, float]:
        """Deliver; return when each host has all."""
        network, settings, layout = self.network, self._job.settings, self._layout
        node = network.nodes[CLIENT]
        node.givers[layout.key] = _Client(layout, node, settings.ring)
        node.slots[layout.key] = Slots(min(settings.ring, layout.blocks))
        late = {self.names[number] for number in self._job.late}
        first = [name for name in self.names if name not in late]
        size, fanout = int(self._job.size), settings.fanout
        racks = self._racks()
        wanted = self._job.first
        ways = routes(dict.fromkeys(first), size, fanout, racks=racks, first=wanted)
        after = routes(dict.fromkeys(self.names), size, fanout, late, racks, wanted)
        ways |= {name: after[name] for name in late}
        for name in self.names:
            await self._make(name, ways[name])
        loop = asyncio.get_running_loop()
        for number, when in self._job.killed.items():
            loop.call_at(when, self._kill, self.names[number])
        watch = asyncio.ensure_future(self._skip_slow())
        ends = await asyncio.gather(*map(self._deliver, range(len(self.names))))
        watch.cancel()
        for each in self._receivers.values():
            await each.stop()
        return {number: end for number, end in enumerate(ends) if number not in self._job.killed}

    def _racks(self) -> dict[str, str]:
        cluster = self._cluster
        if not (cluster.rack and cluster.known):
            return {}
        return {name: f"{n // cluster.rack:05}" for n, name in enumerate(self.names)}

    async def _make(self, name: str, route: Any) -> None:
        network, settings, layout = self.network, self._job.settings, self._layout
        node = network.nodes[name]
        line = Line(
            network, node, layout.key, settings.fetch_timeout,
            scale=self._scale, files=self._files, chunks=self._chunks,
        )  # fmt: skip
        store = self.stores[name] = _Store(layout, node)
        made = self._receivers[name] = Receiver(
            name,
            store,  # type: ignore[arg-type]
            line,
            route,
            in_flight=settings.in_flight,
            processors=self._cluster.cores,
            compress="never",
            timeout=settings.fetch_timeout,
            traffic=Traffic(),
            tell=lambda _block, _reason: None,
        )
        await made.relay.ways()
        node.givers[layout.key] = made.relay
        node.slots[layout.key] = Slots(min(relay.STAGED_BLOCKS, layout.blocks))

    async def _deliver(self, number: int) -> float:
        """Have a host fetch all; the client calls one host after the other."""
        loop, costs, client = asyncio.get_running_loop(), self._costs, self.network.nodes[CLIENT]
        name = self.names[number]
        await asyncio.sleep(self._job.late.get(number, 0.0))
        self.network.calls += 1
        await asyncio.sleep(client.interpret(loop.time(), costs.call) - loop.time())
        await asyncio.sleep(self.network.latency)
        try:
            await self._receivers[name].run()
        except Exception:
            if number not in self._job.killed:
                raise
        done = self.network.nodes[name].interpret(loop.time(), costs.answer)
        return done + self.network.latency

    def _kill(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        self.network.nodes[name].dead = True
        self._receivers[name].close()
        loop.call_later(NOTICED, self._avoid, name)

    def _avoid(self, name: str) -> None:
        for each in self._receivers.values():
            each.avoid(name)

    async def _skip_slow(self) -> None:
        """Look for slow hosts as the client does, of which hosts say what has arrived."""
        laggards = Laggards(self._layout.block_size)
        while True:
            await asyncio.sleep(POLL_INTERVAL)
            size, stores = self._layout.block_size, self.stores
            incomplete = {n for n, s in stores.items() if s.held < self._layout.blocks}
            arrived = {name: store.held * size for name, store in stores.items()}
            now = asyncio.get_running_loop().time()
            for name in laggards.find(arrived, incomplete, now):
                self._avoid(name)


@contextlib.contextmanager
def _no_bytes() -> Iterator[None]:
    """No sockets, and the same memory for all: nothing is ever written to it."""
    memory = memoryview(mmap.mmap(-1, 512 << 20))
    empty = SimpleNamespace(mmap=lambda _file, size: memory[:size])
    server = SimpleNamespace(ticket=None, close=lambda: None)
    idle = SimpleNamespace(spare=lambda: False)
    with (
        mock.patch.object(relay, "block_server", lambda *_: server),
        mock.patch.object(receiver, "mmap", empty),
        mock.patch.object(receiver, "Processors", lambda: idle),
        mock.patch.object(ring, "mmap", empty),
    ):
        yield


def _play(cluster: Cluster, job: Job, costs: Costs, blocks: int, chunks: int) -> Outcome:
    loop = Loop()
    try:
        with _no_bytes():
            asyncio.set_event_loop(loop)
            gc.disable()  # it would look at all hosts again and again
            world = _World(cluster, job, costs, blocks, chunks)
            hosts = loop.run_until_complete(world.run())
    finally:
        gc.enable()
        asyncio.set_event_loop(None)
        loop.close()
    client = world.network.nodes[CLIENT]
    racks = {id(rack): rack for rack in world.network.racks.values()}
    crossed = sum(rack[1].carried for rack in racks.values())
    return Outcome(
        max(hosts.values()),
        hosts,
        client.sent,
        crossed,
        client.machine.used,
        world.network.calls,
        {number: store.order for number, store in enumerate(world.stores.values())},
    )


def deliver(cluster: Cluster, job: Job, costs: Costs, *, most: int = 0, chunks: int = 4) -> Outcome:
    """Deliver in simulated time.

    Args:
        cluster: where to.
        job: what.
        costs: of the work of a processor.
        most: blocks that are simulated; further ones take as long as the second half of these.
            Default all.
        chunks: pieces of which a block is carried. With more, several at once share links more
            evenly, and the simulation takes longer.
    """
    cut = job.block or block_size(int(job.size), cluster.hosts, job.settings.fanout)
    blocks = -(-int(job.size) // cut)
    if not most or blocks <= most:
        return _play(cluster, job, costs, blocks, chunks)
    half, whole = (_play(cluster, job, costs, count, chunks) for count in (most // 2, most))
    rest = (blocks - most) / (most - most // 2)

    def extend(early: float, late: float) -> float:
        return late + (late - early) * rest

    hosts = {number: extend(half.hosts[number], end) for number, end in whole.hosts.items()}
    return Outcome(
        extend(half.seconds, whole.seconds),
        hosts,
        extend(half.egress, whole.egress),
        extend(half.crossed, whole.crossed),
        extend(half.processor, whole.processor),
        round(extend(half.calls, whole.calls)),
    )
