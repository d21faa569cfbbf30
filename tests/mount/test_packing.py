"""Compression of blocks on the wire, and when it is chosen."""

from __future__ import annotations

import os
from collections import deque
from typing import NamedTuple

import pytest

from wheelmount.errors import TransferError
from wheelmount.mount.transfer.compression import (
    AGAIN,
    FAST,
    IDLE,
    IDLE_PERIOD,
    TRIAL,
    Choice,
    Processors,
    pack,
    unpack,
)

SIZE = 1 << 20


class Times(NamedTuple):
    """As of ``psutil.cpu_times``."""

    user: float
    idle: float


def test_comes_back_the_same() -> None:
    data = b"the same line, again and again\n" * 30_000
    block = memoryview(bytearray(data))
    size = pack(block)
    assert 0 < size < len(block) / 10
    assert unpack(block[:size], len(block)) == data


@pytest.mark.parametrize("shrinks", [range(0), range(0, SIZE, SIZE // 8)])
def test_what_does_not_shrink_is_left_alone(shrinks: range) -> None:
    """Nor what shrinks only in the few places that are looked at first."""
    data = bytearray(os.urandom(SIZE))
    for at in shrinks:
        data[at : at + 10_000] = bytes(10_000)
    block = memoryview(bytearray(data))
    assert pack(block) == 0
    assert block == data


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 70_000])
def test_small_blocks_are_compressed_too(size: int) -> None:
    block = memoryview(bytearray(size))
    packed = pack(block)
    assert unpack(block[:packed], size) == bytes(size) if packed else block == bytes(size)
    assert packed or size < 100


@pytest.mark.parametrize("damage", ["cut", "other", "longer"])
def test_damage_is_an_error_and_takes_no_more_memory_than_a_block(damage: str) -> None:
    target = memoryview(bytearray(SIZE))
    size = pack(target)
    packed, length = target[:size], SIZE
    if damage == "cut":
        packed = packed[: size // 2]
    elif damage == "other":
        packed = memoryview(b"no zstd at all")
    else:
        length = SIZE // 2
    with pytest.raises(TransferError, match="damaged"):
        unpack(packed, length)


def _yes() -> bool:
    return True


def _run(choice: Choice, plain: float, packed: float, blocks: int) -> list[bool]:
    """What is chosen on a link that takes so many seconds for a block of each kind, six at once."""
    kinds, now = [], 0.0
    asked: deque[tuple[bool, float]] = deque()
    for _ in range(blocks):
        while len(asked) < 6:
            asked.append((choice.packed(), now))
        kind, began = asked.popleft()
        now += packed if kind else plain
        choice.note(kind, SIZE, began, now)
        kinds.append(kind)
    return kinds


@pytest.mark.parametrize(("plain", "packed", "best"), [(0.04, 0.02, True), (0.02, 0.04, False)])
def test_what_is_faster_on_a_link_is_used(plain: float, packed: float, best: bool) -> None:
    kinds = _run(Choice(_yes), plain, packed, 1000)
    assert kinds.count(best) > 900
    assert kinds.count(not best) > 1000 // AGAIN // 2, "the other is tried now and then"


def test_a_link_that_changes_is_noticed() -> None:
    choice = Choice(_yes)
    _run(choice, 0.02, 0.04, 100)
    assert _run(choice, 0.08, 0.04, 200).count(True) > 100


def test_on_a_fast_link_it_is_not_even_tried() -> None:
    assert not any(_run(Choice(_yes), SIZE / FAST / 2, 0.0, 100 * TRIAL))


def test_where_no_processor_is_idle_it_is_not_even_tried() -> None:
    assert not any(_run(Choice(lambda: False), 0.04, 0.01, 100 * TRIAL))


def test_idle_processors_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ran, idle = 100.0, 0.0, 0.0
    monkeypatch.setattr("wheelmount.mount.transfer.compression.time.monotonic", lambda: now)
    processors = Processors(lambda: Times(ran, idle))
    assert not processors.spare(), "nothing is known yet"
    now, idle = now + IDLE_PERIOD, 1.0
    assert processors.spare()
    ran += 1.0
    assert processors.spare(), "not looked at again so soon"
    now += IDLE_PERIOD
    assert not processors.spare()
    now, ran, idle = now + IDLE_PERIOD, ran + 1 - 2 * IDLE, idle + 2 * IDLE
    assert processors.spare()


def test_this_machine_says_what_its_processors_do() -> None:
    processors = Processors()
    assert 0 <= processors._before[0] <= processors._before[1]
