"""The files of one generation on a host: a copy of the source directory.

Names are made first. Bytes are written as they arrive. Attributes are set immediately on a file
that arrives in one piece, at the end on all others. A later generation starts as a directory tree
of hard links to the files of the generation before; then only the differences are applied.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path

from wheelmount.errors import TransferError
from wheelmount.mount.kernel import syscalls
from wheelmount.mount.snapshot.layout import Extent, Layout
from wheelmount.mount.snapshot.tree import ROOT, Inode, Tree, TreeView

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Files:
    """The files of one generation, for reading.

    Args:
        root: the directory of the generation.
        tree: the tree of the generation.
    """

    def __init__(self, root: Path, tree: TreeView) -> None:
        self.root = root
        self._folder = os.path.join(os.fsencode(root), b"")
        self._tree = tree

    def path(self, number: int) -> bytes:
        """Return the path of a file in the store."""
        return self._folder + self._tree.inodes[number].path

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Read bytes of a file that have arrived."""
        fd = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def read_into(self, extent: Extent, data: memoryview) -> None:
        """Read bytes of a file into their place in a block."""
        view = data[extent.block_offset : extent.block_offset + extent.length]
        offset = extent.file_offset
        fd = os.open(self.path(extent.inode), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            while view:
                count = os.preadv(fd, [view], offset)
                if not count:
                    raise OSError(errno.EIO, "the file became shorter", self.path(extent.inode))
                view, offset = view[count:], offset + count
        finally:
            os.close(fd)

    def free(self, number: int) -> None:
        """Delete a file; do nothing if it is not a regular file, or already deleted."""
        inode = self._tree.inodes.get(number)
        if inode is None or not inode.is_file:
            return
        for path in self._linked.get(number, []) if inode.nlink > 1 else [inode.path]:
            with contextlib.suppress(OSError):
                os.unlink(self._folder + path)

    @cached_property
    def _linked(self) -> dict[int, list[bytes]]:
        """All paths, by number, of the files with several names."""
        paths: dict[int, list[bytes]] = {}
        for path, number in self._tree.walk():
            inode = self._tree.inodes[number]
            if inode.nlink > 1 and inode.is_file:
                paths.setdefault(number, []).append(path)
        return paths


class NewFiles(Files):
    """The files of one generation while they are written.

    Args:
        root: the directory of the generation.
        layout: the tree, and the position of each block's bytes in its files.
        set_attributes: give the files the attributes that they have at the source, so that the
            kernel can show the files directly.
    """

    def __init__(self, root: Path, layout: Layout, *, set_attributes: bool) -> None:
        super().__init__(root, layout.tree)
        self._layout = layout
        self._sets_attributes = set_attributes
        self._new: set[int] = set()  # files that arrive for this generation
        self._links: list[tuple[int, bytes]] = []  # further names of these files
        self._with_attributes: set[int] = set()  # files whose attributes are set
        # Directories and symlinks whose attributes ``finish`` is to set.
        self._without_attributes: list[tuple[int, bytes]] = []

    def make(self) -> None:
        """Make directories, symlinks and empty files.

        Raises:
            TransferError: the tree is malformed.
        """
        self.root.mkdir(mode=0o700)
        self._without_attributes.append((ROOT, b"."))
        with _directory(self.root) as here:
            for path, number in self._tree.walk():
                self._make(here, path, number, None)
        self._check_new(Tree())

    def resume(self) -> None:
        """Continue with files that another process made and did not finish."""
        self._links.clear()
        self._without_attributes = [(ROOT, b".")]
        for path, number in self._tree.walk():
            if self._tree.inodes[number].is_file:
                self._note_name(number, path)
            else:
                self._without_attributes.append((number, path))

    def follow(self, before: Files) -> None:
        """Make this generation as a copy of the one before, with the differences applied.

        Raises:
            TransferError: the tree is malformed.
        """
        _link_all(before.root, self.root)
        old, new = before._tree, self._tree
        paths = _CommonPaths(old, new)
        with _directory(self.root) as here:
            for directory, names in new.names.items():
                earlier = old.names.get(directory)
                same_names = earlier == names
                if same_names and old.inodes[directory] == new.inodes[directory]:
                    continue
                path = paths.find(directory) if earlier is not None else None
                if earlier is None or path is None:  # made with a directory above it
                    continue
                self._without_attributes.append((directory, path or b"."))
                if same_names:
                    continue
                for name, number in earlier.items():
                    if names.get(name) != number:
                        _delete(os.path.join(self._folder, path, name))
                for name, number, inode in new.entries(directory):
                    if earlier.get(name) != number:
                        child = os.path.join(path, name)
                        self._make(here, child, number, before)
                        if inode.is_directory:
                            for path_below, number_below in new.walk(number, child):
                                self._make(here, path_below, number_below, before)
        self._check_new(old)

    def _note_name(self, number: int, path: bytes) -> bool:
        """Note a name of a file that is to arrive; return whether it is the file's first name."""
        first = path == self._tree.inodes[number].path
        if first:
            self._new.add(number)
        else:
            self._links.append((number, path))
        return first

    def _make(self, here: int, path: bytes, number: int, before: Files | None) -> None:
        """Make one name below the directory ``here``."""
        inode = self._tree.inodes[number]
        if inode.is_directory:
            os.mkdir(path, 0o700, dir_fd=here)
            self._without_attributes.append((number, path))
        elif inode.is_symlink:
            os.symlink(inode.path, path, dir_fd=here)
            self._without_attributes.append((number, path))
        elif before is None or number in self._layout.fresh:
            if self._note_name(number, path) and not inode.data:
                self._write(number, None, 0)
        elif number in self._layout.copies:
            if self._note_name(number, path):
                earlier = before.path(self._layout.copies[number])
                if self._sets_attributes:
                    _copy(earlier, self.path(number))
                else:  # attributes are shown from the tree, not from this file
                    os.link(earlier, path, dst_dir_fd=here)
        elif number in before._tree.inodes:
            os.link(before.path(number), path, dst_dir_fd=here)
        else:
            raise TransferError(f"the client does not say where {path!r} comes from")

    def _check_new(self, old: TreeView) -> None:
        """Check that each file that is not in the old tree, or differs there, is at its path."""
        for number, inode in self._tree.inodes.items():
            if inode is old.inodes.get(number) or not inode.is_file:
                continue
            if number not in self._new and self._tree.find(inode.path) != number:
                raise TransferError(f"the client describes {inode.path!r} as another file")

    def write(self, extent: Extent, data: memoryview) -> None:
        """Write bytes to the file they belong to."""
        piece = data[extent.block_offset : extent.block_offset + extent.length]
        self._write(extent.inode, piece, extent.file_offset)

    def _write(self, number: int, piece: memoryview | None, offset: int) -> None:
        inode = self._tree.inodes[number]
        path = self.path(number)
        try:
            fd = os.open(path, _WRITE, 0o600)
        except PermissionError:  # a delivery that was interrupted made the file read-only
            os.unlink(path)
            fd = os.open(path, _WRITE, 0o600)
        try:
            whole = piece is not None and len(piece) == inode.size
            if not whole:
                # Set the full size at once: tmpfs chooses huge pages by a file's size.
                os.ftruncate(fd, inode.size)
            while piece:
                count = os.pwrite(fd, piece, offset)
                piece, offset = piece[count:], offset + count
            if whole and self._sets_attributes:
                _set_attributes(inode, fd)
                self._with_attributes.add(number)
        finally:
            os.close(fd)

    def finish(self, lost: Collection[int] = ()) -> None:
        """Make further names of files, and set all remaining attributes.

        All bytes must have arrived.

        Args:
            lost: numbers of files whose bytes did not arrive. If attributes are set, each becomes
                a socket, which cannot be opened, because the kernel cannot be told to fail reads.
        """
        if self._sets_attributes:
            for number in self._new.intersection(lost):
                path = self.path(number)
                with contextlib.suppress(FileNotFoundError):  # an interrupted process deleted it
                    os.unlink(path)
                os.mknod(path, stat.S_IFSOCK | 0o600)
                self._with_attributes.discard(number)
        with _directory(self.root) as here:
            for number, name in self._links:
                with contextlib.suppress(FileExistsError):  # an interrupted process made the name
                    first = self._tree.inodes[number].path
                    os.link(first, name, src_dir_fd=here, dst_dir_fd=here)
        if not self._sets_attributes:
            return
        for number in self._new - self._with_attributes:
            if self._tree.inodes[number].pieces is not None and number not in lost:
                _punch_holes(self.path(number), self._tree.inodes[number])
            _set_attributes(self._tree.inodes[number], self.path(number))
        # Directories are last, as new entries change their mtimes.
        for number, path in self._without_attributes:
            inode, place = self._tree.inodes[number], self._folder + path
            _remove_old_xattrs(inode, place)
            _set_attributes(inode, place)


class _CommonPaths:
    """The paths that directories have in two trees."""

    def __init__(self, old: TreeView, new: TreeView) -> None:
        self._old, self._new = old.parents(), new.parents()

    def find(self, directory: int) -> bytes | None:
        """Return the path of a directory if the path is the same in both trees, else None."""
        names: list[bytes] = []
        while directory != ROOT:
            place = self._new.get(directory)
            if place is None or place != self._old.get(directory) or len(names) > len(self._new):
                return None
            directory, name = place
            names.append(name)
        return b"/".join(reversed(names))


def _link_all(source: Path, target: Path) -> None:
    """Make a directory tree of hard links to the files of another; copy directory attributes.

    System calls with names relative to open directories take 0.7 of the time of ``cp --link``.
    """
    target.mkdir(mode=0o700)
    pending, attributes = ["."], []
    with _directory(source) as old, _directory(target) as new:
        while pending:
            path = pending.pop()
            with _directory(path, old) as here, _directory(path, new) as there:
                with os.scandir(here) as entries:
                    for entry in entries:
                        name = entry.name
                        if entry.is_dir(follow_symlinks=False):
                            os.mkdir(name, 0o700, dir_fd=there)
                            pending.append(f"{path}/{name}")
                        else:
                            os.link(
                                name, name,
                                src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False,
                            )  # fmt: skip
                attributes.append((path, os.fstat(here), _user_xattrs(here)))
        # Those above are last: they may forbid to enter.
        for path, status, xattrs in reversed(attributes):
            for name, value in xattrs:
                os.setxattr(target / path, name, value, follow_symlinks=False)
            os.chmod(path, stat.S_IMODE(status.st_mode), dir_fd=new)
            times = status.st_atime_ns, status.st_mtime_ns
            os.utime(path, ns=times, dir_fd=new, follow_symlinks=False)


def _user_xattrs(directory: int) -> list[tuple[str, bytes]]:
    """Return the extended attributes ``user.*`` of an open directory."""
    with contextlib.suppress(OSError):  # some file systems have none
        names = [name for name in os.listxattr(directory) if name.startswith("user.")]
        return [(name, os.getxattr(directory, name)) for name in names]
    return []


def _copy(source: bytes, target: bytes) -> None:
    """Copy a file's bytes, as a reflink where the file system supports it."""
    with open(source, "rb") as old, open(target, "xb") as new:
        try:
            while os.copy_file_range(old.fileno(), new.fileno(), 1 << 30):
                pass
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            shutil.copyfileobj(old, new)


def _delete(path: bytes) -> None:
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path)
    except FileNotFoundError:  # a hard link that was never made
        pass


