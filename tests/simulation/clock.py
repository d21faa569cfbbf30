"""A loop of asyncio whose time jumps to whatever comes next."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class StuckError(Exception):
    """All wait for each other, and nothing is ever to happen."""


class Loop(asyncio.SelectorEventLoop):
    """Time passes only where all wait, and what is for a thread is done at once.

    Its heap holds tuples: to compare handles, as asyncio's does, is a third of the time that a
    simulation takes.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._number = itertools.count()
        super().__init__()

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self._now

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *arguments: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call a function at a time; those of one time in their order."""
        handle = asyncio.TimerHandle(when, callback, arguments, self, context)
        heapq.heappush(self._due, (when, next(self._number), handle))
        return handle

    def _timer_handle_cancelled(self, _handle: asyncio.TimerHandle) -> None:
        """Do nothing: it is passed over when its time has come."""

    def _run_once(self) -> None:
        """Run what is ready, or else what comes next."""
        ready, due = self._ready, self._due  # type: ignore[attr-defined]
        while due and not ready:
            when, _, handle = heapq.heappop(due)
            if not handle.cancelled():
                self._now = max(self._now, when)
                ready.append(handle)
        while due and due[0][0] <= self._now:
            handle = heapq.heappop(due)[2]
            if not handle.cancelled():
                ready.append(handle)
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            raise StuckError("nothing is ever to happen")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

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
