"""A tree that stays in its description, for a process that serves it for months.

What is kept of a description (see ``Layout.encode``) is where each inode and each directory lies in
it. The description itself stays in its file, which is mapped; whatever is asked for is unpacked
each time. That takes 24 bytes an inode instead of the thousand of Python's objects.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgpack

from wheelmount.mount.layout import Cut, check_version
from wheelmount.mount.tree import Inode, TreeView

RECENT_INODES, RECENT_NAMES = 1024, 64
"""How many stay unpacked: whoever asks for one often comes again, or for another name."""

_T = TypeVar("_T")


class _Records(Mapping[int, _T], Generic[_T]):
    """Parts of a description by number.

    Args:
        description: the whole.
        make: makes from a part, unpacked, what it stands for.
        limit: above all numbers.
        recent: how many stay unpacked.
        before: of the tree that this one follows from, to begin with.
    """

    def __init__(
        self,
        description: memoryview,
        make: Callable[[tuple[Any, ...]], _T],
        limit: int,
        recent: int,
        before: _Records[_T] | None,
    ) -> None:
        self._begins, self._lengths = begins, lengths = array("Q"), array("I")
        if before is not None:
            begins += before._begins
            lengths += before._lengths
        for numbers in (begins, lengths):
            numbers.frombytes(bytes(numbers.itemsize * (limit - len(numbers))))

        @lru_cache(recent)
        def unpacked(number: int) -> _T:
            length = lengths[number] if 0 <= number < len(lengths) else 0
            if not length:
                raise KeyError(number)
            part = description[begins[number] : begins[number] + length]
            return make(msgpack.unpackb(part, strict_map_key=False, use_list=False))

        self._unpacked = unpacked

    def place(self, number: int, begin: int, end: int) -> None:
        """Say where a part lies."""
        self._begins[number], self._lengths[number] = begin, end - begin

    def __getitem__(self, number: int) -> _T:
        return self._unpacked(number)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number >= 0 and any(self._lengths[number : number + 1])

    def __iter__(self) -> Iterator[int]:
        return (number for number, length in enumerate(self._lengths) if length)

    def __len__(self) -> int:
        return len(self._lengths) - self._lengths.count(0)


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

    def _follow(self, unpacker: Any, begin: int) -> None:
        unpacker.read_array_header()
        check_version(unpacker.unpack())
        before = self._before if unpacker.unpack() else None
        self.identity, self.block_size, self.limit = (unpacker.unpack() for _ in range(3))
        inodes, names = (before.inodes, before.names) if before is not None else (None, None)
        self.inodes = _Records(self.description, _inode, self.limit, RECENT_INODES, inodes)
        self.names = _Records(self.description, _names, self.limit, RECENT_NAMES, names)
        records: tuple[_Records[Any], ...] = (self.inodes, self.names)
        for kind in records:
            for _ in range(unpacker.read_array_header()):
                start = unpacker.tell()
                number = unpacker.unpack()[0]
                kind.place(number, begin + start, begin + unpacker.tell())
        for number in unpacker.unpack():
            self.inodes.place(number, 0, 0)
            self.names.place(number, 0, 0)
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
