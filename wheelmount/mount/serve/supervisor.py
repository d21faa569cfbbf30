"""Keeps a serving process alive: one that dies is started again, and those who wait do not notice.

The supervisor does nothing but hold the open ``/dev/fuse`` and wait; as long as that is open the
mount stands and its readers wait, and another process can go on where the last one ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

from wheelmount.mount.kernel import syscalls

log = logging.getLogger("wheelmount")

ENDS = signal.SIGTERM, signal.SIGINT
"""Signals to end."""

STARTS, WINDOW = 5, 60.0
"""A process that had to be started so often in so many seconds is given up."""


def hold_back() -> None:
    """Have signals to end wait until ``let_through``; after that they are ignored.

    Called before there are threads. A process that is on its way to its end is so not ended before
    it has cleaned up.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)  # what is held back waits all the same: signal(7)


def let_through() -> None:
    """Have signals to end come, also those that came before; where there is a handler."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)


def supervise(serve: Callable[[bool], None], stands: Callable[[], bool]) -> bool:
    """Run a function in a process of its own until it returns there.

    Signals to end are passed on to that process, and ignored when all has ended.

    Args:
        serve: called in the process, with signals held back; told whether it takes over from one
            that died.
        stands: whether there is anything left to serve.

    Returns:
        False if it died too often.
    """
    starts: deque[float] = deque(maxlen=STARTS)
    asked: list[int] = []
    child = 0

    def forward(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        if child:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(child, number)

    while True:
        starts.append(time.monotonic())
        hold_back()
        child = _fork(serve, resumed=len(starts) > 1)
        for number in ENDS:
            signal.signal(number, forward)
        if asked:  # of the one that died
            os.kill(child, asked[-1])
        let_through()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        hold_back()
        if code == 0 or (asked and not stands()):
            return True
        end = f"by signal {-code}" if code < 0 else f"with code {code}"
        if len(starts) == STARTS and time.monotonic() - starts[0] < WINDOW:
            log.error("the server ended %s, again; it is given up", end)
            return False
        log.error("the server ended %s; another goes on", end)


def _fork(serve: Callable[[bool], None], *, resumed: bool) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        syscalls.die_with_parent()
        serve(resumed)
        code = 0
    except BaseException:
        log.exception("the server fails")
    finally:
        logging.shutdown()
        os._exit(code)
