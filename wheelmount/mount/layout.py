"""The layout of a mount: where each file's bytes lie in one long buffer, and how that is cut.

Files lie one after another, without their holes. The buffer is cut into blocks of equal size; a
block is what travels, is hashed and arrives as one. The buffer exists nowhere as a whole: the
client reads a block from its files, a host writes it to its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from operator import attrgetter

import msgpack

from wheelmount.errors import TransferError
from wheelmount.mount.tree import Inode, Stamp, Tree, many_objects

VERSION = 2
"""Version of the encoding made by ``Layout.encode``."""

_INODE = attrgetter(*(field.name for field in fields(Inode)))
_STAMP = attrgetter(*(field.name for field in fields(Stamp)))


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of one file inside one block; all numbers but ``inode`` are bytes."""

    inode: int
    file_offset: int
    block_offset: int
    length: int


class Layout:
    """A tree and the place of its bytes.

    Args:
        tree: what is shown.
        block_size: bytes of a block; the last one may be shorter.
        fresh: numbers of the files whose bytes are to travel; default all. The others hosts have
            from an earlier generation, under the same number.
        copies: of the others, those that have the bytes of another number in the earlier one.
    """

    def __init__(
        self,
        tree: Tree,
        block_size: int,
        fresh: Iterable[int] | None = None,
        copies: Mapping[int, int] | None = None,
    ) -> None:
        self.tree = tree
        self.block_size = block_size
        self.copies = dict(copies or {})
        numbers = tree.inodes if fresh is None else sorted(fresh)
        self.fresh = frozenset(n for n in numbers if tree.inodes[n].is_file)
        self._pieces = [
            (number, offset, length)
            for number in numbers
            if tree.inodes[number].is_file
            for offset, length in tree.inodes[number].data
        ]
        *self._starts, self.size = accumulate((p[2] for p in self._pieces), initial=0)
        self._first: dict[int, int] = {}
        for place, (number, _, _) in enumerate(self._pieces):
            self._first.setdefault(number, place)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.size // self.block_size)

    def length(self, block: int) -> int:
        """Bytes of a block."""
        return min(self.block_size, self.size - block * self.block_size)

    def covering(self, inode: int, begin: int, end: int) -> Iterator[int]:
        """The blocks that hold bytes ``begin`` to ``end`` of a file, in order."""
        last = -1
        for place in range(self._first.get(inode, len(self._pieces)), len(self._pieces)):
            number, offset, length = self._pieces[place]
            if number != inode or offset >= end:
                return
            first, stop = max(begin, offset), min(end, offset + length)
            if first < stop:
                start = self._starts[place] - offset
                blocks = range(
                    (start + first) // self.block_size, -(-(start + stop) // self.block_size)
                )
                yield from (block for block in blocks if block > last)
                last = blocks[-1]

    def extents(self, block: int) -> Iterator[Extent]:
        """What a block is made of, in order and without gaps."""
        begin = block * self.block_size
        end = begin + self.length(block)
        for place in range(bisect_right(self._starts, begin) - 1, len(self._starts)):
            start = self._starts[place]
            if start >= end:
                return
            number, offset, length = self._pieces[place]
            first, stop = max(start, begin), min(start + length, end)
            yield Extent(number, offset + first - start, first - begin, stop - first)

    def encode(self) -> bytes:
        """The description that travels ahead of the bytes (msgpack)."""
        tree = self.tree
        inodes = [(n, *_INODE(i), *_STAMP(tree.stamps[n])) for n, i in tree.inodes.items()]
        fresh = None if len(self.fresh) == tree.files else sorted(self.fresh)
        names = list(tree.names.items())
        copies = list(self.copies.items())
        packed: bytes = msgpack.packb((VERSION, self.block_size, inodes, names, fresh, copies))
        return packed

    @classmethod
    @many_objects()
    def decode(cls, description: bytes) -> Layout:
        """Inverse of ``encode``.

        Raises:
            TransferError: it was made by another version of wheelmount.
        """
        version, *rest = msgpack.unpackb(description, strict_map_key=False, use_list=False)
        if version != VERSION:
            raise TransferError(
                f"the client describes trees in version {version}, this host in {VERSION}",
                hint="install the same wheelmount on the client and on the hosts",
            )
        block_size, inodes, names, fresh, copies = rest
        tree = Tree(
            {values[0]: Inode(*values[1:-3]) for values in inodes},
            dict(names),
            {values[0]: Stamp(*values[-3:]) for values in inodes},
        )
        return cls(tree, block_size, fresh, dict(copies))
