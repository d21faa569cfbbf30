"""A tree that stays in its description, for a process that serves it for months.

What is kept of a description (see ``Layout.encode``) is where each inode and each directory lies in
it. The description itself stays in its file, which is mapped; whatever is asked for is unpacked
each time. That takes 20 bytes an inode instead of the thousand of Python's objects.
"""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgpack

from wheelmount.mount.snapshot.layout import Cut, Layout, check_version
from wheelmount.mount.snapshot.tree import Inode, TreeView

RECENT_INODES, RECENT_NAMES = 1024, 64
"""How many stay unpacked: whoever asks for one often comes again, or for another name."""

_T = TypeVar("_T")


class _Records(Mapping[int, _T], Generic[_T]):
    """Parts of a description by number, in memory that grows with the parts, not with the numbers.

    Where each lies is in sorted arrays, which a tree shares with those that follow from it, and of
    what is other there in a dict, until that is large.

    Args:
        description: the whole.
        make: makes from a part, unpacked, what it stands for.
        recent: how many stay unpacked.
        before: of the tree that this one follows from, to begin with.
    """

    def __init__(
        self,
        description: memoryview,
        make: Callable[[tuple[Any, ...]], _T],
        recent: int,
        before: _Records[_T] | None,
    ) -> None:
        self._numbers: array[int] = before._numbers if before is not None else array("Q")
        self._begins: array[int] = before._begins if before is not None else array("Q")
        self._lengths: array[int] = before._lengths if before is not None else array("I")
        self._later: dict[int, tuple[int, int]] = before._later.copy() if before is not None else {}
        self._bulk = before is None

        @lru_cache(recent)
        def unpacked(number: int) -> _T:
            begin, length = self._find(number)
            if not length:
                raise KeyError(number)
            part = description[begin : begin + length]
            return make(msgpack.unpackb(part, strict_map_key=False, use_list=False))

        self._unpacked = unpacked

    def _find(self, number: int) -> tuple[int, int]:
        """Where a part begins, and its length; 0 if there is none."""
        later = self._later.get(number)
        if later is not None:
            return later
        if number < 0:
            return 0, 0
        place = bisect_left(self._numbers, number)
        if place == len(self._numbers) or self._numbers[place] != number:
            return 0, 0
        return self._begins[place], self._lengths[place]

    def place(self, number: int, begin: int, end: int) -> None:
        """Say where a part lies; nowhere, if it has no length."""
        numbers = self._numbers
        if self._bulk and (not numbers or number > numbers[-1]):
            numbers.append(number)
            self._begins.append(begin)
            self._lengths.append(end - begin)
        else:
            self._later[number] = begin, end - begin

    def settle(self) -> None:
        """Sort in what is other than before, if it is much; all was placed."""
        self._bulk = False
        if len(self._later) <= len(self._numbers) // 4:
            return
        numbers = sorted(self)
        places = [self._find(number) for number in numbers]
        self._numbers = array("Q", numbers)
        self._begins = array("Q", (begin for begin, _ in places))
        self._lengths = array("I", (length for _, length in places))
        self._later = {}

    def differing(self, other: _Records[_T]) -> Iterable[int]:
        """Numbers of all parts that may differ from another tree's, and perhaps of others."""
        if self._numbers is other._numbers:
            return self._later.keys() | other._later.keys()
        return {*self, *other}

    def keys(self) -> _Keys:
        """The numbers, which are quickly compared with those of a tree that follows."""
        return _Keys(self)

    def __getitem__(self, number: int) -> _T:
        return self._unpacked(number)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self._find(number)[1] > 0

    def __iter__(self) -> Iterator[int]:
        later = self._later
        yield from (number for number in self._numbers if number not in later)
        yield from (number for number, (_, length) in later.items() if length)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Keys(KeysView[int]):
    """Numbers of parts."""

    _mapping: _Records[Any]

    def __sub__(self, other: Iterable[object]) -> set[int]:
        mine = self._mapping
        if not isinstance(other, _Keys):
            return set(mine) - set(other)
        its = other._mapping
        return {number for number in mine.differing(its) if number in mine and number not in its}


