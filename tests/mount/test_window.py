"""How many blocks are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from wheelmount.mount.transfer.window import FAR, LEAST, MOMENT, Window


def _run(work: Callable[[Window], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work(Window(usual=4, most=16)), 10)

    asyncio.run(main())


def test_there_are_fewer_over_a_slow_link_and_more_over_a_long_one() -> None:
    async def work(window: Window) -> None:
        for _ in range(20):
            window.note(0, 2 * MOMENT)
        assert window.limit == LEAST
        for _ in range(20):
            window.note(0, MOMENT * 0.9)
        assert window.limit == LEAST, "it takes as long as it may"
        for _ in range(20):
            window.note(0, MOMENT / 10)
        assert window.limit == 4
        for _ in range(20):
            window.note(10 * FAR, FAR)
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
            window.note(0, 2 * MOMENT)
        with window.reading():
            waiting = asyncio.ensure_future(window.room())
            await asyncio.sleep(0.05)
            assert not waiting.done()
        await waiting

    _run(work)
