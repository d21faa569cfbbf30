"""Serialize bursts of short system calls: threads contend for the interpreter lock at each."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 16
"""Files that all threads may open at the same time; of more, one thread at a time: several would do
little else than take the interpreter from each other."""

PER_FILE = 1e-4
"""Seconds that a thread may take for each file; ten times what a processor needs. If it takes more
it waits for a disk, where several are faster."""

GLANCE, LONGEST = 0.01, 1.0
"""Seconds between looks at whether it does, and until a thread goes on in any case."""


class BurstLock:
    """Whose turn it is among the threads of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0  # when the holder should be done

    @contextmanager
    def hold(self, files: int) -> Iterator[None]:
        """While so many files are opened; waits for others first if they are many."""
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
        while not self._lock.acquire(timeout=GLANCE):
            if time.monotonic() > min(self._until, deadline):
                return False
        return True
