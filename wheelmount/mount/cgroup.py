"""What control groups leave this process of memory; see cgroups(7).

A job of Slurm or a container has a group with a limit of its own, which may be far below what the
machine has free. Files in memory count for it, and a process in a group that is full is killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

from wheelmount.mount import point
from wheelmount.mount.point import Mounted

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


def left(listed: str | None = None, mounts: Iterable[Mounted] | None = None) -> int | None:
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
    groups = _groups(listed, point.table() if mounts is None else list(mounts))
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
