"""The store: a host's copy of the bytes, as three files in a private directory.

``data`` is the buffer of the layout (on tmpfs: in memory), ``have`` has one byte a block and
``changed`` one byte an inode. All are mapped by the process that receives and by the one that
serves, so what has arrived is seen by both at once, and a serving process that is started again
finds everything as it was.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from pathlib import Path

from wheelmount.errors import StoreError
from wheelmount.mount.layout import Layout

_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux >= 5.14 (asm-generic/mman-common.h); unknown to Python."""


class Store:
    """The bytes of one layout on this host.

    Args:
        directory: where ``create`` made it.
        layout: what it holds.
    """

    def __init__(self, directory: Path, layout: Layout) -> None:
        self.directory = directory
        self.layout = layout
        self._fd = os.open(directory / "data", os.O_RDWR | os.O_CLOEXEC)
        self._data = mmap.mmap(self._fd, max(layout.size, 1))
        self._view = memoryview(self._data)
        self._read_only = self._view.toreadonly()
        self._have = _map(directory / "have")
        self._changed = _map(directory / "changed")

    @classmethod
    def create(cls, directory: Path, layout: Layout) -> Store:
        """Make an empty store.

        Raises:
            StoreError: the bytes cannot fit there.
        """
        free = shutil.disk_usage(directory.parent).free
        if layout.size > free:
            raise _full(directory, layout.size, free)
        directory.mkdir(mode=0o700)
        sizes = {"data": layout.size, "have": layout.blocks, "changed": len(layout.tree.inodes)}
        for name, size in sizes.items():
            with (directory / name).open("xb") as file:
                file.truncate(max(size, 1))
        return cls(directory, layout)

    def allocate(self, block: int) -> memoryview:
        """Set memory aside for a block and give it, to be written to.

        Done here and not by the first write, which would end the process with SIGBUS where the
        memory has run out, and in one system call, which is twice as fast as page by page.

        Raises:
            StoreError: there is no memory left.
        """
        start, length = block * self.layout.block_size, self.layout.length(block)
        try:
            os.posix_fallocate(self._fd, start, length)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                free = shutil.disk_usage(self.directory).free
                raise _full(self.directory, length, free) from None
            raise
        try:
            self._data.madvise(_POPULATE_WRITE, start, length)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel fills pages as they are written
                raise
        return self._view[start : start + length]

    def commit(self, block: int) -> None:
        """Say that a block is whole: from now on it may be read."""
        self._have[block] = 1

    def has(self, block: int) -> bool:
        """Whether a block may be read."""
        return self._have[block] == 1

    def missing(self) -> list[int]:
        """Blocks that have not arrived, in order."""
        return [b for b in range(self.layout.blocks) if not self._have[b]]

    def held(self) -> int:
        """Bytes that have arrived."""
        return sum(self.layout.length(b) for b in range(self.layout.blocks) if self._have[b])

    def mark_changed(self, inode: int) -> None:
        """Say that a file changed at the source before it was copied: it is not to be read."""
        self._changed[inode] = 1

    def is_changed(self, inode: int) -> bool:
        """Whether ``mark_changed`` was called for a file."""
        return self._changed[inode] == 1

    def changed(self) -> list[bytes]:
        """Paths of the files for which ``mark_changed`` was called."""
        inodes = self.layout.tree.inodes
        return [inode.path for n, inode in enumerate(inodes) if self._changed[n]]

    def read(self, start: int, end: int) -> memoryview:
        """Bytes ``start`` to ``end`` of the buffer, not copied. Ask ``has`` first."""
        return self._read_only[start:end]

    def remove(self) -> None:
        """Delete it; mappings that are still there keep their memory until they go."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _full(directory: Path, needed: int, free: int) -> StoreError:
    return StoreError(
        f"{needed >> 20} MiB do not fit into {directory.parent}, which has {free >> 20} MiB free",
        hint="free memory there, or set WHEELMOUNT_STORE to a directory with more room",
    )
