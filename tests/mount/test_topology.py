"""Who pulls from whom."""

from __future__ import annotations

import functools
import pickle
from collections import Counter
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest

from wheelmount.mount.kernel.points import View
from wheelmount.mount.transfer.topology import (
    FANOUT,
    LEAST_BLOCK,
    MOST_BLOCK,
    SMALL,
    Topology,
    block_size,
    named_racks,
    routes,
)

GIB = 1 << 30


def _names(count: int) -> list[str]:
    return [f"host{n}" for n in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16, 100, 1024])
@pytest.mark.parametrize("fanout", [0, 1, 2, 8])
def test_every_byte_leaves_the_client_once_and_nobody_sends_much_more_than_it_gets(
    count: int, fanout: int
) -> None:
    hosts = _names(count)
    topology = Topology(hosts, GIB, fanout)
    routes = {host: topology.route(host) for host in hosts}
    (trees,) = {len(route) for route in routes.values()}
    from_client = Counter(
        tree for route in routes.values() for tree, above in enumerate(route) if not above
    )
    assert from_client == Counter(range(trees)), "the client sends each tree to one host"
    children = Counter(
        (above[0], tree) for route in routes.values() for tree, above in enumerate(route) if above
    )
    width = fanout or FANOUT
    assert max(children.values(), default=0) <= width
    sent = Counter[str]()
    for (host, _), number in children.items():
        sent[host] += number
    assert max(sent.values(), default=0) <= 2 * trees, "twice what it receives, where it is uneven"


@pytest.mark.parametrize("count", [2, 5, 64, 1000])
def test_all_ways_lead_up_to_the_client(count: int) -> None:
    hosts = _names(count)
    topology = Topology(hosts, GIB)
    for host in hosts:
        for tree, above in enumerate(topology.route(host)):
            assert host not in above
            assert len(set(above)) == len(above) <= 7
            ancestors = [*above]
            if len(above) > 1 and topology.route(above[1])[tree][:1] == above[:1]:
                del ancestors[1]  # a child of the same parent, in case the parent is lost or slow
            for nearer, further in pairwise(ancestors):
                assert topology.route(nearer)[tree][0] == further
            if above:
                assert topology.route(ancestors[-1])[tree] == ()


@pytest.mark.parametrize("count", [2, 5, 64, 1000])
@pytest.mark.parametrize("fanout", [0, 1, 3])
def test_no_hosts_can_wait_for_one_another(count: int, fanout: int) -> None:
    topology = Topology(_names(count), GIB, fanout, ["later0", "later1"])
    routes = {host: topology.route(host) for host in [*_names(count), "later0", "later1"]}
    for tree in range(len(routes["later0"])):
        TopologicalSorter({host: ways[tree] for host, ways in routes.items()}).prepare()


def test_the_children_of_a_lost_host_form_a_chain() -> None:
    topology = Topology(_names(40), GIB)
    routes = {host: topology.route(host) for host in _names(40)}
    for tree in range(4):
        for lost in routes:
            children = [host for host in routes if routes[host][tree][:1] == (lost,)]
            asked = Counter(routes[host][tree][1:2] for host in children)
            above = routes[lost][tree][:1]  # of a tree's first host: the client
            assert not children or asked.pop(above) == 1
            assert set(asked.values()) <= {1}
            assert {host for (host,) in asked} <= set(children)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 21, 100])
