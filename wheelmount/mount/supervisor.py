"""Keeps a serving process alive: one that dies is started again, and those who wait do not notice.

The supervisor does nothing but hold the open ``/dev/fuse`` and wait; as long as that is open the
mount stands and its readers wait, and another process can go on where the last one ended.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

from wheelmount.mount import kernel

log = logging.getLogger("wheelmount")

STARTS, WINDOW = 5, 60.0
"""A process that had to be started so often in so many seconds is given up."""


def supervise(serve: Callable[[bool], None]) -> bool:
    """Run a function in a process of its own until it returns there.

    Args:
        serve: called in the process; told whether it takes over from one that died.

    Returns:
        False if it died too often.
    """
    starts: deque[float] = deque(maxlen=STARTS)
    while True:
        starts.append(time.monotonic())
        child = _fork(serve, resumed=len(starts) > 1)
        code = _await(child)
        if code == 0:
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
        kernel.die_with_parent()
        serve(resumed)
        code = 0
    except BaseException:
        log.exception("the server fails")
    finally:
        logging.shutdown()
        os._exit(code)


def _await(child: int) -> int:
    """Exit code of a child, negative for a signal; signals to end are passed on to it."""

    def forward(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, forward) for number in numbers]
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
