"""Whether the bytes of a mount fit where they are to be kept."""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from wheelmount.errors import StoreError
from wheelmount.mount import cgroup, kernel
from wheelmount.mount.layout import Layout
from wheelmount.mount.proofs import RECORD
from wheelmount.mount.summary import PAGE, holes, pages

SLACK = 1 << 20
"""Bytes of a tmpfs for a few small files of the store's own."""

INODE, NAME = 1 << 10, 256
"""Bytes that the kernel keeps for an inode of tmpfs, and for a name of one: ``shmem_inode_cache``
and ``dentry`` in /proc/slabinfo, with what a directory notes of each."""

SHORT = 127
"""Bytes of a symlink's target that take no page in tmpfs."""

HOLES = 64 << 20
"""Bytes of holes that readers may fill in memory; as many as there are bytes, if that is more."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a generation adds to a store, bytes.

    Attributes:
        data: of the files that are new, in whole pages, holes left out.
        holes: of those files, in whole pages.
        tables: what is kept beside the files: description, what has arrived, what changed.
        kernel: what the kernel keeps for names and inodes of a file system in memory.
    """

    data: int
    holes: int
    tables: int
    kernel: int

    @classmethod
    def of(cls, layout: Layout, description: int, *, copied: bool) -> Need:
        """What a layout adds.

        Args:
            layout: of the generation.
            description: bytes of all that is kept of it.
            copied: whether files that have the bytes of others take room of their own.
        """
        inodes = layout.tree.inodes
        new = layout.fresh | layout.copies.keys() if copied else layout.fresh
        room = sum(pages(inodes[number].size) for number in new)
        empty = sum(holes(inodes[number]) for number in new)
        links = sum(PAGE for inode in inodes.values() if inode.is_symlink and inode.size > SHORT)
        records = RECORD.size * (len(new) + layout.blocks)
        tables = sum(pages(size) for size in (description, layout.blocks, layout.places, records))
        kernel = INODE * (len(new) + len(layout.tree.names)) + NAME * len(inodes)
        return cls(room - empty + links, empty, tables + SLACK, kernel)

    @property
    def file_system(self) -> int:
        """Of a tmpfs, so that nothing that it is to hold ever finds it full."""
        return self.data + self.holes + self.tables

    def stored(self, *, memory: bool) -> int:
        """Of memory, or of the disk that the store lies on; readers may yet fill holes."""
        return self.data + self.tables + (self.kernel if memory else 0)


def check(directory: Path, needed: int, *, memory: bool) -> None:
    """See that so many bytes fit.

    Args:
        directory: where they are to be kept, or the file system that is to keep them.
        needed: bytes.
        memory: whether that is one in memory.

    Raises:
        StoreError: they do not.
    """
    free = _free(directory, memory=memory)
    if needed > free:
        raise _full("memory" if memory else str(directory), needed, free)


def check_holes(directory: Path, layout: Layout, *, owned: bool) -> None:
    """See that readers who map the holes of all files do not fill a file system in memory.

    Args:
        directory: the file system that keeps the files.
        layout: of the files.
        owned: whether nothing else is kept there, so that there is room for each hole.

    Raises:
        StoreError: they could.
    """
    inodes = layout.tree.inodes.values()
    needed = sum(holes(inode) for inode in inodes if inode.is_file)
    if needed and kernel.in_memory(directory):
        free = _free(directory, memory=True)
        if not owned or needed + layout.size > free:
            raise StoreError(
                f"the holes of sparse files, {needed >> 20} MiB, could fill the memory that the "
                "kernel shows this mount from",
                hint="unmount, and mount again: then it is served in a way that lets go of holes",
            )


def failure(directory: Path, error: OSError) -> StoreError:
    """What to say of an error when something was written to a directory."""
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return _full(str(directory.parent), 0, _free(directory, memory=False))
    return StoreError(f"cannot write to {directory}: {error.strerror}")


def available() -> int:
    """Bytes of memory that files may take here: what the machine and its control groups leave."""
    free = int(psutil.virtual_memory().available)
    left = cgroup.left()
    return free if left is None else min(free, left)


def _free(directory: Path, *, memory: bool) -> int:
    if memory:
        return available()
    free = shutil.disk_usage(directory).free
    return min(free, available()) if kernel.in_memory(directory) else free


def _full(where: str, needed: int, free: int) -> StoreError:
    what = f"{needed >> 20} MiB" if needed else "the files"
    return StoreError(
        f"{what} do not fit into {where}, which has {free >> 20} MiB free",
        hint="free memory there, or set WHEELMOUNT_STORE to a directory with more room",
    )