class MappedTree(TreeView):
    """A tree in a description; its files' stamps at the source are left out.

    Args:
        description: one, or several of which each follows from the one ahead of it.
        begin: where in it those begin that are not part of ``before``.
        before: the tree that they follow from, whose description was the same up to there.
    """

    inodes: _Records[Inode]
    names: _Records[dict[bytes, int]]

    def __init__(self, description: memoryview, begin: int, before: MappedTree | None) -> None:
        self.description = description
        self._before = before
        unpacker = msgpack.Unpacker(strict_map_key=False, use_list=False, max_buffer_size=0)
        unpacker.feed(description[begin:])
        while begin + unpacker.tell() < len(description):
            self._follow(unpacker, begin)
        self._before = None

    def differing(self, before: TreeView) -> Iterable[int]:
        """A tree that is read from its description; as ``TreeView`` says."""
        if not isinstance(before, MappedTree):
            return super().differing(before)
        directories = {*self.inodes.differing(before.inodes), *self.names.differing(before.names)}
        return (number for number in directories if number in self.names)

    def _follow(self, unpacker: Any, begin: int) -> None:
        unpacker.read_array_header()
        check_version(unpacker.unpack())
        before = self._before if unpacker.unpack() else None
        self.identity, self.block_size, self.limit = (unpacker.unpack() for _ in range(3))
        inodes, names = (before.inodes, before.names) if before is not None else (None, None)
        self.inodes = _Records(self.description, _inode, RECENT_INODES, inodes)
        self.names = _Records(self.description, _names, RECENT_NAMES, names)
        records: tuple[_Records[Any], ...] = (self.inodes, self.names)
        for kind in records:
            for _ in range(unpacker.read_array_header()):
                start = unpacker.tell()
                number = unpacker.unpack()[0]
                kind.place(number, begin + start, begin + unpacker.tell())
        for number in unpacker.unpack():
            self.inodes.place(number, 0, 0)
            self.names.place(number, 0, 0)
        for kind in records:
            kind.settle()
        self.fresh, self.copies = unpacker.unpack(), dict(unpacker.unpack())
        self._before = self


def _inode(part: tuple[Any, ...]) -> Inode:
    return Inode._make(part[1:-3])


def _names(part: tuple[int, dict[bytes, int]]) -> dict[bytes, int]:
    return part[1]


class Mapped(Cut):
    """A mapped tree and the place of its bytes.

    Args:
        path: of its description, which is mapped.
        begin: see ``MappedTree``.
        before: what it follows from.
    """

    tree: MappedTree

    def __init__(self, path: Path, begin: int = 0, before: Mapped | None = None) -> None:
        with path.open("rb") as file:
            description = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        tree = MappedTree(
            description, begin if before is not None else 0, before.tree if before else None
        )
        super().__init__(tree, tree.block_size, tree.fresh, tree.copies, tree.identity)


PAGE = mmap.PAGESIZE
"""Bytes of a page, the unit in which tmpfs allocates memory."""


def pages(size: int) -> int:
    """Bytes of the pages that so many bytes lie in."""
    return -(-size // PAGE) * PAGE


def holes(inode: Inode) -> int:
    """Bytes of the pages that a file has no bytes in (up to a page too many for each piece)."""
    return pages(inode.size) - inode.held if inode.pieces is not None else 0


@dataclass(frozen=True, slots=True)
class Summary:
    """What there is to say about a generation without its tree.

    Attributes:
        files: number of its files.
        inodes: number of files, directories and symlinks.
        size: bytes of the files, holes not counted.
        room: bytes of them in whole pages, holes included.
        blocks: number of the blocks that travelled for it.
        predecessor: number of the generation that it was made from; 0 for none.
        follows: bytes at the beginning of its description that are those of the one before.
        whole: bytes of the last description of a whole tree in it.
        holes: bytes of the files' holes, in whole pages: part of ``room``.
    """

    files: int
    inodes: int
    size: int
    room: int
    blocks: int
    predecessor: int
    follows: int
    whole: int
    holes: int

    @classmethod
    def of(cls, layout: Layout, predecessor: int, follows: int, whole: int) -> Summary:
        """Sum up a layout; the other arguments are attributes."""
        inodes = layout.tree.inodes.values()
        files = [inode for inode in inodes if inode.is_file]
        return cls(
            len(files),
            len(inodes),
            sum(inode.held for inode in files),
            sum(pages(inode.size) for inode in files),
            layout.blocks,
            predecessor,
            follows,
            whole,
            sum(map(holes, files)),
        )
