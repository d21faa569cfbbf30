"""The kernel's references to inodes of a FUSE server."""

from __future__ import annotations

from array import array
from collections.abc import Callable

_PAGE = 512
"""Counts in one page: inodes that are looked up together have mostly near numbers."""


class References:
    """Counts the kernel's references to each inode: answers that named it, less those forgotten.

    Takes memory only for numbers that the kernel holds, and those near them.

    Args:
        forgotten: called with the number of an inode that has no reference left.
        counted_from: the least number that no earlier server told the kernel. References to
            lower numbers are unknown: they count as held until the end, without
            ``forgotten``.
    """

    def __init__(self, forgotten: Callable[[int], None], counted_from: int = 0) -> None:
        self._forgotten = forgotten
        self._counted_from = counted_from
        self._pages: dict[int, array[int]] = {}
        self._held: dict[int, int] = {}  # by page, number of counts that are not 0

    def of(self, number: int) -> int:
        """Return the references to an inode."""
        return self._count(number) + (number < self._counted_from)

    def _count(self, number: int) -> int:
        page = self._pages.get(number // _PAGE)
        return page[number % _PAGE] if page is not None else 0

    def add(self, number: int) -> None:
        """Count one more reference to an inode."""
        which, place = divmod(number, _PAGE)
        page = self._pages.get(which)
        if page is None:
            page = self._pages[which] = array("Q", bytes(8 * _PAGE))
            self._held[which] = 0
        if not page[place]:
            self._held[which] += 1
        page[place] += 1

    def forget(self, number: int, times: int) -> None:
        """Take back a number of references to an inode."""
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
