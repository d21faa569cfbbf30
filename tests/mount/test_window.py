"""How many blocks are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from wheelmount.mount.transfer.window import (
    FAST,
    LONG,
    LULL,
    MAX_SECONDS,
    MIN_LIMIT,
    SLOW,
    Order,
    Window,
)


def _run(work: Callable[[Window], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work(Window(usual=4, long=16)), 10)

    asyncio.run(main())


def test_there_are_fewer_over_a_slow_link_and_more_over_a_long_one() -> None:
    async def work(window: Window) -> None:
        for _ in range(20):
            window.note(0, 2 * MAX_SECONDS)
        assert window.limit == MIN_LIMIT
        for _ in range(20):
            window.note(0, MAX_SECONDS * 0.9)
        assert window.limit == MIN_LIMIT, "it takes as long as it may"
        for _ in range(20):
            window.note(0, MAX_SECONDS / 10)
        assert window.limit == 4
        for _ in range(20):
            window.note(10 * LONG, LONG)
        assert window.limit == 16

    _run(work)


def test_what_others_ask_for_waits_for_its_turn_and_comes_before_what_is_next() -> None:
    async def work(window: Window) -> None:
        for _ in range(4):
            window.begin()
        begun: list[str] = []

        async def ask(name: str, turn: Awaitable[None]) -> None:
            await turn
            begun.append(name)

        names = {"next": window.room(), "first": window.turn(1), "second": window.turn(2)}
        asking = [asyncio.ensure_future(ask(*each)) for each in names.items()]
        await asyncio.sleep(0)
        window.hurry(2)
        await asyncio.sleep(0)
        assert (begun, window.count) == (["second"], 5)
        for _ in range(2):
            window.end()
        await asyncio.sleep(0)
        assert (begun, window.count) == (["second", "first"], 4)
        window.end()
        await asyncio.gather(*asking)
        assert (begun, window.count) == (["second", "first", "next"], 3)

    _run(work)


def test_over_a_slow_link_nothing_is_begun_ahead_of_a_reader() -> None:
    async def work(window: Window) -> None:
        for _ in range(20):
            window.note(0, 2 * MAX_SECONDS)
        with window.reading():
            waiting = asyncio.ensure_future(window.room())
            await asyncio.sleep(0.05)
            assert not waiting.done()
        await waiting

    _run(work)


def test_over_a_slow_link_few_are_begun_beside_a_reader_and_between_its_reads() -> None:
    async def work(window: Window) -> None:
        window.begin()
        for _ in range(20):
            window.note(0, 2 * SLOW)
        assert window.limit == 4
        window.begin()
        await window.room()
        with window.reading():
            waiting = asyncio.ensure_future(window.room())
            await asyncio.sleep(0)
            assert not waiting.done()
            clock = asyncio.get_running_loop().time
            ended = clock()
        await waiting
        assert clock() - ended >= LULL, "it may read on"

    _run(work)


def test_over_a_fast_link_a_reader_keeps_nothing_back() -> None:
    async def work(window: Window) -> None:
        window.begin()
        for _ in range(20):
            window.note(0, SLOW / 10)
        window.begin()
        with window.reading():
            await window.room()

    _run(work)


def test_blocks_behind_one_that_a_reader_waits_for_are_next() -> None:
    order = Order(range(0, 20, 2))
    assert [order.pop() for _ in range(3)] == [0, 2, 4]
    order.follow(13)
    assert [order.pop() for _ in range(2)] == [14, 16]
    order.follow(7)
    assert [order.pop() for _ in range(6)] == [8, 10, 12, 18, 6, None]
    order.follow(0)
    assert order.pop() is None


def test_blocks_that_are_to_come_first_do_so_from_the_one_on_that_a_reader_waits_for() -> None:
    order = Order(range(0, 20, 2), {place: rank for rank, place in enumerate((14, 7, 6, 99, 2))})
    assert [order.pop() for _ in range(3)] == [14, 6, 2]
    assert [order.pop() for _ in range(2)] == [0, 4]
    order.follow(14)
    assert order.pop() == 8, "those behind it have been fetched"
    order = Order(range(0, 20, 2), {place: rank for rank, place in enumerate((14, 7, 6, 99, 2))})
    order.follow(7)
    assert [order.pop() for _ in range(3)] == [6, 2, 0]
    order.follow(11)
    assert [order.pop() for _ in range(6)] == [12, 16, 18, 14, 4, 8]


def test_there_are_more_over_a_very_fast_link_to_a_host_with_many_processors() -> None:
    async def main() -> None:
        few, many = Window(usual=2, long=2), Window(usual=2, long=2, fast=6)
        for window in (few, many):
            for _ in range(20):
                window.note(0, FAST / 2)
        assert (few.limit, many.limit) == (2, 6)
        slower = Window(usual=2, long=2, fast=6)
        for _ in range(20):
            slower.note(0, 10 * FAST)
        assert slower.limit <= 6
        assert Window(usual=8, long=8, fast=6).limit == 8

    asyncio.run(main())
