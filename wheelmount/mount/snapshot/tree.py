"""The tree of a mount: a snapshot of a directory's names and attributes, without its bytes.

This is the only definition of the contents of a mount; it does not depend on FUSE, on hosts or on
the place of the files' bytes. A path is bytes, as in the kernel, so names need not be UTF-8.
"""

from __future__ import annotations

import gc
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from wheelmount.errors import TransferError

ROOT = 0
"""Number of the root directory."""

Piece = tuple[int, int]
"""Offset and length in bytes of a part of a file that is not a hole."""


class Inode(NamedTuple):
    """Attributes of one file, directory or symlink.

    Attributes:
        mode: type and permission bits, as in ``st_mode``.
        size: bytes of a file, length of a symlink's target, 0 for a directory.
        mtime_ns: time of the last change, nanoseconds since the epoch.
        nlink: number of its names inside the tree (for a directory: 2 plus its subdirectories).
        path: of a file, its first path below the source; of a symlink, its target.
        xattrs: extended attributes ``user.*``, name and value, sorted.
        pieces: of a sparse file, the parts that hold data; None if it has no holes.
    """

    mode: int
    size: int
    mtime_ns: int
    nlink: int = 1
    path: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    pieces: tuple[Piece, ...] | None = None

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def data(self) -> tuple[Piece, ...]:
        """The parts of a file that are not holes."""
        if self.pieces is not None:
            return self.pieces
        return ((0, self.size),) if self.size else ()

    @property
    def held(self) -> int:
        """Bytes of a file that are not holes."""
        if self.pieces is None:
            return self.size
        return sum(length for _, length in self.data)

    def seek(self, offset: int, *, hole: bool) -> int | None:
        """Return the next offset, in bytes, at which data or a hole begins, as lseek(2) does.

        Args:
            offset: where to start.
            hole: look for a hole, not for data. The end of a file is a hole.

        Returns:
            None if ``offset`` is outside the file, or no data follows.
        """
        if not 0 <= offset < self.size:
            return None
        for begin, length in self.data:
            if offset < begin + length:
                if not hole:
                    return max(offset, begin)
                if offset < begin:
                    return offset
                offset = begin + length
        return min(offset, self.size) if hole else None


class Stamp(NamedTuple):
    """Device, inode number and ctime of a file at the source, which change when the file does."""

    device: int
    inode: int
    ctime_ns: int


class TreeView:
    """The operations of a tree, in memory or read from a description.

    Attributes:
        inodes: inodes by number; ``ROOT`` is the root directory. A number that was used for a file
            never means other bytes in a later tree of the same mount.
        names: the entries of each directory, by its number: from name to inode number, sorted.
        limit: greater than all inode numbers that were ever used in this mount.
    """

    __slots__ = ()

    inodes: Mapping[int, Inode]
    names: Mapping[int, Mapping[bytes, int]]
    limit: int

    @property
    def files(self) -> int:
        """Number of regular files; a file with several names counts once."""
        return sum(stat.S_ISREG(inode.mode) for inode in self.inodes.values())

    @property
    def size(self) -> int:
        """Size of all regular files together, in bytes without holes."""
        return sum(inode.held for inode in self.inodes.values() if stat.S_ISREG(inode.mode))

    def entries(self, directory: int) -> Iterator[tuple[bytes, int, Inode]]:
        """Yield name, number and inode of each entry of a directory.

        Raises:
            TransferError: the tree is malformed: a name leads out of its directory, or an entry
                has no inode.
        """
        for name, number in self.names[directory].items():
            if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
                raise TransferError(f"the client describes a file named {name!r}")
            inode = self.inodes.get(number)
            if inode is None or number == ROOT:
                raise TransferError(f"the client describes {name!r} as an impossible file")
            yield name, number, inode

    def differing(self, before: TreeView) -> Iterable[int]:  # noqa: ARG002 - for subclasses
        """Return the numbers of all directories that may differ from an earlier tree's."""
        return self.names.keys()

    def walk(self, directory: int = ROOT, path: bytes = b"") -> Iterator[tuple[bytes, int]]:
        """Yield every path below a directory, with its inode's number, directories first.

        Args:
            directory: number of the directory.
            path: path of the directory, put ahead of the yielded paths.

        Raises:
            TransferError: the tree is malformed (see ``entries``), or a directory has two names.
        """
        pending = [(directory, path)]
        entered = {directory}
        while pending:
            directory, path = pending.pop()
            for name, number, inode in self.entries(directory):
                child = path + b"/" + name if path else name
                if number in entered:
                    raise TransferError(f"the client describes {name!r} as an impossible file")
                yield child, number
                if inode.is_directory:
                    entered.add(number)
                    pending.append((number, child))

    def find(self, path: bytes) -> int | None:
        """Return the number of the inode at a path below the root, or None."""
        number: int | None = ROOT
        for name in path.split(b"/"):
            number = self.names.get(number, {}).get(name) if number is not None else None
        return number

    def parents(self) -> dict[int, tuple[int, bytes]]:
        """Return for every directory but the root its parent directory and its name there."""
        return {
            number: (directory, name)
            for directory, names in self.names.items()
            for name, number in names.items()
            if number in self.names
        }


@dataclass(slots=True)
class Tree(TreeView):
    """A tree in memory, which can be changed.

    Attributes:
        inodes: as in ``TreeView``, like ``names`` and ``limit``.
        stamps: the stamp of each inode at the source, by inode number.
        skipped: paths that a mount cannot show (sockets, pipes, devices), to be told to the user.
    """

    inodes: dict[int, Inode] = field(default_factory=dict)
    names: dict[int, dict[bytes, int]] = field(default_factory=dict)
    stamps: dict[int, Stamp] = field(default_factory=dict)
    skipped: list[bytes] = field(default_factory=list)
    limit: int = ROOT + 1

    def copy(self) -> Tree:
        """Return a copy that can be changed; inodes and entries are shared with the original."""
        return Tree(dict(self.inodes), dict(self.names), dict(self.stamps), limit=self.limit)

    def forget(self, number: int) -> None:
        """Remove an inode that has no names left."""
        self.inodes.pop(number, None)
        self.stamps.pop(number, None)
        self.names.pop(number, None)

    def take_as_new(self, numbers: Iterable[int]) -> None:
        """Give inodes numbers that were never used."""
        again = {number: self.limit + place for place, number in enumerate(numbers)}
        self.renumber(again)
        self.limit += len(again)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Give inodes other numbers; ``numbers`` maps from old to new."""
        if not numbers:
            return
        for earlier, number in numbers.items():
            self.inodes[number] = self.inodes.pop(earlier)
            self.stamps[number] = self.stamps.pop(earlier)
        for directory, names in self.names.items():
            if not numbers.keys().isdisjoint(names.values()):
                self.names[directory] = {name: numbers.get(n, n) for name, n in names.items()}


@contextmanager
def many_objects() -> Iterator[None]:
    """Pause garbage collection while many long-lived objects are created.

    Otherwise Python scans them for garbage again and again, which takes half of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
