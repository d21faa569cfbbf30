"""Positions in listings of directories that outlast a change of the tree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

Entries = list[tuple[bytes, int]]

DOT = -1
"""Stands for the inode number of ``.`` and ``..``."""

_SPAN = 1 << 32
"""A position is the generation of the listing times this, and the place of the next entry."""

_DOTS: Entries = [(b".", DOT), (b"..", DOT)]


class Listings:
    """Lists directories, each from beginning to end as it was in the beginning.

    Not for more than the last change of a directory: a listing that is older goes on at the same
    place of a later one.

    Args:
        entries: gives names and numbers of a directory as it is now, always in the same order.
        generation: of the tree that is in force, counted from 1.
    """

    def __init__(self, entries: Callable[[int], Entries], generation: int) -> None:
        self._entries = entries
        self.generation = generation
        self._former: dict[int, tuple[int, Entries]] = {}

    def change(self, directories: Iterable[int], flip: Callable[[], None]) -> None:
        """Put the next generation in force, by ``flip``; ``directories`` are listed anew in it."""
        former = {}
        for number in directories:
            with contextlib.suppress(OSError):  # there was no such directory
                former[number] = self.generation, self._entries(number)
        flip()
        self._former |= former
        self.generation += 1

    def is_current(self, position: int) -> bool:
        """Whether a listing at ``position`` (0: the beginning) is of the tree in force."""
        return position // _SPAN in (0, self.generation)

    def walk(self, number: int, position: int, limit: int) -> Iterator[tuple[int, bytes, int]]:
        """Give at most about ``limit`` entries of a directory.

        The dots come first: with them no listing is empty, and the kernel can be made to drop it.

        Returns:
            Position after an entry, its name, its number.
        """
        generation, place = divmod(position, _SPAN)
        generation = generation or self.generation
        last, former = self._former.get(number, (0, []))
        entries = former if generation <= last else self._entries(number)
        after = generation * _SPAN + place
        for name, child in chain(_DOTS[place:], entries[max(place - 2, 0) : place + limit]):
            after += 1
            yield after, name, child
