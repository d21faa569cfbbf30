"""Views of a mount: all mounts, in all mount namespaces of this machine, that show the same tree.

A bind mount, a container's ``--bind`` and a new mount namespace keep the tree that was mounted when
they were made; a mount that replaces the original later is not seen there. So each view is
exchanged by itself, which requires only the right to enter its namespace.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from wheelmount.mount.kernel import points, syscalls
from wheelmount.mount.kernel.points import Mounted

log = logging.getLogger("wheelmount")


@dataclass(frozen=True)
class Root:
    """A directory as ``mountinfo`` names it.

    Attributes:
        device: device number of its file system, as ``major:minor``.
        path: its path within that file system.
    """

    device: str
    path: str

    @classmethod
    def of(cls, directory: Path) -> Root:
        """Return the device and path of a directory that this process can reach."""
        mount = syscalls.look(directory).mount
        holder = next((each for each in points.table() if each.id == mount), None)
        if holder is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
        inside = os.path.relpath(os.path.realpath(directory), holder.path)
        return cls(holder.device, str(Path(holder.root, inside)))

    def below(self, mount: Mounted) -> str | None:
        """Return the relative path of the part of this directory that a mount shows, or None."""
        if mount.device != self.device:
            return None
        if mount.root == self.path:
            return ""
        start = self.path.rstrip("/") + "/"
        return mount.root.removeprefix(start) if mount.root.startswith(start) else None


@dataclass(frozen=True)
class Space:
    """A mount namespace as one of its processes sees it.

    Attributes:
        number: number of the namespace; 0 if this user may not see it.
        process: id of the process; 0 for this process.
    """

    number: int
    process: int

    @cached_property
    def mounts(self) -> list[Mounted]:
        """All mounts of the namespace; none if the process is gone."""
        try:
            return points.table(self.process or "self")
        except OSError:
            return []

    def reached(self) -> Iterator[Mounted]:
        """Return the mounts that a path leads to, without those that another mount covers."""
        paths = {mount.id: mount.path for mount in self.mounts}
        covered = {each.parent for each in self.mounts if paths.get(each.parent) == each.path}
        return (mount for mount in self.mounts if mount.id not in covered)

    def place(self, mount: Mounted) -> Root | None:
        """Return the directory that a mount covers; None if the process does not see it.

        Copies of the mount that come with a copy of the directory (in a new namespace, or by a
        recursive bind mount of a directory above) cover the same one, whatever their path. So does
        a mount on top of such a copy: where the copy could not be removed, its successor is there.
        """
        mounts = {each.id: each for each in self.mounts}
        holder = mounts.get(mount.parent)
        while holder is not None and holder.path == mount.path != "/":  # the root may hold itself
            holder = mounts.get(holder.parent)
        if holder is None:
            return None
        inside = os.path.relpath(mount.path, holder.path)
        return Root(holder.device, str(Path(holder.root, inside)))


def here() -> Space:
    """Return the mount namespace of this process."""
    return Space(Path("/proc/self/ns/mnt").stat().st_ino, 0)


def spaces() -> Iterator[Space]:
    """Yield all mount namespaces of this machine, starting with that of this process.

    A namespace whose processes have different root directories is yielded once for each root,
    because they see different parts of it.
    """
    own = here()
    seen = {(own.number, _root("self"))}
    yield own
    for process in processes():
        try:
            number = Path(f"/proc/{process}/ns/mnt").stat().st_ino
            root = _root(process)
        except PermissionError:
            yield Space(0, process)
        except OSError:  # the process has ended
            continue
        else:
            if (number, root) not in seen:
                seen.add((number, root))
                yield Space(number, process)


def processes() -> list[int]:
    """Return the ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names only


def _root(process: int | str) -> tuple[int, int]:
    found = syscalls.look(f"/proc/{process}/root", follow=True)
    return found.mount, found.inode


