"""The layout of a mount: the position of each file in one long buffer, which is cut into blocks.

The buffer holds the files one after another, without their holes. It is cut into blocks of equal
size; a block is sent, hashed and received as a unit. The whole buffer exists nowhere: the client
reads a block from the source's files, and a host writes the block to the files of its copy.
"""

from __future__ import annotations

import secrets
import stat
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

import msgpack

from wheelmount.errors import TransferError
from wheelmount.mount.snapshot.tree import ROOT, Inode, Stamp, Tree, TreeView, many_objects

VERSION = 3
"""Version of the encoding made by ``Layout.encode``."""


def check_version(version: object) -> None:
    """Check that an encoding has this version.

    Raises:
        TransferError: it was made by another version of wheelmount.
    """
    if version != VERSION:
        raise TransferError(
            f"the client describes trees in version {version}, this host in {VERSION}",
            hint="install the same wheelmount on the client and on the hosts",
        )


_NUMBERS = Struct("=QIqqIQQq")
"""Numbers that describe an inode: its number, mode, size, mtime and count of names; then device,
inode and ctime at the source."""

_TYPES = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK})


@contextmanager
def described() -> Iterator[None]:
    """Turn errors raised while a client's description is decoded into one that users can read.

    Raises:
        TransferError: the description is impossible.
    """
    try:
        yield
    except (
        ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
        struct.error, msgpack.UnpackException,
    ) as error:  # fmt: skip
        raise TransferError(f"the client describes an impossible tree: {error}") from error


def _inode(part: tuple[Any, ...]) -> tuple[int, Inode, Stamp]:
    """Decode and check one inode of a description.

    Raises:
        ValueError, TypeError, struct.error: the record describes no possible inode.
    """
    number, mode, size, mtime, nlink, path, xattrs, pieces, *stamp = part
    _NUMBERS.pack(number, mode, size, mtime, nlink, *stamp)
    if size < 0 or type(path) is not bytes or stat.S_IFMT(mode) not in _TYPES:
        raise ValueError(f"an inode {number}")
    end = 0
    if not isinstance(pieces, tuple | None):
        raise TypeError(f"pieces of inode {number}")
    for offset, length in pieces or ():
        if offset < end or length <= 0:
            raise ValueError(f"pieces of inode {number}")
        end = offset + length
    if end > size:
        raise ValueError(f"pieces of inode {number}")
    for name, value in xattrs:
        if not name.startswith(b"user.") or type(value) is not bytes:
            raise ValueError(f"extended attributes of inode {number}")
    return number, Inode(mode, size, mtime, nlink, path, xattrs, pieces), Stamp(*stamp)


class Extent(NamedTuple):
    """A piece of one file inside one block: the file's number, then offsets and length in bytes."""

    inode: int
    file_offset: int
    block_offset: int
    length: int


