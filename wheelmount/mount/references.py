"""The kernel's references to inodes of a FUSE server."""

from __future__ import annotations

from array import array
from collections.abc import Callable


class References:
    """How often the kernel was told of each inode, and has not forgotten it.

    Args:
        forgotten: called with the number of an inode of which it has none left.
        counted_from: the least number of which nobody told the kernel before. How often it was
            told of lower ones is not known: they count as held until the end, without
            ``forgotten``.
    """

    def __init__(self, forgotten: Callable[[int], None], counted_from: int = 0) -> None:
        self._forgotten = forgotten
        self._counted_from = counted_from
        self._counts = array("Q")

    def of(self, number: int) -> int:
        """How many there are to an inode."""
        return self._count(number) + (number < self._counted_from)

    def _count(self, number: int) -> int:
        return self._counts[number] if number < len(self._counts) else 0

    def add(self, number: int) -> None:
        """The kernel was told of an inode."""
        if number >= len(self._counts):
            room = number + 1 + len(self._counts) // 2 - len(self._counts)
            self._counts.frombytes(bytes(self._counts.itemsize * room))
        self._counts[number] += 1

    def forget(self, number: int, times: int) -> None:
        """The kernel forgets that it was told of an inode so often."""
        left = max(self._count(number) - times, 0)
        if number < len(self._counts):
            self._counts[number] = left
        if not left and number >= self._counted_from:
            self._forgotten(number)
