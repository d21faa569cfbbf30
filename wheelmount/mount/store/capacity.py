"""Check whether the bytes of a mount fit into memory or on a disk.

A Slurm job or a container has a control group with its own memory limit, which may be far
below the machine's free memory (see cgroups(7)). Files in memory count, and a process in a
full group is killed.
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
"""Bytes of kernel memory for an inode of a tmpfs, and for a name: ``shmem_inode_cache`` and
``dentry`` in /proc/slabinfo, with a directory's entry for each."""

SHORT = 127
"""Longest target of a symlink, in bytes, that takes no page in a tmpfs."""

HOLES = 64 << 20
"""Bytes of holes that readers may fill in memory, or the bytes of the files if they are more."""


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
            copied: whether files that are copied from other files take room too.
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
        """Bytes of a tmpfs that can hold the generation and all its holes."""
        return self.data + self.holes + self.tables

    def stored(self, *, memory: bool) -> int:
        """Return the bytes that the generation takes, of memory or of the store's disk.

        In memory, names and inodes are included.
        """
        return self.data + self.tables + (self.kernel if memory else 0)


def check(directory: Path, needed: int, *, memory: bool) -> None:
    """Check that a number of bytes fits into memory or a file system.

    Args:
        directory: directory that they are to be written to.
        needed: number of bytes.
        memory: check against free memory, not against the file system of ``directory``.

    Raises:
        StoreError: the bytes do not fit.
    """
    free = _free(directory, memory=memory)
    if needed > free:
        raise _full("memory" if memory else str(directory), needed, free)


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
                f"the holes of sparse files, {needed >> 20} MiB, could fill the memory that the "
                "kernel shows this mount from",
                hint="unmount, and mount again: then it is served through FUSE, which frees holes",
            )


def failure(directory: Path, error: OSError) -> StoreError:
    """Convert the error of a write to a store's directory to one for users."""
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return _full(str(directory.parent), 0, _free(directory, memory=False))
    return StoreError(f"cannot write to {directory}: {error.strerror}")


def available() -> int:
    """Return bytes of memory that the machine and its control groups leave for files."""
    free = int(psutil.virtual_memory().available)
    left = cgroup_left()
    return free if left is None else min(free, left)


def _free(directory: Path, *, memory: bool) -> int:
    if memory:
        return available()
    free = shutil.disk_usage(directory).free
    return min(free, available()) if syscalls.in_memory(directory) else free


def _full(where: str, needed: int, free: int) -> StoreError:
    what = f"{needed >> 20} MiB" if needed else "the files"
    return StoreError(
        f"{what} do not fit into {where}, which has {free >> 20} MiB free",
        hint="free memory there, or set WHEELMOUNT_STORE to a directory with more room",
    )


_VERSIONS = (
    (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    (
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)
"""For each version of cgroups: the files with limits, the file with bytes in use, and the counts of
these bytes that are cached files of disks, which the kernel can drop."""


def cgroup_left(listed: str | None = None, mounts: Iterable[Mounted] | None = None) -> int | None:
    """Return the least number of bytes left in this process's control group and all above it.

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
    rooms = [room for group in groups if (room := _room(group)) is not None]
    return min(rooms, default=None)


def _groups(listed: str, mounts: list[Mounted]) -> Iterator[Path]:
    """Yield directories of the memory groups of a process, and of all groups above them."""
    for line in listed.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.kind == ("cgroup" if controllers else "cgroup2"):
                group = top = Path(mount.path)
                with contextlib.suppress(
                    ValueError
                ):  # a container may see its own group as the topmost
                    group = top / PurePath(path).relative_to(mount.root)
                yield from (each for each in (group, *group.parents) if each.is_relative_to(top))


def _room(group: Path) -> int | None:
    """Return bytes that are left in one group; None if it has no limit."""
    for limits, usage, given_up in _VERSIONS:
        with contextlib.suppress(OSError):  # a group of the other version, or the topmost one
            bounds = [text for name in limits if (text := (group / name).read_text().strip())]
            bounds = [text for text in bounds if text != "max"]
            if not bounds:
                return None
            used = int((group / usage).read_text())
            parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            spare = sum(int(parts.get(name, 0)) for name in given_up)
            return max(0, min(map(int, bounds)) - used + spare)
    return None
