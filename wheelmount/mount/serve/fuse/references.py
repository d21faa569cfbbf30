"""The kernel's references to inodes of a FUSE server."""

from __future__ import annotations

from array import array
from collections.abc import Callable

_PAGE = 512
"""Numbers of which the counts lie together: those that are told of together mostly do."""


class References:
    """How often the kernel was told of each inode, and has not forgotten it.

    Takes memory for numbers that the kernel holds, and those near them.

    Args:
        forgotten: called with the number of an inode of which it has none left.
        counted_from: the least number of which nobody told the kernel before. How often it was
            told of lower ones is not known: they count as held until the end, without
            ``forgotten``.
    """

    def __init__(self, forgotten: Callable[[int], None], counted_from: int = 0) -> None:
        self._forgotten = forgotten
        self._counted_from = counted_from
        self._pages: dict[int, array[int]] = {}
        self._held: dict[int, int] = {}  # by page, how many of its counts are not 0

    def of(self, number: int) -> int:
        """How many there are to an inode."""
        return self._count(number) + (number < self._counted_from)

    def _count(self, number: int) -> int:
        page = self._pages.get(number // _PAGE)
        return page[number % _PAGE] if page is not None else 0

    def add(self, number: int) -> None:
        """The kernel was told of an inode."""
        which, place = divmod(number, _PAGE)
        page = self._pages.get(which)
        if page is None:
            page = self._pages[which] = array("Q", bytes(8 * _PAGE))
            self._held[which] = 0
        if not page[place]:
            self._held[which] += 1
        page[place] += 1

    def forget(self, number: int, times: int) -> None:
        """The kernel forgets that it was told of an inode so often."""
        which, place = divmod(number, _PAGE)
        page = self._pages.get(which)
        left = 0
        if page is not None and page[place]:
            left = page[place] = max(page[place] - times, 0)
            if not left:
                self._held[which] -= 1
                if not self._held[which]:
                    del self._pages[which], self._held[which]
        if not left and number >= self._counted_from:
            self._forgotten(number)