def exchange(
    space: Space, mount: Mounted, tree: Path, agree: Callable[[int], bool] = lambda _: True
) -> bool:
    """Replace a mount by a bind mount of a directory, without a moment in which neither is shown.

    Mounts inside the old mount are kept where the directory has their mount points. Processes that
    work in the old tree stay there.

    Args:
        space: the namespace of the mount.
        mount: one of ``space.mounts``; nothing is done if it is gone or covered.
        tree: the directory, a path in the namespace of this process.
        agree: called with the id of the new mount immediately before the mounts are exchanged, and
            returns whether they are to be.

    Returns:
        Whether the mount was replaced.

    Raises:
        OSError: the mount cannot be replaced, and is unchanged.
    """
    with syscalls.clone(tree, flags=syscalls.flags_of(mount.options)) as made:
        number = syscalls.mount_of(made)
        if space.process == 0:
            return _exchange(space, mount, made, lambda: agree(number))
        return _elsewhere(space, lambda: _exchange(space, mount, made, lambda: agree(number)))


def _elsewhere(space: Space, act: Callable[[], bool]) -> bool:
    """Call a function in another namespace, on a thread that enters it while the others stay."""
    outcome: list[bool | OSError] = []

    def run() -> None:
        try:
            process = f"/proc/{space.process}"
            root = os.open(f"{process}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, root)
            namespace = os.open(f"{process}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, namespace)
            if os.fstat(namespace).st_ino != space.number:
                raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
            syscalls.enter(namespace, root)
            outcome.append(act())
        except OSError as error:
            outcome.append(error)

    with contextlib.ExitStack() as opened:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    (result,) = outcome
    if isinstance(result, OSError):
        raise result
    return result


def _exchange(space: Space, mount: Mounted, made: int, agree: Callable[[], bool]) -> bool:
    if not _is_top(mount):
        return False
    inside = [each for each in space.mounts if each.parent == mount.id]
    with contextlib.ExitStack() as clones:
        children = []
        for child in inside:
            if child.path == mount.path:  # a mount that covers this one; see ``_is_top``
                return False
            children.append((clones.enter_context(syscalls.clone(child.path)), child))
        if not agree():
            return False
        below = True
        try:
            syscalls.attach(made, mount.path, below=True)
        except OSError as error:
            # The mount is locked: its namespace has fewer rights than the one it was copied from.
            # A locked mount can be covered, but not moved.
            if space.process == 0 or error.errno not in (errno.EINVAL, errno.EPERM):
                raise
            syscalls.attach(made, mount.path)
            below = False
        for clone, child in children:
            relative = os.path.relpath(child.path, mount.path)
            try:
                syscalls.attach(clone, relative, at=made)
            except OSError as error:
                log.info("what was mounted at %s is gone: %s", child.path, error.strerror)
    if below and _is_top(mount):
        syscalls.unmount(mount.path, detach=True)
    return True


def _is_top(mount: Mounted) -> bool:
    """Return whether a mount is still at its place, and not covered there."""
    try:
        return syscalls.look(mount.path).mount == mount.id
    except OSError:
        return False


@contextlib.contextmanager
def held(mount: Mounted) -> Iterator[None]:
    """Keep the file system of a mount during the context, even if the mount is unmounted.

    The kernel gives the device number of a file system that has ended to the next one that any
    process mounts, so device numbers may be compared only while the file system is kept. Keeping
    it does not make the mount busy.

    Raises:
        OSError: the mount is gone or covered, or this process may not copy mounts (then it may not
            change those of other namespaces either).
    """
    with syscalls.clone(mount.path, flags=0):
        if not _is_top(mount):
            raise FileNotFoundError(errno.ENOENT, "another mount is there", mount.path)
        yield


def withdraw(mount: Mounted) -> None:
    """Unmount the copies of a mount that other namespaces got with the directory that it covers.

    Copies that this process may not unmount stay, and so do views at other places, which were made
    on purpose.

    Args:
        mount: must exist, or be kept by ``held``.
    """

    def drop() -> bool:
        if _is_top(each):
            syscalls.unmount(each.path, detach=True)
        return True

    place = here().place(mount)
    for space in spaces():
        for each in space.reached():
            if space.process and each.device == mount.device and space.place(each) == place:
                with contextlib.suppress(OSError):
                    _elsewhere(space, drop)
