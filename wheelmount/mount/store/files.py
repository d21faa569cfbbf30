"""The files of one generation on a host: a copy of the source directory.

Names are made first, bytes are written as they arrive, then attributes are set: at once on a file
that arrives in one piece, at the end on all others. A later generation starts as a copy of the one
before by hard links, in which only the differences are removed and made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path

from wheelmount import variables
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
                    raise OSError(errno.EIO, "it is shorter than it was", self.path(extent.inode))
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
        """All paths of the files with several names, found by a walk through the tree."""
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
        dress: set the attributes of the source on the files, so that the kernel can show them
            directly.
    """

    def __init__(self, root: Path, layout: Layout, *, dress: bool) -> None:
        super().__init__(root, layout.tree)
        self._layout = layout
        self._dress = dress
        self._new: set[int] = set()  # files that arrive for this generation
        self._links: list[tuple[int, bytes]] = []  # further names of these files
        self._dressed: set[int] = set()  # files whose attributes are set
        self._touched: list[
            tuple[int, bytes]
        ] = []  # directories and symlinks whose attributes are to be set

    def make(self) -> None:
        """Make directories, symlinks and empty files.

        Raises:
            TransferError: the tree is malformed.
        """
        self.root.mkdir(mode=0o700)
        self._touched.append((ROOT, b"."))
        with _directory(self.root) as here:
            for path, number in self._tree.walk():
                self._make(here, path, number, None)
        self._check(Tree())

    def resume(self) -> None:
        """Continue with files that another process made and did not finish."""
        self._links.clear()
        self._touched = [(ROOT, b".")]
        for path, number in self._tree.walk():
            if self._tree.inodes[number].is_file:
                self._name(number, path)
            else:
                self._touched.append((number, path))

    def follow(self, before: Files) -> None:
        """Make this generation as a copy of the one before, with the differences applied.

        Raises:
            TransferError: the tree is malformed.
        """
        _link_all(before.root, self.root)
        old, new = before._tree, self._tree
        places = _Places(old, new)
        with _directory(self.root) as here:
            for directory, names in new.names.items():
                earlier = old.names.get(directory)
                alike = earlier == names
                if alike and old.inodes[directory] == new.inodes[directory]:
                    continue
                path = places.common(directory) if earlier is not None else None
                if earlier is None or path is None:  # its contents are made with another directory
                    continue
                self._touched.append((directory, path or b"."))
                if alike:
                    continue
                for name, number in earlier.items():
                    if names.get(name) != number:
                        _delete(os.path.join(self._folder, path, name))
                for name, number, inode in new.entries(directory):
                    if earlier.get(name) != number:
                        child = os.path.join(path, name)
                        self._make(here, child, number, before)
                        if inode.is_directory:
                            for below, its in new.walk(number, child):
                                self._make(here, below, its, before)
        self._check(old)

    def _name(self, number: int, path: bytes) -> bool:
        """Note a name of a file whose bytes are new; return whether it is the first name."""
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
            self._touched.append((number, path))
        elif inode.is_symlink:
            os.symlink(inode.path, path, dir_fd=here)
            self._touched.append((number, path))
        elif before is None or number in self._layout.fresh:
            if self._name(number, path) and not inode.data:
                self._write(number, None, 0)
        elif number in self._layout.copies:
            if self._name(number, path):
                earlier = before.path(self._layout.copies[number])
                if self._dress:
                    _copy(earlier, self.path(number))
                else:  # attributes are set from the tree, not from this file
                    os.link(earlier, path, dst_dir_fd=here)
        elif number in before._tree.inodes:
            os.link(before.path(number), path, dst_dir_fd=here)
        else:
            raise TransferError(f"the client does not say where {path!r} comes from")

    def _check(self, old: TreeView) -> None:
        """Check that the old tree fits the files."""
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
        except PermissionError:  # made read-only by a block whose delivery was interrupted
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
            if whole and self._dress:
                _dress(inode, fd)
                self._dressed.add(number)
        finally:
            os.close(fd)

    def finish(self, lost: Collection[int] = ()) -> None:
        """Make further names of files, and set all remaining attributes.

        All bytes must have arrived.

        Args:
            lost: numbers of files whose bytes did not arrive. The kernel cannot be told to fail
                their reads, so each is shown as a socket, which cannot be opened.
        """
        if self._dress:
            for number in self._new.intersection(lost):
                path = self.path(number)
                os.unlink(path)
                os.mknod(path, stat.S_IFSOCK | 0o600)
                self._dressed.discard(number)
        with _directory(self.root) as here:
            for number, name in self._links:
                with contextlib.suppress(FileExistsError):  # made by an interrupted process
                    first = self._tree.inodes[number].path
                    os.link(first, name, src_dir_fd=here, dst_dir_fd=here)
        if not self._dress:
            return
        for number in self._new - self._dressed:
            if self._tree.inodes[number].pieces is not None and number not in lost:
                _punch(self.path(number), self._tree.inodes[number])
            _dress(self._tree.inodes[number], self.path(number))
        for number, path in self._touched:  # last, as new entries change mtimes
            inode, place = self._tree.inodes[number], self._folder + path
            _undress(inode, place)
            _dress(inode, place)


