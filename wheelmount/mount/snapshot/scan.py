"""Scan a directory: make a ``Tree`` of the names and attributes that its file system reports."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Container

from wheelmount.errors import SourceError
from wheelmount.mount.snapshot.tree import ROOT, Inode, Piece, Stamp, Tree, many_objects

_TYPE = 0o170000
"""Bits of a mode that hold the type of a file: ``S_IFMT`` of stat(2)."""


@many_objects()
def scan(source: bytes, before: Tree | None = None, lost: Container[int] = ()) -> Tree:
    """Take a snapshot of a directory.

    Symlinks are kept, not followed; names of one inode stay hardlinks; other file systems that are
    mounted below the directory are scanned too, as ``cp -r`` copies them.

    Args:
        source: the directory.
        before: an earlier snapshot. A file with the same stamp at the same path keeps its number
            and its objects, without a closer look; so does a directory at the same path. New
            inodes get numbers above those of ``before``.
        lost: numbers in ``before`` of inodes that are to be taken as new.

    Raises:
        SourceError: the source is missing, not a directory, or in part unreadable.
    """
    try:
        status = os.stat(source)
        if not stat.S_ISDIR(status.st_mode):
            raise SourceError(
                f"{os.fsdecode(source)} is not a directory",
                hint="mount a directory; a single file can be put into one",
            )
        return _Scan(source, before or Tree(), lost).run(status)
    except FileNotFoundError as error:
        if error.filename != source:
            raise _unreadable(error) from None
        raise SourceError(
            f"there is no directory {os.fsdecode(source)}", hint="check the path"
        ) from None
    except OSError as error:
        raise _unreadable(error) from None


class _Scan:
    """The state of one scan; arguments as of ``scan``."""

    def __init__(self, source: bytes, before: Tree, lost: Container[int]) -> None:
        self._folder = os.path.join(source, b"")
        self._before = before
        self._lost = lost
        self._tree = Tree()
        self._next = before.limit
        # For files with several names: (device, inode) -> number, and number -> names found so far.
        self._links: dict[tuple[int, int], int] = {}
        self._counts: dict[int, int] = {}

    def run(self, status: os.stat_result) -> Tree:
        pending = [(ROOT, b"", status)]
        while pending:
            number, path, status = pending.pop()
            pending.extend(reversed(self._directory(number, path, status)))
        self._count()
        return self._tree

    def _directory(
        self, number: int, path: bytes, status: os.stat_result
    ) -> list[tuple[int, bytes, os.stat_result]]:
        """Add a directory to the tree; return its subdirectories: number, path, attributes."""
        before = self._before
        earlier = before.names.get(number, {})
        names: dict[bytes, int] = {}
        below = []
        with os.scandir(self._folder + path) as entries:
            found = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
        for name, its in found:
            known = earlier.get(name)
            if its.st_mode & _TYPE == stat.S_IFDIR:
                if known is None or known not in before.names or known in self._lost:
                    known, self._next = self._next, self._next + 1
                below.append((known, path + b"/" + name if path else name, its))
            else:
                if known is not None and not self._same(known, its):
                    known = None
                if known is not None and its.st_nlink == 1:  # most files: nothing more to do
                    self._tree.inodes[known] = before.inodes[known]
                    self._tree.stamps[known] = before.stamps[known]
                else:
                    known = self._file(path + b"/" + name if path else name, its, known)
                if known is None:
                    continue
            names[name] = known
        self._tree.names[number] = earlier if names == earlier else names
        self._keep_directory(number, path, status, 2 + len(below))
        return below

    def _same(self, known: int, status: os.stat_result) -> bool:
        inode, stamp = self._before.inodes[known], self._before.stamps[known]
        # On some file systems, ctimes are whole seconds, in which a file may change twice.
        return (
            stamp.ctime_ns == status.st_ctime_ns
            and inode.mtime_ns == status.st_mtime_ns
            and (inode.size == status.st_size or not inode.is_file)
            and stamp.inode == status.st_ino
            and stamp.device == status.st_dev
            and known not in self._lost
        )

    def _keep_directory(self, number: int, path: bytes, status: os.stat_result, nlink: int) -> None:
        known, stamp = self._before.inodes.get(number), stamp_of(status)
        if known is not None and known.nlink == nlink and self._before.stamps[number] == stamp:
            # Reuse the object of an unchanged directory, so that differences are found fast.
            self._tree.inodes[number] = known
            self._tree.stamps[number] = self._before.stamps[number]
            return
        xattrs = _xattrs(self._folder + path)
        inode = Inode(status.st_mode, 0, status.st_mtime_ns, nlink, b"", xattrs)
        self._tree.inodes[number] = known if known is not None and known == inode else inode
        self._tree.stamps[number] = stamp

    def _file(self, path: bytes, status: os.stat_result, known: int | None) -> int | None:
        """Add a file or symlink to the tree; return its number, None if it cannot be shown."""
        key = (status.st_dev, status.st_ino)
        number = self._links.get(key) if status.st_nlink > 1 else None
        if number is not None:
            self._counts[number] += 1
            return number
        if known is not None:
            inode, stamp = self._before.inodes[known], self._before.stamps[known]
            if inode.is_file and inode.path != path:  # the name it was read by is gone
                inode = inode._replace(path=path)
        else:
            made = inode_of(path, self._folder + path, status)
            if made is None:
                self._tree.skipped.append(path)
                return None
            inode, stamp = made, stamp_of(status)
            known, self._next = self._next, self._next + 1
        self._tree.inodes[known], self._tree.stamps[known] = inode, stamp
        if status.st_nlink > 1:
            self._links[key] = known
            self._counts[known] = 1
        return known

    def _count(self) -> None:
        """Set the number of names of each hardlinked file; a file whose number changed is new."""
        other: dict[int, int] = {}
        for number, count in self._counts.items():
            inode = self._tree.inodes[number]
            if inode.nlink != count:
                inode = self._tree.inodes[number] = inode._replace(nlink=count)
                if number in self._before.inodes:
                    other[number] = self._next
                    self._next += 1
        self._tree.renumber(other)
        self._tree.limit = self._next


def inode_of(
    path: bytes, where: bytes, status: os.stat_result, *, plain: bool = False
) -> Inode | None:
    """Return the inode of a file or symlink; None if a mount cannot show it.

    Args:
        path: its path below the source.
        where: path at which this process finds it.
        status: its attributes.
        plain: leave out its extended attributes.
    """
    kind = status.st_mode & _TYPE
    if kind == stat.S_IFREG:
        xattrs = () if plain else _xattrs(where)
        pieces, mtime = data_pieces(where, status), status.st_mtime_ns
        return Inode(status.st_mode, status.st_size, mtime, 1, path, xattrs, pieces)
    if kind == stat.S_IFLNK:
        target = os.readlink(where)
        return Inode(status.st_mode, len(target), status.st_mtime_ns, 1, target)
    return None


def stamp_of(status: os.stat_result) -> Stamp:
    """Return device, inode number and ctime of a file."""
    return Stamp(status.st_dev, status.st_ino, status.st_ctime_ns)


def _xattrs(path: bytes) -> tuple[tuple[bytes, bytes], ...]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return ()
        raise
    if not names:  # most files
        return ()
    mine = sorted(name for name in names if name.startswith("user."))
    try:
        return tuple((os.fsencode(n), os.getxattr(path, n, follow_symlinks=False)) for n in mine)
    except PermissionError:  # an unreadable file; delivery reports it by name
        return ()


def data_pieces(path: bytes, status: os.stat_result) -> tuple[Piece, ...] | None:
    """Return offset and length of each piece of a regular file that holds data.

    Returns None if the file system reports no holes, or the file may not be read.
    """
    size = status.st_size
    if status.st_blocks * 512 >= size:  # no holes: see ``st_blocks`` in stat(2)
        return None
    pieces = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:  # an unreadable file; delivery reports it by name
        return None
    try:
        end = 0
        while end < size:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
                end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left, or the file became shorter
                    break
                raise
            if start >= size:  # the file became longer
                break
            pieces.append((start, end - start))
    finally:
        os.close(fd)
    return None if pieces == [(0, size)] else tuple(pieces)


def _unreadable(error: OSError) -> SourceError:
    name = os.fsdecode(error.filename) if error.filename else "the source"
    return SourceError(
        f"cannot read {name}: {error.strerror}",
        hint="mount a directory that you may read in full and that holds still meanwhile",
    )
