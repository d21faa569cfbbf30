"""What a lab has on the machine, to be looked for when it is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from tests.testbed.lab import Lab

KINDS = "mnt", "uts", "ipc", "net", "pid"

GRACE = 10.0
"""Seconds that what was killed has to be gone."""


class Traces:
    """Namespaces and processes of labs and of the process that made them, as they are now.

    Args:
        maker: process that made the labs; default this one.
        besides: what was there before and does not count.
    """

    def __init__(self, maker: int | None = None, besides: Traces | None = None) -> None:
        family: set[psutil.Process] = set(psutil.Process(maker).children(recursive=True))
        known: set[str] = _namespaces([os.getpid()])
        if besides is not None:
            family -= besides._processes
            known |= besides._namespaces
        self._processes: set[psutil.Process] = family
        self._namespaces: set[str] = _namespaces(process.pid for process in family) - known

    def __len__(self) -> int:
        return len(self._namespaces)

    def left(self) -> list[str]:
        """What is still there of them; waits for it to go, for a bounded time."""
        deadline = time.monotonic() + GRACE
        while (found := self._look()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _look(self) -> list[str]:
        found = [str(process) for process in self._processes if process.is_running()]
        held = _namespaces(int(path.name) for path in Path("/proc").glob("[0-9]*"))
        found += sorted(self._namespaces & held)
        mounts = Path("/proc/self/mountinfo").read_text()
        return found + [name for name in self._namespaces if name in mounts]


def _namespaces(pids: Iterable[int]) -> set[str]:
    found: set[str] = set()
    for pid in pids:
        for kind in KINDS:
            try:
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
            except OSError:  # it is gone, or about to be
                continue
    return found


def seen_outside(lab: Lab) -> list[str]:
    """Network devices and mounts of a lab that show outside of it."""
    devices = [name for name in os.listdir("/sys/class/net") if name in {*lab.names, "bridge"}]
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return devices + [line for line in lines if "upperdir=/run/upper" in line]