class Cut:
    """A tree, and the division of its files' bytes into blocks.

    Args:
        tree: the tree that is shown.
        block_size: bytes of a block; the last block may be shorter.
        fresh: numbers of the files to be sent; default all. Hosts have the other files from an
            earlier generation, under the same numbers.
        copies: files that are not sent because hosts have the same bytes under another number:
            from the number in this tree to the number in the earlier generation.
        identity: a random name by which client and hosts recognize this layout; default a new one.
    """

    def __init__(
        self,
        tree: TreeView,
        block_size: int,
        fresh: Iterable[int] | None = None,
        copies: Mapping[int, int] | None = None,
        identity: bytes | None = None,
    ) -> None:
        self.tree = tree
        self.block_size = block_size
        self.identity = identity or secrets.token_bytes(8)
        self.copies = dict(copies or {})
        self._fresh = None if fresh is None else array("Q", sorted(fresh))

    @cached_property
    def key(self) -> tuple[bytes, bool, int]:
        """A key by which client and hosts check that they mean the same blocks: the blocks of a
        whole tree differ from the blocks of only its new files."""
        whole = self._fresh is None or len(self._fresh) == self.tree.files
        return self.identity, whole, self.block_size

    @cached_property
    def _travelling(self) -> array[int]:
        """Numbers of the files that are sent; if all files are, the numbers of all inodes.

        Sorted, so that both sides cut the same blocks.
        """
        return array("Q", sorted(self.tree.inodes)) if self._fresh is None else self._fresh

    @property
    def places(self) -> int:
        """Number of places: all results of ``place`` are less."""
        return len(self._travelling)

    def place(self, number: int) -> int | None:
        """Return the index of a file among the files that are sent; None if it is not sent."""
        place = bisect_left(self._travelling, number)
        if place == self.places or self._travelling[place] != number:
            return None
        return place

    def at(self, place: int) -> int:
        """Return the number of the file at a place; the inverse of ``place``."""
        return self._travelling[place]

    @cached_property
    def _pieces(self) -> _Pieces:
        pieces = _Pieces()
        for number in self._travelling:
            inode = self.tree.inodes[number]
            if inode.is_file:
                for offset, length in inode.data:
                    pieces.add(number, offset, length)
        return pieces

    @property
    def size(self) -> int:
        """Size of all blocks together, bytes."""
        return self._pieces.starts[-1]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.size // self.block_size)

    def length(self, block: int) -> int:
        """Return the size of a block, bytes."""
        return min(self.block_size, self.size - block * self.block_size)

    def covering(self, inode: int, begin: int, end: int) -> Iterator[int]:
        """Yield the numbers of the blocks that hold bytes ``begin`` to ``end`` of a file."""
        pieces = self._pieces
        last = -1
        first = bisect_left(pieces.numbers, inode)
        behind = bisect_right(pieces.numbers, inode, first)
        first = max(bisect_right(pieces.offsets, begin, first, behind) - 1, first)
        for place in range(first, behind):
            offset, start, stop = pieces.offsets[place], *pieces.starts[place : place + 2]
            if offset >= end:
                return
            first = start + max(begin - offset, 0)
            stop = min(start + end - offset, stop)
            if first < stop:
                blocks = range(first // self.block_size, -(-stop // self.block_size))
                yield from (block for block in blocks if block > last)
                last = blocks[-1]

    def extents(self, block: int) -> Iterator[Extent]:
        """Yield the pieces of files that make up a block, in order and without gaps."""
        pieces = self._pieces
        begin = block * self.block_size
        end = begin + self.length(block)
        place = bisect_right(pieces.starts, begin) - 1
        start = pieces.starts[place]
        while start < end:
            stop = pieces.starts[place + 1]
            first = max(start, begin)
            offset = pieces.offsets[place] + first - start
            yield Extent(pieces.numbers[place], offset, first - begin, min(stop, end) - first)
            place, start = place + 1, stop


class _Pieces:
    """The positions of files' pieces in the buffer: for each piece, one entry in three arrays."""

    def __init__(self) -> None:
        self.numbers = array("Q")
        self.offsets = array("Q")
        self.starts = array("Q", [0])  # positions in the buffer; the last entry is its end

    def add(self, number: int, offset: int, length: int) -> None:
        self.numbers.append(number)
        self.offsets.append(offset)
        self.starts.append(self.starts[-1] + length)


class Layout(Cut):
    """A tree in memory, with its blocks, that can be encoded; arguments as of ``Cut``."""

    tree: Tree

    @cached_property
    def fresh(self) -> frozenset[int]:
        """Numbers of the files that are sent."""
        inodes = self.tree.inodes
        numbers = inodes if self._fresh is None else self._fresh
        return frozenset(number for number in numbers if inodes[number].is_file)

    @many_objects()
    def encode(self, before: Layout | None = None) -> bytes:
        """Encode the description that is sent ahead of the blocks, with msgpack.

        Args:
            before: a layout that the receiver has; only the differences to it are encoded.
        """
        tree = self.tree
        old = before.tree if before is not None else Tree()
        inodes = [  # sorted, as the arrays of ``Mapped`` need them
            (number, *inode, *tree.stamps[number])
            for number, inode in sorted(tree.inodes.items())
            if inode is not old.inodes.get(number)
            or tree.stamps[number] is not old.stamps.get(number)
        ]
        names = [
            (number, names)
            for number, names in sorted(tree.names.items(), key=itemgetter(0))
            if names is not old.names.get(number)
        ]
        gone = sorted(old.inodes.keys() - tree.inodes.keys())
        fresh = None if len(self.fresh) == tree.files else sorted(self.fresh)
        packed: bytes = msgpack.packb(
            (
                VERSION,
                before.identity if before is not None else b"",
                self.identity,
                self.block_size,
                tree.limit,
                inodes,
                names,
                gone,
                fresh,
                list(self.copies.items()),
            )
        )
        return packed

    @classmethod
    @many_objects()
    @described()
    def decode(cls, description: bytes, before: Layout | None = None) -> Layout:
        """Decode and check descriptions that ``encode`` made.

        Args:
            description: one description, or several in a row, each with differences to the one
                ahead of it.
            before: the layout that the first one describes differences to.

        Raises:
            TransferError: the description was made by another version of wheelmount, describes
                differences to another layout, or is impossible.
        """
        unpacker = msgpack.Unpacker(strict_map_key=False, use_list=False, max_buffer_size=0)
        unpacker.feed(description)
        for version, *rest in unpacker:
            check_version(version)
            before = cls._decode(before, *rest)
        if before is None or unpacker.tell() != len(description):
            raise TransferError("the client's description is empty or incomplete")
        return before

    @classmethod
    def _decode(
        cls,
        before: Layout | None,
        follows: bytes,
        identity: bytes,
        block_size: int,
        limit: int,
        inodes: tuple[Any, ...],
        names: tuple[Any, ...],
        gone: tuple[int, ...],
        fresh: tuple[int, ...] | None,
        copies: tuple[Any, ...],
    ) -> Layout:
        tree = Tree()
        if follows:
            if before is None or before.identity != follows:
                raise TransferError(
                    "this host shows another tree than the client expects",
                    hint="unmount, and mount again",
                )
            tree = before.tree.copy()
        numbers = {*gone}
        described = (each[0] for part in (inodes, names) for each in part)
        known = {*map(type, gone)} <= {int} and numbers <= tree.inodes.keys()
        if not known or not numbers.isdisjoint(described):
            raise ValueError("numbers that are gone")
        for number in gone:
            tree.forget(number)
        for part in inodes:
            number, tree.inodes[number], tree.stamps[number] = _inode(part)
        for number, entries in names:
            if not {*map(type, entries)} <= {bytes} or not {*map(type, entries.values())} <= {int}:
                raise ValueError(f"names in directory {number}")
            tree.names[number] = entries
        if type(block_size) is not int or block_size < 1 or type(identity) is not bytes:
            raise ValueError("the size of blocks, or the name of the tree")
        if type(limit) is not int or not max(tree.inodes) < limit:
            raise ValueError("numbers of inodes")
        tree.limit = limit
        if not tree.inodes[ROOT].is_directory:
            raise ValueError("the root")
        layout = cls(tree, block_size, fresh, dict(copies), identity)
        if not layout._fresh_known():
            raise ValueError("files whose bytes travel")
        return layout

    def _fresh_known(self) -> bool:
        """Return whether all files that are sent, or copied, are in the tree."""
        named = {*(self._fresh or ()), *self.copies}
        return named <= self.tree.inodes.keys() and all(type(n) is int for n in named)
