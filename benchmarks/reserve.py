"""Memory that a virtual machine has got already, kept for those who are measured.

Such a machine may give free memory back to the one it runs on within seconds, and is then slow to
get it again: here 0.4 GB/s, and 3 GB/s where it was not given back. Whoever takes memory next pays
for that, so that it matters more who went before than what is measured.
"""

from __future__ import annotations

import mmap
import threading

import psutil
from typing_extensions import Self

PIECE = 64 << 20
PAGE = 4096
POLL_INTERVAL = 0.02
"""Seconds between looks at what is free."""


class Reserve:
    """All memory but some, given back as it is needed. A context manager.

    Args:
        free: bytes that are free meanwhile.
    """

    def __init__(self, free: int) -> None:
        self._free = free
        self._held: list[mmap.mmap] = []
        self._turn = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._give, daemon=True)

    def fill(self) -> None:
        """Take all that is free again."""
        while psutil.virtual_memory().free > self._free + 2 * PIECE:
            piece = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            piece.madvise(mmap.MADV_HUGEPAGE)
            for offset in range(0, PIECE, PAGE):
                piece[offset] = 1
            with self._turn:
                self._held.append(piece)

    def _give(self) -> None:
        while not self._ended.wait(POLL_INTERVAL):
            lacking = self._free - psutil.virtual_memory().free
            while lacking > 0 and self._held:
                with self._turn:
                    self._held.pop().close()
                lacking -= PIECE

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ended.set()
        self._thread.join()
        while self._held:
            self._held.pop().close()