def _set_attributes(inode: Inode, place: int | bytes) -> None:
    """Set the attributes of an inode at a descriptor or path."""
    follow = isinstance(place, int)  # a descriptor is never of a symlink
    if inode.xattrs:
        # Some file systems have no extended attributes; readers then see none.
        with contextlib.suppress(OSError):
            for name, value in inode.xattrs:
                os.setxattr(place, name, value, follow_symlinks=follow)
    if not inode.is_symlink:
        os.chmod(place, inode.mode & 0o7777)
    os.utime(place, ns=(inode.mtime_ns, inode.mtime_ns), follow_symlinks=follow)


def _remove_old_xattrs(inode: Inode, path: bytes) -> None:
    """Remove extended attributes that only the generation before has, copied with a directory."""
    wanted = {os.fsdecode(name) for name, _ in inode.xattrs}
    with contextlib.suppress(OSError):
        for name in os.listxattr(path, follow_symlinks=False):
            if name.startswith("user.") and name not in wanted:
                os.removexattr(path, name, follow_symlinks=False)


def _punch_holes(path: bytes, inode: Inode) -> None:
    """Free the room of a sparse file's holes, which huge pages may have covered."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except PermissionError:  # an interrupted process did this, and made the file read-only
        return
    try:
        end = 0
        for offset, length in (*inode.data, (inode.size, 0)):
            if offset > end:
                with contextlib.suppress(OSError):  # unsupported here, so the holes take room
                    syscalls.punch_hole(fd, end, offset - end)
            end = offset + length
    finally:
        os.close(fd)


@contextlib.contextmanager
def _directory(path: Path | str, above: int | None = None) -> Iterator[int]:
    """Open a directory during the context; paths relative to it are faster than absolute ones.

    Args:
        path: of the directory.
        above: an open directory that a relative path starts from.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    fd = os.open(path, flags, dir_fd=above)
    try:
        yield fd
    finally:
        os.close(fd)
