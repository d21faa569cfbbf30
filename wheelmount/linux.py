"""The version of Linux that this machine runs, and what it lets this process do."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

BENEATH = 6, 5
"""First version that can mount beneath another mount, and so replace a mount in one step."""

SYS_ADMIN = 21
"""Number of the capability to mount (linux/capability.h)."""


class ThreadClock:
    """The processor time of a thread, for other threads to read."""

    def __init__(self) -> None:
        self._clock: int | None = None
        self._seconds = 0.0

    def run(self, work: Callable[[], T]) -> T:
        """Measure the calling thread from now on, and do work on it."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        return work()

    def seconds(self) -> float:
        """Return the seconds that the thread has taken; 0.0 before ``run``."""
        if self._clock is not None:
            with contextlib.suppress(OSError):  # the thread has ended
                self._seconds = time.clock_gettime(self._clock)
        return self._seconds


def version() -> tuple[int, int]:
    """Return the first two numbers of the version; zeros if it has an unknown form."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def capabilities(kind: str) -> set[int]:
    """Return the numbers of this thread's capabilities, of a kind as ``/proc`` names it."""
    status = Path("/proc/thread-self/status").read_text(encoding="ascii", errors="replace")
    mask = int(re.findall(rf"^{kind}:\s*(\w+)", status, re.MULTILINE)[0], 16)
    return {number for number in range(mask.bit_length()) if mask >> number & 1}


def may_mount() -> bool:
    """Return whether this process may mount file systems: as root, or in its own namespace."""
    return SYS_ADMIN in capabilities("CapEff")


def maps_root() -> bool:
    """Return whether this process's user namespace has a root, as the machine's own has."""
    lines = Path("/proc/self/uid_map").read_bytes().splitlines()
    return any(line.split()[0] == b"0" for line in lines)
