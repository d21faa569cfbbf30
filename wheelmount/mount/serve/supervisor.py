"""Restart a serving process that dies, so that waiting readers do not notice.

The supervisor only holds the open ``/dev/fuse`` and waits. As long as that descriptor is open, the
mount exists, its readers wait, and another serving process can continue.
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
"""Signals that end the process."""

STARTS, WINDOW = 5, 60.0
"""Number of starts within a number of seconds after which the process is not started again."""


def hold_back() -> None:
    """Block the signals that end a process until ``let_through``, and ignore them afterwards.

    A process that is already ending is thereby not killed before it has cleaned up. Must be called
    before the process has threads.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)  # blocked signals stay pending: signal(7)


def let_through() -> None:
    """Unblock those signals of ``ENDS`` that have a handler, and deliver pending ones."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)


def supervise(serve: Callable[[bool], None], stands: Callable[[], bool]) -> bool:
    """Run a function in a child process, again when that dies, until it returns.

    Signals that end the process are passed on to the child, and ignored after its end.

    Args:
        serve: called in the child, with signals blocked; its argument is whether the child takes
            over from one that died.
        stands: returns whether the mount still exists.

    Returns:
        False if the child died too often.
    """
    starts: deque[float] = deque(maxlen=STARTS)
    asked: list[int] = []
    child = 0

    def forward(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        if child:
            with contextlib.suppress(ProcessLookupError):  # the child has just ended
                os.kill(child, number)

    while True:
        starts.append(time.monotonic())
        hold_back()
        child = _fork(serve, resumed=len(starts) > 1)
        for number in ENDS:
            signal.signal(number, forward)
        if asked:  # the child that died was told to end
            os.kill(child, asked[-1])
        let_through()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        hold_back()
        if code == 0 or (asked and not stands()):
            return True
        end = f"by signal {-code}" if code < 0 else f"with code {code}"
        if len(starts) == STARTS and time.monotonic() - starts[0] < WINDOW:
            log.error("the server ended %s, too often; it is not restarted", end)
            return False
        log.error("the server ended %s; restarting it", end)


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
