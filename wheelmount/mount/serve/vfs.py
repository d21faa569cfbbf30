"""The mounted tree as plain operations: list a directory, look up a name, read a file.

Adapters only translate these operations to a FUSE protocol. Inodes are numbered as in the tree;
failures are ``OSError`` with the error number for the kernel. All operations are thread-safe.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wheelmount.mount.serve.trace import Trace
from wheelmount.mount.snapshot.tree import Inode, TreeView
from wheelmount.mount.store.store import Store

log = logging.getLogger("wheelmount")


@dataclass(frozen=True, slots=True)
class Usage:
    """The answer to ``statfs``.

    Attributes:
        bytes: size of the whole tree in memory, bytes.
        inodes: number of inodes.
    """

    bytes: int
    inodes: int


@dataclass(frozen=True, slots=True)
class Change:
    """The names and directories that the kernel must forget when another generation is shown.

    Attributes:
        entries: pairs of a directory's number and a name in it that changes or is removed.
        directories: numbers of directories whose attributes or entries change.
    """

    entries: list[tuple[int, bytes]]
    directories: list[int]


class Vfs:
    """Operations on the newest generation of a store.

    The numbers of older generations still work as long as the kernel holds them: an open file keeps
    its bytes.
    """

    def __init__(self, store: Store, earlier: Sequence[Store] = ()) -> None:
        self._stores = [store, *earlier]  # newest first; replaced, never changed
        self.trace = Trace()
        """The parts of files that were read."""

    @property
    def store(self) -> Store:
        """The newest generation."""
        return self._stores[0]

    def inode(self, number: int) -> Inode:
        """Return attributes of an inode."""
        return self._find(number)[1]

    def _find(self, number: int) -> tuple[Store, Inode]:
        for store in self._stores:
            inode = store.tree.inodes.get(number)
            if inode is not None:
                return store, inode
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def lookup(self, directory: int, name: bytes) -> int | None:
        """Return the inode of a name in a directory, or None.

        Raises:
            NotADirectoryError: ``directory`` is another kind of file.
        """
        return self._names(directory).get(name)

    def entries(self, directory: int) -> list[tuple[bytes, int]]:
        """Return names and inodes of a directory, always in the same order (no ``.``, ``..``)."""
        return list(self._names(directory).items())

    def _names(self, directory: int) -> Mapping[bytes, int]:
        for store in self._stores:
            if directory in store.tree.inodes:
                names = store.tree.names.get(directory)
                if names is None:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                return names
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def readlink(self, number: int) -> bytes:
        """Return the target of a symlink."""
        inode = self.inode(number)
        if not inode.is_symlink:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return inode.path

    def xattrs(self, number: int) -> dict[bytes, bytes]:
        """Return extended attributes, by name."""
        return dict(self.inode(number).xattrs)

    def absent(self, number: int, offset: int, size: int) -> int | None:
        """Return the first missing block that a read needs; None if there is none."""
        store, inode = self._find(number)
        return store.absent(number, offset, min(offset + size, inode.size))

    def read(self, number: int, offset: int, size: int) -> bytes | None:
        """Return bytes of a file; None if they have not all arrived.

        Raises:
            OSError: EIO if the file changed at the source before it was copied.
        """
        store, inode = self._find(number)
        if inode.is_directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        end = min(offset + size, inode.size)
        if offset >= end:
            return b""
        self.trace.note(number, offset, end)
        if store.absent(number, offset, end) is not None:
            return None
        if store.is_changed(number):
            raise self.failure(number, "it changed at the source before it was copied")
        return store.read(number, offset, end - offset)

    def failure(self, number: int, reason: str) -> OSError:
        """Log a reason, and return EIO for the reader."""
        log.error("cannot read %s: %s", os.fsdecode(self.inode(number).path), reason)
        return OSError(errno.EIO, os.strerror(errno.EIO))

    def usage(self) -> Usage:
        """Return the size of the tree."""
        summary = self.store.summary
        return Usage(summary.room, summary.inodes)

    def changes(self, store: Store) -> Change:
        """Return the names and directories that the kernel must forget for another generation."""
        return _difference(self.store.tree, store.tree)

    def replace(self, store: Store) -> None:
        """Show another generation, in one step."""
        self._stores = [store, *self._stores]

    def forget(self, store: Store) -> None:
        """Stop serving an earlier generation."""
        self._stores = [kept for kept in self._stores if kept is not store]


def _difference(old: TreeView, new: TreeView) -> Change:
    entries = []
    directories = []
    for directory in new.differing(old):
        names, before = new.names[directory], old.names.get(directory)
        if before is None:
            continue
        if before != names:
            changed = before.keys() | names.keys()
            entries += [(directory, n) for n in changed if before.get(n) != names.get(n)]
        if before != names or old.inodes[directory] != new.inodes[directory]:
            directories.append(directory)
    return Change(entries, directories)
