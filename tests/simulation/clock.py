"""A loop of asyncio whose time jumps to whatever comes next."""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class StuckError(Exception):
    """All wait for each other, and nothing is ever to happen."""


class _Jumping(selectors.SelectSelector):
    """Waits for nothing but the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StuckError("nothing is ever to happen")
        self.now += max(timeout, 0.0)
        return []


class Loop(asyncio.SelectorEventLoop):
    """Time passes only where all wait, and what is for a thread is done at once."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self._jumping.now

    def run_in_executor(  # type: ignore[override]
        self, _executor: Any, work: Callable[..., Result], *arguments: Any
    ) -> asyncio.Future[Result]:
        """Do it now."""
        done: asyncio.Future[Result] = self.create_future()
        try:
            done.set_result(contextvars.copy_context().run(work, *arguments))
        except Exception as error:
            done.set_exception(error)
        return done
