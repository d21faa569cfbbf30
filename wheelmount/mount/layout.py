"""The layout of a mount: where each file's bytes lie in one long buffer, and how that is cut.

Files lie one after another, each beginning at a multiple of ``PAGE`` so that a page of the buffer
never holds two files (which is what the kernel needs to map or share them). The buffer is cut into
blocks of equal size; a block is what travels, is hashed and arrives as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import msgpack

from wheelmount.errors import TransferError
from wheelmount.mount.tree import Inode, Tree

PAGE = 4096
"""Alignment of files in the buffer, bytes: the page size of x86_64 and the least of aarch64."""

VERSION = 1
"""Version of the encoding made by ``Layout.encode``."""


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
        block_size: bytes of a block, a multiple of ``PAGE``; the last one may be shorter.
    """

    def __init__(self, tree: Tree, block_size: int) -> None:
        self.tree = tree
        self.block_size = block_size
        self._numbers = [n for n, i in enumerate(tree.inodes) if i.is_file and i.size]
        lengths = [-(-tree.inodes[n].size // PAGE) * PAGE for n in self._numbers]
        *self._starts, self.size = accumulate(lengths, initial=0)
        self._start_of = dict(zip(self._numbers, self._starts, strict=True))

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.size // self.block_size)

    def start(self, inode: int) -> int:
        """Where a file's bytes begin in the buffer (0 for an empty file, which has none)."""
        return self._start_of.get(inode, 0)

    def length(self, block: int) -> int:
        """Bytes of a block."""
        return min(self.block_size, self.size - block * self.block_size)

    def covering(self, start: int, end: int) -> range:
        """The blocks that hold bytes ``start`` to ``end`` of the buffer."""
        if start >= end:
            return range(0)
        return range(start // self.block_size, -(-end // self.block_size))

    def extents(self, block: int) -> Iterator[Extent]:
        """What a block is made of, in order; the bytes between are zeros."""
        begin = block * self.block_size
        end = begin + self.length(block)
        for place in range(bisect_right(self._starts, begin) - 1, len(self._starts)):
            start = self._starts[place]
            if start >= end:
                return
            number = self._numbers[place]
            first = max(start, begin)
            last = min(start + self.tree.inodes[number].size, end)
            if first < last:  # a block may begin in the zeros behind a file
                yield Extent(number, first - start, first - begin, last - first)

    def encode(self) -> bytes:
        """The description that travels ahead of the bytes (msgpack)."""
        inodes = [(i.mode, i.size, i.mtime_ns, i.nlink, i.path) for i in self.tree.inodes]
        names = list(self.tree.names.items())
        packed: bytes = msgpack.packb((VERSION, self.block_size, inodes, names))
        return packed

    @classmethod
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
        block_size, inodes, names = rest
        tree = Tree([Inode(*fields) for fields in inodes], dict(names))
        return cls(tree, block_size)
