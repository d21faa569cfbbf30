"""A tree that is read on demand from its encoded description, in little memory.

A serving process keeps a tree for months. It holds only the position of each inode and each
directory in the description that ``Layout.encode`` made. The description stays in its file, which
is mapped into memory; an inode or a directory is unpacked when it is read. That takes 20 bytes an
inode, while Python's objects take about a thousand.
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
"""Numbers of inodes and of directories that stay unpacked: the kernel often asks again for the same
inode, or for another name in the same directory."""

_T = TypeVar("_T")


class _Records(Mapping[int, _T], Generic[_T]):
    """A mapping from numbers to the records (inodes or directories) of a description.

    The positions of the records are kept in sorted arrays, so memory grows with their count, not
    with the largest number. A tree shares the arrays with the trees that follow from it; positions
    that differ are kept in a dict, and merged into new arrays when they are many.

    Args:
        description: the whole description.
        make: converts an unpacked record to a value.
        recent: number of values that stay unpacked.
        before: records of the tree that this tree follows from, to start with.
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
        """Return position and length of a record in bytes; length 0 if there is none."""
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
        """Set the position of a record in bytes; remove the record if it has no length."""
        numbers = self._numbers
        if self._bulk and (not numbers or number > numbers[-1]):
            numbers.append(number)
            self._begins.append(begin)
            self._lengths.append(end - begin)
        else:
            self._later[number] = begin, end - begin

    def settle(self) -> None:
        """Merge the changed positions into sorted arrays if they are many.

        Call after the last ``place``.
        """
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
        """Return the numbers of all records that differ from another tree's, perhaps with more."""
        if self._numbers is other._numbers:
            return self._later.keys() | other._later.keys()
        return {*self, *other}

    def keys(self) -> _Keys:
        """Return the numbers; the difference to those of a related tree is found fast."""
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
    """The numbers of records, with a fast difference between related trees."""

    _mapping: _Records[Any]

    def __sub__(self, other: Iterable[object]) -> set[int]:
        mine = self._mapping
        if not isinstance(other, _Keys):
            return set(mine) - set(other)
        its = other._mapping
        return {number for number in mine.differing(its) if number in mine and number not in its}


class MappedTree(TreeView):
    """A tree that is read from its description, without the stamps of files at the source.

    Args:
        description: one encoded tree, or several in a row, each as differences to the one ahead.
        begin: position in bytes from which ``description`` goes beyond that of ``before``.
        before: the tree to start from; its description is the first ``begin`` bytes.
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
        """Return the numbers of directories that may differ from an earlier tree's."""
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
    """A layout that is read from its description, which is mapped into memory.

    Args:
        path: the file with the description.
        begin: position in bytes from which the description goes beyond that of ``before``.
        before: the layout to start from, if any.
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
    """Return a size in bytes, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def holes(inode: Inode) -> int:
    """Return bytes of the pages of a file that are holes (up to a page too many for each piece)."""
    return pages(inode.size) - inode.held if inode.pieces is not None else 0


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a generation, known without reading its tree.

    Attributes:
        files: number of files.
        inodes: number of files, directories and symlinks.
        size: bytes of the files, holes not counted.
        room: bytes of the files in whole pages, holes included.
        blocks: number of blocks that were delivered for this generation.
        predecessor: number of the generation that it was made from; 0 for none.
        follows: bytes at the start of the description that equal the predecessor's description.
        whole: bytes of the last encoded whole tree in the description.
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
        """Compute the totals of a layout; the other arguments become attributes."""
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
