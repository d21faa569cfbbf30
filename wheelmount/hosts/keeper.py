"""Keep a worker running whatever its clients do.

If Monarch's worker cannot deliver a report to a client, as when a client ends while a host is too
busy to answer, its process exits with code 1 and prints nothing (torchmonarch 0.7.0). So the worker
is a child process, and its parent, which does not load Monarch, starts it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from types import FrameType

PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before a new start; they double, up to the second, while starts are in vain."""

OF_MONARCH = 1
"""Exit code with which Monarch ends a worker; wheelmount's own errors have others."""

IN_VAIN = 10.0
"""Seconds within whose lapse a worker that ended was started in vain."""

SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
"""Signals that end a worker."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_told: int | None = None  # pipe to the parent


def keep() -> None:
    """Return in a child process, and in another one whenever one has ended that served.

    The parent passes SIGINT, SIGTERM and SIGHUP on, which end the child at once, and exits with the
    child's code, or with 128 and the number of its signal. What is to be removed at the end is the
    parent's. Call this before Monarch is imported, as its threads would be missing in the child.
    """
    global _told
    pause = PAUSE
    while True:
        since = time.monotonic()
        hears, tells = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(hears)
            _told = tells
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in SIGNALS:  # Monarch, in a forked process, lets Python handle none
                signal.signal(number, signal.SIG_DFL)
            return
        os.close(tells)
        os.set_blocking(hears, False)
        status, told_to_end = _await(child)
        served = _has_served(hears)
        os.close(hears)
        code = os.waitstatus_to_exitcode(status)
        if told_to_end or not served or not (code == OF_MONARCH or code < 0):
            sys.exit(code if code >= 0 else 128 - code)
        pause = PAUSE if time.monotonic() - since > IN_VAIN else min(2 * pause, LONGEST_PAUSE)
        print(_words(code), file=sys.stderr, flush=True)
        time.sleep(pause)


def serves() -> None:
    """Tell the parent that this process serves from now on."""
    if _told is not None:
        os.write(_told, b"1")


def _await(child: int) -> tuple[int, bool]:
    """Wait for a child's end; return its status, and whether this process was told to end."""
    told = False

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal told
        told = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        while True:
            ended, status = os.wait()  # in a container, also for orphans
            if ended == child:
                return status, told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_served(pipe: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        return os.read(pipe, 1) != b""
    return False


def _words(code: int) -> str:
    how = f"signal {-code}" if code < 0 else f"code {code}"
    why = ", as when a client ends before its last messages" if code == OF_MONARCH else ""
    return (
        f"worker: Monarch ended ({how}{why}). The worker is started again; "
        "commands that ran on this host are lost."
    )
