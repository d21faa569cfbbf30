"""Hosts that no other host should wait for, found by the bytes that have arrived."""

from __future__ import annotations

from collections.abc import Set

from wheelmount.mount.transfer.laggards import LEAST_BLOCKS, SLOWER, STANDSTILL, Laggards, Silence

BLOCK = 1 << 20
MANY = 100 * BLOCK


def _find(*looks: dict[str, int], incomplete: Set[str] = frozenset()) -> list[set[str]]:
    laggards = Laggards(BLOCK)
    return [laggards.find(look, incomplete, now) for now, look in enumerate(looks)]


def test_a_host_that_stays_far_behind_is_found_once() -> None:
    slow = {"a": MANY, "b": MANY, "c": MANY, "d": MANY // (SLOWER + 1)}
    later = {host: size + 2 for host, size in slow.items()}
    assert _find(slow, later, later) == [set(), {"d"}, set()]


def test_one_of_two_hosts_can_be_slow() -> None:
    assert _find({"a": MANY, "b": 0}, {"a": MANY, "b": 1}) == [set(), {"b"}]


def test_a_host_that_catches_up_is_not_slow() -> None:
    started_later = {"a": MANY, "b": MANY, "c": 0}
    assert _find(started_later, {"a": MANY, "b": MANY, "c": MANY // 2}) == [set(), set()]


def test_a_host_on_which_nothing_arrives_any_more_is_not_slow() -> None:
    complete = {"a": MANY, "b": MANY, "c": BLOCK}  # it lacked one block only
    assert _find(complete, complete, complete) == [set(), set(), set()]


def test_a_host_that_hangs_is_found() -> None:
    stuck = {"a": MANY, "b": MANY, "c": BLOCK}
    seconds = int(STANDSTILL)
    looks = [stuck] * (seconds + 1)
    assert _find(*looks, incomplete={"c"}) == [set()] * seconds + [{"c"}]
    assert _find(*looks) == [set()] * (seconds + 1), "it has all"


def test_the_first_blocks_say_nothing() -> None:
    few = (LEAST_BLOCKS - 1) * BLOCK
    assert _find({"a": few, "b": 0}, {"a": few, "b": 1}) == [set(), set()]


def test_where_many_hosts_are_slow_none_is_avoided() -> None:
    half = {"a": MANY, "b": MANY, "c": 1, "d": 1}
    assert _find(half, {**half, "c": 2, "d": 2}) == [set(), set()]


def test_a_host_alone_is_never_slow() -> None:
    assert _find({"a": 0}, {"a": 1}) == [set(), set()]
    assert _find({}) == [set()]


def test_silence_ends_with_a_report_and_does_not_grow_while_the_client_reads_or_is_stopped() -> (
    None
):
    silence = Silence("ab", 0)

    def look(now: float, *, reading: bool = False, **reports: int) -> dict[str, float]:
        return silence.look(reports, now, 5, reading=reading)

    assert look(3) == {"a": 3, "b": 3}
    assert look(6, a=1) == {"a": 0, "b": 6}
    assert look(9, a=1, reading=True) == {"a": 0, "b": 6}
    assert look(1000, a=1) == {"a": 5, "b": 11}
    assert look(1001, a=1, b=1) == {"a": 6, "b": 0}
