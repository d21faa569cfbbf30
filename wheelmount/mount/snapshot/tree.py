"""The tree of a mount: a snapshot of a directory's names and attributes, without its bytes.

This is the one definition of what a mount shows. It knows nothing of FUSE, of hosts or of where
bytes lie; a path is bytes, as the kernel has it, so names need not be UTF-8.
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
"""Offset and length of a part of a file that is not a hole, bytes."""


class Inode(NamedTuple):
    """Attributes of one file, directory or symlink.

    Attributes:
        mode: type and permission bits, as in ``st_mode``.
        size: bytes of a file, length of a symlink's target, 0 for a directory.
        mtime_ns: time of the last change, nanoseconds since the epoch.
        nlink: names it has inside the tree (for a directory: 2 and one a subdirectory).
        path: of a file, its first path below the source; of a symlink, its target.
        xattrs: extended attributes ``user.*``, name and value, sorted.
        pieces: of a sparse file, what is not a hole; None if it has no holes.
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
        """The parts of a file that hold bytes."""
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
        """Where in a file bytes begin, or a ``hole``, from ``offset`` on; see lseek(2).

        The end of a file is a hole. Gives None where there are no more bytes, or no file.
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
    """What tells at the source whether a file is still the same; see ``stat(2)``."""

    device: int
    inode: int
    ctime_ns: int


class TreeView:
    """What can be asked of a tree, whatever it is kept in.

    Attributes:
        inodes: by number; ``ROOT`` is the root directory. A number that was used for a file never
            means other bytes in a later tree of the same mount.
        names: for every directory's number, its entries: name to inode number, sorted by name.
        limit: above all numbers that were ever used in this mount.
    """

    __slots__ = ()

    inodes: Mapping[int, Inode]
    names: Mapping[int, Mapping[bytes, int]]
    limit: int

    @property
    def files(self) -> int:
        """Number of regular files (hardlinked names counted once)."""
        return sum(stat.S_ISREG(inode.mode) for inode in self.inodes.values())

    @property
    def size(self) -> int:
        """Bytes of all regular files together, holes not counted."""
        return sum(inode.held for inode in self.inodes.values() if stat.S_ISREG(inode.mode))

    def entries(self, directory: int) -> Iterator[tuple[bytes, int, Inode]]:
        """Name, number and inode of what is in a directory.

        Raises:
            TransferError: the tree is none: a name that leads out of its directory, an entry
                without an inode.
        """
        for name, number in self.names[directory].items():
            if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
                raise TransferError(f"the client describes a file named {name!r}")
            inode = self.inodes.get(number)
            if inode is None or number == ROOT:
                raise TransferError(f"the client describes {name!r} as an impossible file")
            yield name, number, inode

    def differing(self, before: TreeView) -> Iterable[int]:  # noqa: ARG002 - not all can tell
        """Numbers of all directories that may be other than in an earlier tree, or not in it."""
        return self.names.keys()

    def walk(self, directory: int = ROOT, path: bytes = b"") -> Iterator[tuple[bytes, int]]:
        """Every path below a directory and the inode it leads to, directories first.

        Args:
            directory: its number.
            path: its path, with which the others begin.

        Raises:
            TransferError: see ``entries``; or a directory has two names.
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
        """The inode that a path below the root leads to, or None."""
        number: int | None = ROOT
        for name in path.split(b"/"):
            number = self.names.get(number, {}).get(name) if number is not None else None
        return number

    def parents(self) -> dict[int, tuple[int, bytes]]:
        """Of every directory but the root: the directory it is in, and its name there."""
        return {
            number: (directory, name)
            for directory, names in self.names.items()
            for name, number in names.items()
            if number in self.names
        }


@dataclass(slots=True)
class Tree(TreeView):
    """Inodes, and the names that lead to them.

    Attributes:
        inodes: see ``TreeView``; so are ``names`` and ``limit``.
        stamps: by inode number, what each was at the source.
        skipped: paths that are not shown (sockets, pipes, devices), for the user to know.
    """

    inodes: dict[int, Inode] = field(default_factory=dict)
    names: dict[int, dict[bytes, int]] = field(default_factory=dict)
    stamps: dict[int, Stamp] = field(default_factory=dict)
    skipped: list[bytes] = field(default_factory=list)
    limit: int = ROOT + 1

    def copy(self) -> Tree:
        """The same tree, to be changed; the objects in it are shared."""
        return Tree(dict(self.inodes), dict(self.names), dict(self.stamps), limit=self.limit)

    def forget(self, number: int) -> None:
        """Take out an inode, whose names are gone too."""
        self.inodes.pop(number, None)
        self.stamps.pop(number, None)
        self.names.pop(number, None)

    def take_as_new(self, numbers: Iterable[int]) -> None:
        """Give inodes numbers that were never used."""
        again = {number: self.limit + place for place, number in enumerate(numbers)}
        self.renumber(again)
        self.limit += len(again)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Give inodes other numbers, those they have to those they are to have."""
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
    """While very many objects are made that will stay.

    Python would look for garbage among them again and again: half of the time of making them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
