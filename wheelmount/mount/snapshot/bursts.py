"""Serialize bursts of short system calls: threads contend for the interpreter lock at each call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 16
"""Most files in a burst that any number of threads may run at once. Longer bursts run one thread at
a time: several threads would do little but take the interpreter lock from each other."""

PER_FILE = 1e-4
"""Seconds for each file of a burst, ten times what a processor needs. A thread that takes longer
waits for a disk, where several threads are faster than one."""

POLL_INTERVAL, LONGEST = 0.01, 1.0
"""Seconds between checks whether the holder of the lock is late, and until a waiting thread goes on
in any case."""


class BurstLock:
    """A lock that serializes bursts of short system calls among threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0  # the time at which the holder should be done

    @contextmanager
    def hold(self, files: int) -> Iterator[None]:
        """Hold the lock while a number of files is opened, if that is more than ``MANY``.

        Runs without the lock if its holder takes longer than ``PER_FILE`` allows.
        """
        alone = files > MANY and self._take()
        if alone:
            self._until = time.monotonic() + files * PER_FILE
        try:
            yield
        finally:
            if alone:
                self._lock.release()

    def _take(self) -> bool:
        deadline = time.monotonic() + LONGEST
        while not self._lock.acquire(timeout=POLL_INTERVAL):
            if time.monotonic() > min(self._until, deadline):
                return False
        return True
