"""The tree of a mount: a snapshot of a directory's names and attributes, without its bytes.

This is the one definition of what a mount shows. It knows nothing of FUSE, of hosts or of where
bytes lie; a path is bytes, as the kernel has it, so names need not be UTF-8.
"""

from __future__ import annotations

import errno
import gc
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from wheelmount.errors import SourceError, TransferError

ROOT = 0
"""Number of the root directory."""


Piece = tuple[int, int]
"""Offset and length of a part of a file that is not a hole, bytes."""


@dataclass(frozen=True, slots=True)
class Inode:
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
        return sum(length for _, length in self.data)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells at the source whether a file is still the same; see ``stat(2)``."""

    device: int
    inode: int
    ctime_ns: int


@dataclass(slots=True)
class Tree:
    """Inodes, and the names that lead to them.

    Attributes:
        inodes: by number; ``ROOT`` is the root directory. A number that was used for a file never
            means other bytes in a later tree of the same mount.
        names: for every directory's number, its entries: name to inode number, sorted by name.
        stamps: by inode number, what each was at the source.
        skipped: paths that are not shown (sockets, pipes, devices), for the user to know.
    """

    inodes: dict[int, Inode] = field(default_factory=dict)
    names: dict[int, dict[bytes, int]] = field(default_factory=dict)
    stamps: dict[int, Stamp] = field(default_factory=dict)
    skipped: list[bytes] = field(default_factory=list)

    @property
    def files(self) -> int:
        """Number of regular files (hardlinked names counted once)."""
        return sum(inode.is_file for inode in self.inodes.values())

    @property
    def size(self) -> int:
        """Bytes of all regular files together, holes not counted."""
        return sum(inode.held for inode in self.inodes.values() if inode.is_file)

    @property
    def limit(self) -> int:
        """A number above those of all inodes."""
        return max(self.inodes) + 1

    def walk(self) -> Iterator[tuple[bytes, int]]:
        """Every path below the root and the inode it leads to, directories before what is in them.

        Raises:
            TransferError: the tree is none: a name that leads out of its directory, an entry
                without an inode, a directory with two names.
        """
        pending = [(ROOT, b"")]
        entered = {ROOT}
        while pending:
            directory, path = pending.pop()
            for name, number in self.names[directory].items():
                inode = self.inodes.get(number)
                if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
                    raise TransferError(f"the client describes a file named {name!r}")
                if inode is None or number in entered:
                    raise TransferError(f"the client describes {name!r} as an impossible file")
                child = path + b"/" + name if path else name
                yield child, number
                if inode.is_directory:
                    entered.add(number)
                    pending.append((number, child))


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


@many_objects()
def scan(source: bytes, before: Tree | None = None) -> Tree:
    """Take the snapshot of ``source``.

    Symlinks are kept, not followed; names of one inode stay hardlinks; directories of other file
    systems mounted below are descended into, as ``cp -r`` does.

    Args:
        source: the directory.
        before: an earlier snapshot; what has the same stamp at the same path is not looked at any
            closer, and its ``Inode`` and ``Stamp`` are used again.

    Raises:
        SourceError: it is missing, not a directory, or part of it cannot be read.
    """
    try:
        status = os.stat(source)
        if not stat.S_ISDIR(status.st_mode):
            raise SourceError(
                f"{os.fsdecode(source)} is not a directory",
                hint="mount a directory; a single file can be put into one",
            )
        root = _directory(source, status)
    except FileNotFoundError:
        raise SourceError(
            f"there is no directory {os.fsdecode(source)}", hint="check the path"
        ) from None
    except OSError as error:
        raise _unreadable(error) from None
    tree = Tree({ROOT: root}, stamps={ROOT: _stamp(status)})
    before = before or Tree()
    links: dict[tuple[int, int], int] = {}  # (device, inode) -> number, for names beyond the first
    pending: list[tuple[int, bytes, int | None]] = [(ROOT, b"", ROOT)]
    while pending:
        number, path, earlier = pending.pop()
        names: dict[bytes, int] = {}
        names_before = before.names.get(earlier, {}) if earlier is not None else {}
        below: list[tuple[int, bytes, int | None]] = []
        try:
            with os.scandir(os.path.join(source, path)) as entries:
                found = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
            for name, status in found:
                child = path + b"/" + name if path else name
                known = names_before.get(name)
                directory = stat.S_ISDIR(status.st_mode)
                if known is not None and status.st_nlink == 1 and not directory:
                    stamp = before.stamps[known]
                    if (
                        stamp.ctime_ns == status.st_ctime_ns
                        and stamp.inode == status.st_ino
                        and stamp.device == status.st_dev
                    ):
                        names[name] = new = len(tree.inodes)
                        tree.inodes[new], tree.stamps[new] = before.inodes[known], stamp
                        continue
                key = (status.st_dev, status.st_ino)
                if status.st_nlink > 1 and not directory and key in links:
                    names[name] = links[key]
                    tree.inodes[links[key]] = _another_name(tree.inodes[links[key]])
                    continue
                inode = _inode(source, child, status)
                if inode is None:
                    tree.skipped.append(child)
                    continue
                names[name] = links[key] = new = len(tree.inodes)
                tree.inodes[new], tree.stamps[new] = inode, _stamp(status)
                if directory:
                    below.append((new, child, known))
        except OSError as error:
            raise _unreadable(error) from None
        tree.names[number] = names
        tree.inodes[number] = replace(tree.inodes[number], nlink=2 + len(below))
        pending.extend(reversed(below))
    return tree


def _inode(source: bytes, path: bytes, status: os.stat_result) -> Inode | None:
    where = os.path.join(source, path)
    if stat.S_ISREG(status.st_mode):
        pieces = None
        if status.st_blocks * 512 < status.st_size:  # may have holes: stat(2)
            pieces = _pieces(where, status.st_size)
        mtime = status.st_mtime_ns
        return Inode(status.st_mode, status.st_size, mtime, 1, path, _xattrs(where), pieces)
    if stat.S_ISDIR(status.st_mode):
        return _directory(where, status)
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(where)
        return Inode(status.st_mode, len(target), status.st_mtime_ns, 1, target)
    return None


def _directory(path: bytes, status: os.stat_result) -> Inode:
    return Inode(status.st_mode, 0, status.st_mtime_ns, 2, b"", _xattrs(path))


def _another_name(inode: Inode) -> Inode:
    return replace(inode, nlink=inode.nlink + 1)


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_dev, status.st_ino, status.st_ctime_ns)


def _xattrs(path: bytes) -> tuple[tuple[bytes, bytes], ...]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return ()
        raise
    mine = sorted(name for name in names if name.startswith("user."))
    return tuple((os.fsencode(n), os.getxattr(path, n, follow_symlinks=False)) for n in mine)


def _pieces(path: bytes, size: int) -> tuple[Piece, ...] | None:
    """What is not a hole; None if the file system says that nothing is."""
    pieces = []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        end = 0
        while end < size:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    break
                raise
            end = os.lseek(fd, start, os.SEEK_HOLE)
            pieces.append((start, min(end, size) - start))
    finally:
        os.close(fd)
    return None if pieces == [(0, size)] else tuple(pieces)


def _unreadable(error: OSError) -> SourceError:
    name = os.fsdecode(error.filename) if error.filename else "the source"
    return SourceError(
        f"cannot read {name}: {error.strerror}",
        hint="mount a directory that you may read in full and that holds still meanwhile",
    )
