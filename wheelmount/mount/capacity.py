"""Whether the bytes of a mount fit where they are to be kept."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import psutil

from wheelmount.errors import StoreError
from wheelmount.mount import kernel
from wheelmount.mount.layout import Layout
from wheelmount.mount.summary import holes, pages

SLACK = 64 << 20
"""Bytes a tmpfs may hold beyond the files themselves: tables, and what rounding missed."""

HOLES = 64 << 20
"""Bytes of holes that readers may fill in memory; as many as there are bytes, if that is more."""


def footprint(layout: Layout) -> int:
    """Bytes of memory that the files may take which a layout adds to a store."""
    added = (layout.tree.inodes[n] for n in layout.fresh | layout.copies.keys())
    return sum(pages(inode.size) for inode in added) + SLACK


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


def _free(directory: Path, *, memory: bool) -> int:
    if memory:
        return int(psutil.virtual_memory().available)
    return shutil.disk_usage(directory).free


def _full(where: str, needed: int, free: int) -> StoreError:
    what = f"{needed >> 20} MiB" if needed else "the files"
    return StoreError(
        f"{what} do not fit into {where}, which has {free >> 20} MiB free",
        hint="free memory there, or set WHEELMOUNT_STORE to a directory with more room",
    )
