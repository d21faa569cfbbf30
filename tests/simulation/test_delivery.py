"""Deliveries in simulated time, with wheelmount's own receivers, relays, rings and trees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.delivery import Cluster, Job, deliver
from tests.simulation.network import FRAME, SEGMENT, Costs, Link, Processors, Slots
from wheelmount.config import Settings

RATE = 1e9 / 8
BLOCK = 1 << 20
FREE = Costs()
JOB = Job(32 * BLOCK, block=BLOCK)
WIRE = JOB.size / RATE * FRAME / SEGMENT


def test_a_delivery_takes_what_the_wire_takes_and_every_byte_leaves_the_client_once() -> None:
    outcome = deliver(Cluster(8, RATE), JOB, FREE)
    assert WIRE <= outcome.seconds < 1.6 * WIRE, "and some more for the steps of the way"
    assert outcome.egress == JOB.size
    assert len(outcome.hosts) == 8


@pytest.mark.parametrize("hosts", [1, 4, 8])
def test_blocks_that_are_to_come_first_do_so_on_every_host(hosts: int) -> None:
    first = tuple(range(120, 80, -1))
    job = Job(128 * BLOCK, block=BLOCK, first=first)
    jobs = replace(job, first=()), job
    ascending, wanted = (deliver(Cluster(hosts, RATE), each, FREE) for each in jobs)
    assert wanted.egress == job.size
    assert wanted.seconds < 1.1 * ascending.seconds, "it takes no longer"
    for order in wanted.order.values():
        assert sorted(order) == list(range(128))
        early = [block for block in order[: len(first)] if block in first]
        assert len(early) > 0.7 * len(first), "but for those on their way by other trees"
        late = max(map(order.index, first))
        assert late < len(first) + 32


def test_processors_bound_it_where_they_are_slower_than_the_wire() -> None:
    outcome = deliver(Cluster(4, RATE, cores=1), JOB, replace(FREE, keep=10 / RATE))
    assert outcome.seconds > 10 * JOB.size / RATE


@pytest.mark.slow
def test_the_first_blocks_say_what_all_take() -> None:
    job = replace(JOB, size=128 * BLOCK)
    some, whole = (deliver(Cluster(8, RATE), job, FREE, most=most) for most in (64, 0))
    assert some.seconds == pytest.approx(whole.seconds, rel=0.1)
    assert some.egress == pytest.approx(whole.egress)


def test_fewer_chunks_of_a_block_change_little() -> None:
    few, many = (deliver(Cluster(8, RATE), JOB, FREE, chunks=chunks) for chunks in (2, 8))
    assert few.seconds == pytest.approx(many.seconds, rel=0.1)


def test_others_have_all_although_some_hosts_are_lost() -> None:
    job = replace(JOB, killed={1: 0.1, 5: 0.2}, settings=Settings(fetch_timeout=10))
    outcome = deliver(Cluster(8, RATE), job, FREE)
    assert sorted(outcome.hosts) == [0, 2, 3, 4, 6, 7]


def test_a_host_that_joins_late_has_all_from_others() -> None:
    outcome = deliver(Cluster(6, RATE), replace(JOB, late={5: WIRE / 2}), FREE)
    assert outcome.egress == JOB.size
    assert outcome.seconds == outcome.hosts[5] < 2 * WIRE


@pytest.mark.slow
def test_a_slow_host_slows_no_other_down() -> None:
    cluster, job = Cluster(10, RATE / 32), Job(32 * BLOCK, block=BLOCK >> 3)
    alike = deliver(cluster, job, FREE)
    for slow in (0, 5, 9):
        outcome = deliver(replace(cluster, slow={slow: cluster.rate / 10}), job, FREE)
        others = [seconds for number, seconds in outcome.hosts.items() if number != slow]
        assert max(others) < 1.6 * alike.seconds, slow
        assert outcome.egress <= 1.4 * job.size, slow


@pytest.mark.slow
def test_known_racks_are_crossed_by_few_bytes() -> None:
    cluster = Cluster(32, RATE, rack=8, oversubscription=8)
    unknown, known = (deliver(replace(cluster, known=known), JOB, FREE) for known in (False, True))
    assert known.crossed < unknown.crossed / 2
    assert known.seconds < 0.9 * unknown.seconds


def test_a_lossy_long_link_is_slow() -> None:
    cluster = Cluster(2, RATE, latency=0.02)
    clean, lossy = (deliver(replace(cluster, loss=loss), JOB, FREE) for loss in (0, 0.01))
    assert lossy.seconds > 2 * clean.seconds


def test_a_link_carries_a_burst_at_once_and_then_its_rate() -> None:
    link = Link(10.0, burst=5.0)
    assert link.book(100.0, 5.0) == 100.0
    assert link.book(100.0, 10.0) == 101.0
    assert link.carried == 15.0


def test_processors_work_on_as_many_tasks_as_they_are() -> None:
    processors = Processors(2)
    assert [processors.book(1.0, 3.0) for _ in range(3)] == [4.0, 4.0, 7.0]
    assert processors.used == 9.0


def test_slots_are_lent_again_when_they_are_free() -> None:
    slots, woken = Slots(1), []
    assert slots.take((0, False))
    assert slots.take((0, False)), "the same block"
    assert not slots.take((1, False))
    slots.wake(lambda: woken.append(1))
    slots.free((0, False))
    assert not woken
    slots.free((0, False))
    assert woken