class _Places:
    """Compares the paths of directories in two trees."""

    def __init__(self, old: TreeView, new: TreeView) -> None:
        self._old, self._new = old.parents(), new.parents()

    def common(self, directory: int) -> bytes | None:
        """Return the path of a directory if it and all above it are the same in both trees."""
        names: list[bytes] = []
        while directory != ROOT:
            place = self._new.get(directory)
            if place is None or place != self._old.get(directory) or len(names) > len(self._new):
                return None
            directory, name = place
            names.append(name)
        return b"/".join(reversed(names))


def _link_all(source: Path, target: Path) -> None:
    """Make a second directory tree of hard links to the same files; copies directory attributes.

    Runs ``cp``, which is five times faster than system calls from Python.
    """
    command = ["cp", "--archive", "--link", "--no-target-directory", str(source), str(target)]
    done = subprocess.run(
        command,
        env=variables.for_programs(),
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        raise OSError(0, lines[-1] if lines else "cp failed", str(target))


def _copy(source: bytes, target: bytes) -> None:
    """Copy a file's bytes, as a reflink where the file system supports it."""
    with open(source, "rb") as its, open(target, "xb") as new:
        try:
            while os.copy_file_range(its.fileno(), new.fileno(), 1 << 30):
                pass
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            shutil.copyfileobj(its, new)


def _delete(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):  # a hardlink that was never made
            os.unlink(path)


def _dress(inode: Inode, place: int | bytes) -> None:
    """Set the attributes of an inode at a descriptor or path."""
    follow = isinstance(place, int)  # a descriptor is never of a symlink
    if inode.xattrs:
        # Not shown if the store's file system has no extended attributes.
        with contextlib.suppress(OSError):
            for name, value in inode.xattrs:
                os.setxattr(place, name, value, follow_symlinks=follow)
    if not inode.is_symlink:
        os.chmod(place, inode.mode & 0o7777)
    os.utime(place, ns=(inode.mtime_ns, inode.mtime_ns), follow_symlinks=follow)


def _undress(inode: Inode, path: bytes) -> None:
    """Remove the extended attributes that a directory got in the generation before."""
    wanted = {os.fsdecode(name) for name, _ in inode.xattrs}
    with contextlib.suppress(OSError):
        for name in os.listxattr(path, follow_symlinks=False):
            if name.startswith("user.") and name not in wanted:
                os.removexattr(path, name, follow_symlinks=False)


def _punch(path: bytes, inode: Inode) -> None:
    """Make the holes of a sparse file holes again: a huge page may have covered them."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        end = 0
        for offset, length in (*inode.data, (inode.size, 0)):
            if offset > end:
                with contextlib.suppress(OSError):  # where not supported, holes take memory
                    syscalls.punch_hole(fd, end, offset - end)
            end = offset + length
    finally:
        os.close(fd)


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int]:
    """Open a directory during the context; names relative to it are faster than whole paths."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
