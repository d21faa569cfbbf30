"""The mounted tree as plain operations: what a directory lists, what a name leads to.

Adapters (pyfuse3 and whatever follows) translate these and add nothing. Inodes are numbered as in
the tree; failures are ``OSError`` with the number the kernel is to see.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from wheelmount.mount.layout import PAGE, Layout
from wheelmount.mount.store import Store
from wheelmount.mount.tree import Inode


@dataclass(frozen=True, slots=True)
class Usage:
    """What ``statfs`` tells.

    Attributes:
        bytes: size of the whole tree in memory, bytes.
        inodes: number of inodes.
    """

    bytes: int
    inodes: int


class Vfs:
    """Operations on one layout over one store."""

    def __init__(self, layout: Layout, store: Store) -> None:
        self.layout = layout
        self.store = store
        self._inodes = layout.tree.inodes
        self._names = layout.tree.names
        self._entries: dict[int, list[tuple[bytes, int]]] = {}

    def inode(self, number: int) -> Inode:
        """Attributes of an inode."""
        return self._inodes[number]

    def lookup(self, directory: int, name: bytes) -> int | None:
        """The inode a name in a directory leads to, or None.

        Raises:
            NotADirectoryError: ``directory`` is none.
        """
        try:
            return self._names[directory].get(name)
        except KeyError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None

    def entries(self, directory: int) -> list[tuple[bytes, int]]:
        """Names and inodes of a directory, always in the same order (``.`` and ``..`` left out)."""
        if directory not in self._entries:
            self._entries[directory] = list(self._names[directory].items())
        return self._entries[directory]

    def readlink(self, number: int) -> bytes:
        """Target of a symlink."""
        inode = self._inodes[number]
        if not inode.is_symlink:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return inode.path

    def span(self, number: int, offset: int, size: int) -> tuple[int, int]:
        """Where ``size`` bytes of a file from ``offset`` lie in the buffer, cut at its end."""
        inode = self._inodes[number]
        start = self.layout.start(number)
        return start + min(offset, inode.size), start + min(offset + size, inode.size)

    def usage(self) -> Usage:
        """Size of the tree."""
        return Usage(-(-self.layout.size // PAGE) * PAGE, len(self._inodes))
