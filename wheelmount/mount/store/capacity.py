"""Check whether the bytes of a mount fit into memory or on a disk.

A Slurm job or a container has a control group with its own memory limit, which may be far
below the machine's free memory (see cgroups(7)). Files in memory count towards the limit, and a
process in a full group is killed.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

import psutil

from wheelmount.errors import StoreError
from wheelmount.mount.kernel import points, syscalls
from wheelmount.mount.kernel.points import Mounted
from wheelmount.mount.snapshot.encoded import PAGE, holes, pages
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.store.proofs import RECORD

SLACK = 1 << 20
"""Bytes reserved in a tmpfs for a few small files that the store itself needs."""

INODE, NAME = 1 << 10, 256
"""Bytes of kernel memory that an inode of a tmpfs takes, and a name. They are the sizes of
``shmem_inode_cache`` and ``dentry`` in /proc/slabinfo, with a directory's entry for each."""

SHORT = 127
"""Longest target of a symlink, in bytes, that takes no page in a tmpfs."""

HOLES = 64 << 20
"""Bytes of holes that readers may fill in memory. If the files have more bytes than this, their
holes may have as many."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a generation adds to a store.

    Attributes:
        data: bytes of new files, in whole pages, without holes.
        holes: bytes of these files' holes, in whole pages.
        tables: bytes of the description, and of the tables of arrived blocks and changed files.
        kernel: bytes of names and inodes in the kernel, for a file system in memory.
    """

    data: int
    holes: int
    tables: int
    kernel: int

    @classmethod
    def of(cls, layout: Layout, description: int, *, copied: bool) -> Need:
        """Compute the bytes that a layout adds.

        Args:
            layout: the layout of the generation.
            description: bytes of its description.
            copied: whether files that are copied from other files take room of their own.
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
        """Size, in bytes, of a tmpfs that has room for the generation and all its holes."""
        return self.data + self.holes + self.tables

    def stored(self, *, memory: bool) -> int:
        """Return the bytes that the generation takes in memory or on the store's disk.

        Args:
            memory: whether the files are in memory; if so, names and inodes count too.
        """
        return self.data + self.tables + (self.kernel if memory else 0)


def check(directory: Path, needed: int, *, memory: bool) -> None:
    """Check that a number of bytes fits into memory or a file system.

    Args:
        directory: directory that the bytes are to be written to.
        needed: number of bytes.
        memory: compare with free memory, not with free space in the file system of ``directory``.

    Raises:
        StoreError: the bytes do not fit.
    """
    free = _free(directory, memory=memory)
    if needed > free:
        raise _no_room("memory" if memory else str(directory), needed, free)


def check_holes(directory: Path, layout: Layout, *, owned: bool) -> None:
    """Check that a file system in memory has room for the holes of all files.

    A reader that maps a hole of a tmpfs file makes the kernel allocate its pages.

    Args:
        directory: a directory in the file system of the files.
        layout: the layout of the files.
        owned: whether the file system holds no other files, so that it has room for each hole.

    Raises:
        StoreError: readers could fill the file system.
    """
    inodes = layout.tree.inodes.values()
    needed = sum(holes(inode) for inode in inodes if inode.is_file)
    if needed and syscalls.in_memory(directory):
        free = _free(directory, memory=True)
        if not owned or needed + layout.size > free:
            raise StoreError(
                "readers could fill the memory of this mount with the holes of sparse files, "
                f"{needed >> 20} MiB",
                hint="unmount, and mount again: then it is served through FUSE, where holes take "
                "no memory",
            )


def failure(directory: Path, error: OSError) -> StoreError:
    """Return an error for users from the error of a write to a store's directory."""
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return _no_room(str(directory.parent), 0, _free(directory, memory=False))
    return StoreError(f"cannot write to {directory}: {error.strerror}")


def available() -> int:
    """Return the bytes of memory that the machine and its control groups leave for files."""
    free = int(psutil.virtual_memory().available)
    left = cgroup_left()
    return free if left is None else min(free, left)


def _free(directory: Path, *, memory: bool) -> int:
    if memory:
        return available()
    free = shutil.disk_usage(directory).free
    return min(free, available()) if syscalls.in_memory(directory) else free


def _no_room(place: str, needed: int, free: int) -> StoreError:
    amount = f"{needed >> 20} MiB" if needed else "the files"
    return StoreError(
        f"{amount} do not fit into {place}, which has {free >> 20} MiB free",
        hint="free memory there, or set WHEELMOUNT_STORE to a directory with more room",
    )


_CGROUP_FILES = (
    (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    (
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)
"""For each version of cgroups: the files that contain limits, the file that contains the bytes in
use, and the names of those counts in ``memory.stat`` whose bytes the kernel can drop: cached files
of disks."""


def cgroup_left(listed: str | None = None, mounts: Iterable[Mounted] | None = None) -> int | None:
    """Return the number of bytes that the control groups of this process leave.

    That is the least that its own group or any group above it leaves.

    Args:
        listed: the process's groups, as in ``/proc/PID/cgroup``; default those of this process.
        mounts: mounts that this process sees; default those of mountinfo.

    Returns:
        None if no limit is visible.
    """
    if listed is None:
        try:
            listed = Path("/proc/self/cgroup").read_text()
        except OSError:  # a kernel without cgroups
            return None
    groups = _groups(listed, points.table() if mounts is None else list(mounts))
    left = [room for group in groups if (room := _left(group)) is not None]
    return min(left, default=None)


def _groups(listed: str, mounts: list[Mounted]) -> Iterator[Path]:
    """Yield the directories of a process's memory groups, and of all groups above them."""
    for line in listed.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.kind == ("cgroup" if controllers else "cgroup2"):
                group = top = Path(mount.path)
                # In a container, its own group may be the topmost that is visible.
                with contextlib.suppress(ValueError):
                    group = top / PurePath(path).relative_to(mount.root)
                yield from (each for each in (group, *group.parents) if each.is_relative_to(top))


def _left(group: Path) -> int | None:
    """Return the number of bytes that one group leaves; None if it has no limit."""
    for limits, usage, droppable in _CGROUP_FILES:
        with contextlib.suppress(OSError):  # a group of the other version, or the topmost one
            bounds = [text for name in limits if (text := (group / name).read_text().strip())]
            bounds = [text for text in bounds if text != "max"]
            if not bounds:
                return None
            used = int((group / usage).read_text())
            parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = sum(int(parts.get(name, 0)) for name in droppable)
            return max(0, min(map(int, bounds)) - used + cached)
    return None
