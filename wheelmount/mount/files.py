"""The files of one generation on a host: a directory that looks like the source's.

Made with its names, filled as bytes arrive, and at last given the attributes of the source. A later
generation begins as a copy of the one before with the same files under second names, and only what
differs is taken away and made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from wheelmount.errors import TransferError
from wheelmount.mount import kernel
from wheelmount.mount.layout import Extent, Layout
from wheelmount.mount.tree import ROOT, Inode, Tree, TreeView


class Files:
    """The files of one generation, to be read.

    Args:
        root: the directory.
        tree: what is in it.
    """

    def __init__(self, root: Path, tree: TreeView) -> None:
        self.root = root
        self._tree = tree

    def path(self, number: int) -> bytes:
        """Where a file's bytes are."""
        return os.path.join(os.fsencode(self.root), self._tree.inodes[number].path)

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Bytes of a file that are there."""
        fd = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def read_into(self, extent: Extent, data: memoryview) -> None:
        """Get bytes of a file that are there back into their block."""
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
        """Delete one file; harmless if it is none or gone."""
        inode = self._tree.inodes.get(number)
        if inode is None or not inode.is_file:
            return
        paths = [inode.path]
        if inode.nlink > 1:
            paths = [path for path, its in self._tree.walk() if its == number]
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(os.fsencode(self.root), path))


class NewFiles(Files):
    """The files of one generation while they are made and filled.

    Args:
        root: the directory.
        layout: the tree, and where in its files a block's bytes belong.
    """

    def __init__(self, root: Path, layout: Layout) -> None:
        super().__init__(root, layout.tree)
        self._layout = layout
        self._names: dict[int, list[bytes]] = defaultdict(list)  # of files whose bytes are new
        self._touched: list[tuple[int, bytes]] = []  # directories and symlinks to be dressed

    def make(self) -> None:
        """Make directories, symlinks and files without bytes.

        Raises:
            TransferError: the tree is none.
        """
        self.root.mkdir(mode=0o700)
        self._touched.append((ROOT, b"."))
        with _directory(self.root) as here:
            for path, number in self._tree.walk():
                self._make(here, path, number, None)
        self._check(Tree())

    def resume(self) -> None:
        """Find again what was made, and not finished."""
        self._names.clear()
        self._touched = [(ROOT, b".")]
        for path, number in self._tree.walk():
            if self._tree.inodes[number].is_file:
                self._names[number].append(path)
            else:
                self._touched.append((number, path))

    def follow(self, before: Files) -> None:
        """Make them from those of the generation before.

        Raises:
            TransferError: the tree is none.
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
                if earlier is None or path is None:  # it is made as part of another
                    continue
                self._touched.append((directory, path or b"."))
                if alike:
                    continue
                for name, number in earlier.items():
                    if names.get(name) != number:
                        _delete(os.path.join(os.fsencode(self.root), path, name))
                for name, number, inode in new.entries(directory):
                    if earlier.get(name) != number:
                        child = os.path.join(path, name)
                        self._make(here, child, number, before)
                        if inode.is_directory:
                            for below, its in new.walk(number, child):
                                self._make(here, below, its, before)
        self._check(old)

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
            self._names[number].append(path)
            if not inode.data and path == inode.path:
                self._write(number, None, 0)
        elif number in self._layout.copies:
            self._names[number].append(path)
            if path == inode.path:
                shutil.copyfile(before.path(self._layout.copies[number]), self.path(number))
        elif number in before._tree.inodes:
            os.link(before.path(number), path, dst_dir_fd=here)
        else:
            raise TransferError(f"the client does not say where {path!r} comes from")

    def _check(self, old: TreeView) -> None:
        """See that files lie where their names are, and nowhere else."""
        for number, inode in self._tree.inodes.items():
            if inode is old.inodes.get(number) or not inode.is_file:
                continue
            if self._tree.find(inode.path) != number:
                raise TransferError(f"the client describes {inode.path!r} as another file")

    def write(self, extent: Extent, data: memoryview) -> None:
        """Put bytes into the file they belong to."""
        piece = data[extent.block_offset : extent.block_offset + extent.length]
        self._write(extent.inode, piece, extent.file_offset)

    def _write(self, number: int, piece: memoryview | None, offset: int) -> None:
        size = self._tree.inodes[number].size
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path(number), flags, 0o600)
        try:
            if piece is None or len(piece) < size:
                # At once its full size: what tmpfs decides by whether to give huge pages.
                os.ftruncate(fd, size)
            while piece:
                count = os.pwrite(fd, piece, offset)
                piece, offset = piece[count:], offset + count
        finally:
            os.close(fd)

    def finish(self, *, dress: bool) -> None:
        """Give files their other names, once all bytes are there.

        Args:
            dress: whether to give everything its attributes too, to be shown as it is.
        """
        with _directory(self.root) as here:
            for number, names in self._names.items():
                first = self._tree.inodes[number].path
                for name in names:
                    if name != first:
                        with contextlib.suppress(FileExistsError):  # who went before came so far
                            os.link(first, name, src_dir_fd=here, dst_dir_fd=here)
        if dress:
            for number in self._names:
                if self._tree.inodes[number].pieces is not None:
                    _punch(self.path(number), self._tree.inodes[number])
                self._dress(number, self.path(number))
            for number, path in self._touched:  # last: what is made in one changes its time
                self._dress(number, os.path.join(os.fsencode(self.root), path))

    def _dress(self, number: int, path: bytes) -> None:
        inode = self._tree.inodes[number]
        # Where the store's file system has no extended attributes, they are not shown.
        with contextlib.suppress(OSError):
            wanted = {os.fsdecode(name) for name, _ in inode.xattrs}
            for earlier in os.listxattr(path, follow_symlinks=False):
                if earlier.startswith("user.") and earlier not in wanted:
                    os.removexattr(path, earlier, follow_symlinks=False)
            for name, value in inode.xattrs:
                os.setxattr(path, name, value, follow_symlinks=False)
        if not inode.is_symlink:
            os.chmod(path, inode.mode & 0o7777)
        os.utime(path, ns=(inode.mtime_ns, inode.mtime_ns), follow_symlinks=False)


class _Places:
    """Where directories are in two trees."""

    def __init__(self, old: TreeView, new: TreeView) -> None:
        self._old, self._new = old.parents(), new.parents()

    def common(self, directory: int) -> bytes | None:
        """Path of a directory, if it and all above it are the same in both trees."""
        names: list[bytes] = []
        while directory != ROOT:
            place = self._new.get(directory)
            if place is None or place != self._old.get(directory) or len(names) > len(self._new):
                return None
            directory, name = place
            names.append(name)
        return b"/".join(reversed(names))


def _link_all(source: Path, target: Path) -> None:
    """Make a second directory tree with the same files; attributes of directories are copied.

    By ``cp``, which is five times faster than calls from Python.
    """
    command = ["cp", "--archive", "--link", "--no-target-directory", str(source), str(target)]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        raise OSError(0, lines[-1] if lines else "cp failed", str(target))


def _delete(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):  # a second name that was never made
            os.unlink(path)


def _punch(path: bytes, inode: Inode) -> None:
    """Make the holes of a sparse file holes again: a huge page may have covered them."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        end = 0
        for offset, length in (*inode.data, (inode.size, 0)):
            if offset > end:
                with contextlib.suppress(OSError):  # a file system without: it only costs memory
                    kernel.punch_hole(fd, end, offset - end)
            end = offset + length
    finally:
        os.close(fd)


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int]:
    """A directory, open: what is below it is reached with less work than by its whole path."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