@pytest.mark.parametrize("size", [SMALL // 100, 1 << 30])
@pytest.mark.parametrize("fanout", [0, 2])
def test_a_host_knows_how_many_ask_it_first(count: int, size: int, fanout: int) -> None:
    names = [f"host{number}" for number in range(count)]
    later = ["later0", "later1"]
    topology = Topology(names, size, fanout, later)
    asked: list[Counter[str]] = [Counter() for _ in topology.below(names[0])]
    for name in [*names, *later]:
        for tree, above in zip(asked, topology.route(name), strict=True):
            tree.update(above[:1])
    for name in [*names, *later]:
        assert topology.below(name) == tuple(tree[name] for tree in asked)


def test_few_bytes_come_from_the_client_itself() -> None:
    topology = Topology(_names(4), SMALL // 4)
    assert all(topology.route(host) == ((),) for host in _names(4))
    assert any(Topology(_names(4), SMALL).route("host1"))


@pytest.mark.parametrize("fanout", [0, 1, 3])
def test_hosts_that_are_added_are_below_the_others(fanout: int) -> None:
    first, later = _names(5), [f"later{number}" for number in range(3)]
    before, after = Topology(first, GIB, fanout), Topology(first, GIB, fanout, later)
    assert {host: before.route(host) for host in first} == {
        host: after.route(host) for host in first
    }
    for host in later:
        assert all(above and above[-1] in first for above in after.route(host))


def test_blocks_are_larger_for_more_bytes_and_smaller_for_more_steps() -> None:
    of = functools.partial(block_size, device=True)
    sizes = [of(size, 4) for size in (0, 1 << 20, 32 << 20, 256 << 20, GIB, 100 * GIB)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (LEAST_BLOCK, MOST_BLOCK)
    assert of(64 << 20, 1024) < of(64 << 20, 4)
    assert of(64 << 20, 16, fanout=1) < of(64 << 20, 16), "a chain has more steps"
    assert all(size & size - 1 == 0 for size in sizes)


def test_blocks_that_come_by_streams_are_a_small_part_of_all() -> None:
    assert block_size(64 << 20, 1) == LEAST_BLOCK
    assert block_size(512 << 20, 1) == 1 << 20
    assert block_size(GIB, 1024) == block_size(GIB, 1024, device=True), "many steps"
    assert block_size(10_000 * GIB, 4) == MOST_BLOCK


@pytest.mark.parametrize(("count", "rack"), [(64, 16), (100, 7), (256, 32)])
def test_few_bytes_cross_racks_that_are_known(count: int, rack: int) -> None:
    names = _names(count)
    racks = {name: f"rack{number * rack // count}" for number, name in enumerate(names)}

    def crossing(topology: Topology) -> int:
        return sum(
            racks[above[0]] != racks[name]
            for name in names
            for above in topology.route(name)
            if above
        )

    unknown, known = Topology(names, GIB), Topology(names, GIB, racks=racks)
    assert crossing(known) < crossing(unknown) / 2
    for name in names:
        assert sum(known.below(name)) <= 2 * len(known.below(name)), "no more than it sends else"
    everyone = Counter(tree for name in names for tree, up in enumerate(known.route(name)) if up)
    assert set(everyone.values()) == {count - 1}


@pytest.mark.parametrize("racks", [{}, {"host0": "a"}, dict.fromkeys(_names(9), "a")])
def test_racks_of_which_one_is_known_change_little(racks: dict[str, str]) -> None:
    names = _names(9)
    topology = Topology(names, GIB, racks=racks)
    assert all(len(above) <= 3 for name in names for above in topology.route(name))


def test_hosts_that_are_added_leave_racks_as_they_are() -> None:
    first, later = _names(12), ["later0", "later1"]
    racks = {name: name[-1] for name in [*first, *later]}
    before = Topology(first, GIB, racks=racks)
    after = Topology(first, GIB, later=later, racks=racks)
    assert all(before.route(name) == after.route(name) for name in first)


def test_the_setting_names_the_hosts_of_each_rack() -> None:
    found = named_racks("a[1-2],b c")
    assert found["a1"] == found["a2"] == found["b"] != found["c"]
    assert named_racks("") == {}


@pytest.mark.parametrize(
    ("said", "rack"), [("top.switch1.node3", "top.switch1"), ("node3", ""), (None, "")]
)
def test_slurm_says_the_rack_of_a_host(
    monkeypatch: pytest.MonkeyPatch, said: str | None, rack: str
) -> None:
    if said is None:
        monkeypatch.delenv("SLURM_TOPOLOGY_ADDR", raising=False)
    else:
        monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", said)
    assert View.here().rack == rack


class _Reference:
    """Notes when one is pickled."""

    def __init__(self, pickled: list[str]) -> None:
        self._pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        self._pickled.append("")
        return _make, ()


_made: list[object] = []


def _make() -> object:
    _made.append(object())
    return _made[-1]


def test_an_agent_is_pickled_once_for_all_hosts_and_made_where_it_is_called() -> None:
    _made.clear()
    pickled: list[str] = []
    agents = {name: _Reference(pickled) for name in _names(40)}
    sent = [pickle.dumps(route) for route in routes(agents, GIB, 0).values()]
    assert len(pickled) == len(agents)
    (route, *_) = sorted(map(pickle.loads, sent), key=lambda route: -len(route.peers))
    name = next(iter(route.peers))
    assert route.peers[name] is route.peers[name]
    assert len(_made) == 1
