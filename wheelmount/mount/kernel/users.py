"""Find the users of earlier trees: processes and mounts that can still reach a name in a tree.

A user is a mount in any namespace, or a process that has a directory of the tree open, as its
working directory or as its root. Open and mapped files do not count, because they need no names. Of
a process that this one may not inspect (another user's, if this user is not root) only the mounts
count. See proc(5).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path

from wheelmount.mount.kernel import syscalls, views
from wheelmount.mount.kernel.points import Mounted, name_of
from wheelmount.mount.kernel.views import Root, Space

_TRIES = 3
"""Attempts to list a process's descriptors while it closes some: others may take their place."""


class Tree:
    """A directory that a mount showed.

    Args:
        path: its path for this process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = Root.of(path)
        self.device = path.stat().st_dev

    @cached_property
    def directories(self) -> frozenset[int]:
        """Inode numbers of the directory and all directories below it."""
        return frozenset(_directories(self.path))


def _directories(path: Path) -> Iterator[int]:
    yield path.stat().st_ino
    pending = [str(path)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield entry.inode()
                    pending.append(entry.path)


class Users:
    """Finds the users of trees; checks the users that it found last time first."""

    def __init__(self) -> None:
        self._last: dict[Tree, list[int]] = {}

    def find(self, trees: Collection[Tree]) -> dict[Tree, list[str]]:
        """Return descriptions of each tree's users, for messages; an empty list if there are none.

        A directory that one process passes to another during the search may be missed, so a tree
        is unused only if two searches in a row find no user.
        """
        reached = [(space, mount) for space in views.spaces() for mount in space.reached()]
        found = {
            tree: [_place(*each) for each in reached if tree.root.below(each[1]) is not None]
            for tree in trees
        }
        listed = {mount.id for _, mount in reached}
        rest = [tree for tree in trees if not found[tree]]
        for tree in rest:
            found[tree] = self._look(self._last.get(tree, []), [tree], listed)[tree]
        rest = [tree for tree in rest if not found[tree]]
        if rest:
            found |= self._look(views.processes(), rest, listed)
        self._last = {tree: self._last[tree] for tree in trees if tree in self._last}
        return found

    def _look(
        self,
        processes: Iterable[int],
        trees: Collection[Tree],
        listed: set[int],
    ) -> dict[Tree, list[str]]:
        users: dict[Tree, list[int]] = {tree: [] for tree in trees}
        others: set[int] = set()  # mounts that no process lists, such as those of pipes and sockets
        devices = {tree.device for tree in trees}
        for process in processes:
            held = _held(process, listed, others, devices)
            for tree in trees:
                if any(d == tree.device and inode in tree.directories for d, inode in held):
                    users[tree].append(process)
        self._last |= users
        return {tree: [name_of(process) for process in found] for tree, found in users.items()}


def covered(tree: Tree) -> set[str]:
    """Return paths in a tree that are mount points: deleting them would remove those mounts."""
    parts = {tree.root.below(mount) for space in views.spaces() for mount in space.mounts}
    return {part for part in parts if part is not None}


def inhabited(mount: Mounted) -> bool:
    """Return whether a process of any namespace works in a file system, or has its root there.

    Args:
        mount: one of the file system's mounts.
    """
    device = os.makedev(*map(int, mount.device.split(":")))
    for process in views.processes():
        for link in ("cwd", "root"):
            with contextlib.suppress(OSError):
                if syscalls.look(f"/proc/{process}/{link}", follow=True).device == device:
                    return True
    return False


def viewers(mount: Mounted) -> list[str]:
    """Return descriptions of the views of a mount at other places, in any namespace, for messages.

    A copy that came with a copy of the directory that the mount covers does not count. A new
    namespace gets such copies, and so does a container, or the building of an image, that binds a
    directory above.
    """
    root, place = Root(mount.device, mount.root), views.here().place(mount)
    return [
        _place(space, each)
        for space in views.spaces()
        for each in space.reached()
        if root.below(each) is not None and space.place(each) != place
    ]


def _place(space: Space, mount: Mounted) -> str:
    return f"{name_of(space.process) if space.process else 'the mount'} at {mount.path}"


def _held(
    process: int, listed: set[int], others: set[int], devices: set[int]
) -> set[tuple[int, int]]:
    """Return device and inode of each directory that a process holds in mounts not ``listed``.

    Adds to ``others`` the mounts whose device is none of ``devices``.
    """
    held: set[tuple[int, int]] = set()
    for _ in range(_TRIES):
        whole = True
        links = ["cwd", "root"]
        try:
            for fd in os.listdir(f"/proc/{process}/fdinfo"):  # noqa: PTH208 - fast for thousands
                try:
                    mount = _mount_of(f"/proc/{process}/fdinfo/{fd}")
                except FileNotFoundError:
                    whole = False
                else:
                    if mount not in listed and mount not in others:
                        links.append(f"fd/{fd}")
        except OSError:  # the process has ended, or is a kernel thread
            return held
        for link in links:
            try:
                found = syscalls.look(f"/proc/{process}/{link}", follow=True)
            except OSError:
                whole = False
                continue
            if found.device not in devices:
                others.add(found.mount)
            elif found.mount not in listed and stat.S_ISDIR(found.mode):
                held.add((found.device, found.inode))
        if whole:
            break
    return held


def _mount_of(fdinfo: str) -> int:
    file = os.open(fdinfo, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(file, 256)
    finally:
        os.close(file)
    return int(data.partition(b"mnt_id:")[2].split(None, 1)[0])
