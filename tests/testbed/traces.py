"""What a lab has on the machine, to be looked for when it is gone."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from pathlib import Path

import psutil

from tests.testbed.lab import Lab

KINDS = "uts", "ipc", "net", "pid"
"""Namespaces by which the processes of a host are known; one may make its own for mounts."""

GRACE = 10.0
"""Seconds that what was killed has to be gone."""


class Traces:
    """Processes and namespaces of labs and of the process that made them, as they are now.

    Args:
        maker: process that made the labs; default this one.
        besides: what was there before and does not count.
    """

    def __init__(self, maker: int | None = None, besides: Traces | None = None) -> None:
        family: set[psutil.Process] = set(psutil.Process(maker).children(recursive=True))
        own = _namespaces(os.getpid())
        held = {name for process in family for name in _namespaces(process.pid)} - own
        self.processes: set[psutil.Process] = family
        self.namespaces: set[str] = held
        # The kernel gives numbers out again, of a host that a test kills even during the test. The
        # number of a namespace that is open here stays that of this one.
        for process in family:
            with contextlib.suppress(OSError):  # it is gone
                open_here = os.open(f"/proc/{process.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, open_here)
        if besides is not None:
            self.processes -= besides.processes
            self.namespaces -= besides.namespaces

    def __len__(self) -> int:
        return len(self.namespaces)

    def left(self) -> list[str]:
        """What is still there of them; waits for it to go, for a bounded time."""
        deadline = time.monotonic() + GRACE
        while (found := self._look()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _look(self) -> list[str]:
        found = [str(process) for process in self.processes if process.is_running()]
        for pid in map(int, (path.name for path in Path("/proc").glob("[0-9]*"))):
            held = _namespaces(pid)
            if held and held <= self.namespaces:
                found.append(f"process {pid} in {sorted(held)}")
        return found


def _namespaces(pid: int) -> set[str]:
    with contextlib.suppress(OSError):  # it is gone, or about to be
        return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS}
    return set()


def seen_outside(lab: Lab) -> list[str]:
    """Network devices and mounts of a lab that show outside of it."""
    devices = [name for name in os.listdir("/sys/class/net") if name in {*lab.names, "bridge"}]
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    return devices + [line for line in lines if "upperdir=/run/upper" in line]
