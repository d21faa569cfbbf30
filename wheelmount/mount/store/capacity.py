"""Whether the bytes of a mount fit where they are to be kept.

A job of Slurm or a container has a control group with a memory limit of its own, which may be far
below what the machine has free (see cgroups(7)). Files in memory count for it, and a process in a
group that is full is killed.
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
    if needed and syscalls.in_memory(directory):
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
"""Of each version of cgroups: files with limits, the file with what is used, and what of that is
files on disks, which the kernel gives up for something else."""


def cgroup_left(listed: str | None = None, mounts: Iterable[Mounted] | None = None) -> int | None:
    """Bytes that may still be taken: the least of what the group and all above it leave.

    Args:
        listed: the process's groups, as in ``/proc/PID/cgroup``; default those of this process.
        mounts: what this process sees mounted; default found.

    Returns:
        None if there is no limit to be seen.
    """
    if listed is None:
        try:
            listed = Path("/proc/self/cgroup").read_text()
        except OSError:  # a kernel without
            return None
    groups = _groups(listed, points.table() if mounts is None else list(mounts))
    rooms = [room for group in groups if (room := _room(group)) is not None]
    return min(rooms, default=None)


def _groups(listed: str, mounts: list[Mounted]) -> Iterator[Path]:
    """Directories of the groups with memory that a process is in, and of all above them."""
    for line in listed.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.kind == ("cgroup" if controllers else "cgroup2"):
                group = top = Path(mount.path)
                with contextlib.suppress(ValueError):  # a container may see its own as the topmost
                    group = top / PurePath(path).relative_to(mount.root)
                yield from (each for each in (group, *group.parents) if each.is_relative_to(top))


def _room(group: Path) -> int | None:
    """Bytes that one group leaves; None if it has no limit."""
    for limits, usage, given_up in _VERSIONS:
        with contextlib.suppress(OSError):  # it is of the other version, or is the topmost
            bounds = [text for name in limits if (text := (group / name).read_text().strip())]
            bounds = [text for text in bounds if text != "max"]
            if not bounds:
                return None
            used = int((group / usage).read_text())
            parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            spare = sum(int(parts.get(name, 0)) for name in given_up)
            return max(0, min(map(int, bounds)) - used + spare)
    return None
