"""The kernel's references to inodes of a FUSE server."""

from __future__ import annotations

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
        self._counts: dict[int, int] = {}

    def of(self, number: int) -> int:
        """How many there are to an inode."""
        return self._counts.get(number, 0) + (number < self._counted_from)

    def add(self, number: int) -> None:
        """The kernel was told of an inode."""
        self._counts[number] = self._counts.get(number, 0) + 1

    def forget(self, number: int, times: int) -> None:
        """The kernel forgets that it was told of an inode so often."""
        left = self._counts.get(number, 0) - times
        if left > 0:
            self._counts[number] = left
            return
        self._counts.pop(number, None)
        if number >= self._counted_from:
            self._forgotten(number)
