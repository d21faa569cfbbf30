"""Requests of the kernel that are answered later: tasks of trio, each of which it may take back."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from wheelmount.mount.fusewire import Wire

log = logging.getLogger("wheelmount")

Task = Callable[..., Awaitable[object]]
"""Answers a request, whose ``unique`` is its first argument."""


class Later:
    """To be made in trio's thread; ``start`` and ``end`` may be called in others.

    Args:
        wire: where answers go, if a task fails.
        nursery: runs the tasks.
    """

    def __init__(self, wire: Wire, nursery: trio.Nursery) -> None:
        self._wire = wire
        self._nursery = nursery
        self._token = trio.lowlevel.current_trio_token()
        self._waiting: dict[int, trio.CancelScope] = {}

    def start(self, task: Task, unique: int, *arguments: Any) -> None:
        """Have a request answered by a task."""
        self._soon(self._start, task, unique, *arguments)

    def end(self, unique: int) -> None:
        """Answer a request that waits with EINTR: nobody waits for it any more."""
        # In the order of arrival: a read that this interrupts is among those that wait by then.
        self._soon(self._end, unique)

    def _soon(self, function: Callable[..., object], *arguments: Any) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function, *arguments)

    def _start(self, task: Task, unique: int, *arguments: Any) -> None:
        scope = self._waiting[unique] = trio.CancelScope()
        self._nursery.start_soon(self._run, scope, task, unique, *arguments)

    def _end(self, unique: int) -> None:
        if unique in self._waiting:
            self._waiting[unique].cancel()

    async def _run(self, scope: trio.CancelScope, task: Task, unique: int, *arguments: Any) -> None:
        try:
            with scope:
                await task(unique, *arguments)
        except OSError as error:
            self._wire.fail(unique, error)
        except Exception:
            log.exception("cannot answer what waited")
            self._wire.answer(unique, error=errno.EIO)
        finally:
            del self._waiting[unique]
        if scope.cancelled_caught:
            self._wire.answer(unique, error=errno.EINTR)
