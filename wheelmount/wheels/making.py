"""Make a directory, and meanwhile the ``Tree`` that ``scan`` would find in it.

A scan of a new environment would ask again for the names and attributes of all its files.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter

from wheelmount.mount.snapshot.scan import inode_of, stamp_of
from wheelmount.mount.snapshot.tree import ROOT, Inode, Tree
from wheelmount.owned import FOLDER
from wheelmount.wheels.linktree import link


class SpoiltError(Exception):
    """A file to link is missing, or has another size than it should have."""


class Making:
    """A directory that is being made, and that no other process changes.

    Args:
        root: path of the directory, which exists.

    Attributes:
        known: whether all that is in the directory was put there by these methods.
        path: path of the current directory, to which files are added.
    """

    def __init__(self, root: str) -> None:
        self.known = True
        self._root = root
        self._tree = Tree(names={ROOT: {}})
        self._folders = {"": ROOT}  # numbers of directories, by path
        self._files: dict[int, int] = {}  # numbers of files, by inode number at the source
        self._counts = Counter[int]()  # of the names of each file
        self._stack = contextlib.ExitStack()
        self.enter("")

    def close(self) -> None:
        """Close the current directory."""
        self._stack.close()

    def enter(self, folder: str) -> None:
        """Make a directory current; it is made, with those above it, if it is missing.

        Args:
            folder: its path, relative to the root.
        """
        number = self._number_of(folder)
        self.path = f"{self._root}/{folder}" if folder else self._root
        self._stack.close()
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._stack.callback(os.close, self._descriptor)
        self._below = os.fsencode(f"{folder}/") if folder else b""
        self._above = os.fsencode(f"{self.path}/")
        self._names = self._tree.names[number]

    def _number_of(self, folder: str) -> int:
        if folder in self._folders:
            return self._folders[folder]
        above, _, name = folder.rpartition("/")
        names = self._tree.names[self._number_of(above)]
        path = f"{self._root}/{folder}"
        try:
            os.mkdir(path, FOLDER)  # noqa: PTH102 - one of thousands of calls
        except FileExistsError:
            if not os.path.isdir(path):  # noqa: PTH112
                raise
            self.known = False
        self._folders[folder] = names[os.fsencode(name)] = number = self._new_number()
        self._tree.names[number] = {}
        return number

    def _new_number(self) -> int:
        self._tree.limit += 1
        return self._tree.limit - 1

    def link(self, source: str, name: str, size: int) -> None:
        """Link a file into the current directory. The tree is without its extended attributes.

        Args:
            source: path of the file.
            name: the new name.
            size: bytes that the file should have.

        Raises:
            FileExistsError: the directory has that name.
            SpoiltError: the file is missing, or has another size.
        """
        try:
            link(source, name, self._descriptor)
        except FileExistsError:
            exists = errno.EEXIST
            raise FileExistsError(exists, os.strerror(exists), f"{self.path}/{name}") from None
        except FileNotFoundError:
            raise SpoiltError from None
        if self._add(name) != size:
            raise SpoiltError

    def write(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file of the current directory, and remove one that has its name.

        That one is not written to, because others may have it too.
        """
        self.remove(name)
        descriptor = os.open(f"{self.path}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(descriptor, mode)
            stream.write(data)
        self._add(name)

    def symlink(self, target: str, name: str) -> None:
        """Make a symlink in the current directory."""
        os.symlink(target, f"{self.path}/{name}")  # noqa: PTH211
        self._add(name)

    def remove(self, name: str) -> None:
        """Remove a file from the current directory, if there is one of that name."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.path}/{name}")  # noqa: PTH108
            self.known = False

    def _add(self, name: str) -> int:
        """Add a file or symlink of the current directory to the tree, and return its size."""
        status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        tree, encoded = self._tree, os.fsencode(name)
        number = self._files.get(status.st_ino)
        if number is None:
            where = self._above + encoded
            inode = inode_of(self._below + encoded, where, status, plain=True)
            if inode is None:
                self.known = False
                return status.st_size
            self._files[status.st_ino] = number = self._new_number()
            tree.inodes[number] = inode
        self._counts[number] += 1
        tree.stamps[number] = stamp_of(status)  # a further name changes the ctime
        self._names[encoded] = number
        return status.st_size

    def tree(self, root: str) -> Tree | None:
        """Return the tree, or None if it is not known.

        Args:
            root: path of the directory, which may have been moved.
        """
        if not self.known:
            return None
        tree = self._tree
        for number, count in self._counts.items():
            if count > 1:
                tree.inodes[number] = tree.inodes[number]._replace(nlink=count)
        for folder, number in self._folders.items():
            names = tree.names[number] = dict(sorted(tree.names[number].items()))
            status = os.lstat(f"{root}/{folder}")
            below = sum(each in tree.names for each in names.values())
            tree.inodes[number] = Inode(status.st_mode, 0, status.st_mtime_ns, 2 + below)
            tree.stamps[number] = stamp_of(status)
        return tree
