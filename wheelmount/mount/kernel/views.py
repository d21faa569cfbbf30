"""Views of a mount: all places, in all mount namespaces of this machine, that show one tree.

A bind mount, a container's ``--bind`` and a new mount namespace hold the tree that was mounted when
they were made; what takes its place later is not seen there. So each of them is exchanged by
itself, which needs only that its namespace may be entered.
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
    """A directory as the kernel's lists of mounts name it.

    Attributes:
        device: of its file system, as ``major:minor``.
        path: within that file system.
    """

    device: str
    path: str

    @classmethod
    def of(cls, directory: Path) -> Root:
        """That of a directory which this process can reach."""
        mount = syscalls.look(directory).mount
        holder = next((each for each in points.table() if each.id == mount), None)
        if holder is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
        inside = os.path.relpath(os.path.realpath(directory), holder.path)
        return cls(holder.device, str(Path(holder.root, inside)))

    def below(self, mount: Mounted) -> str | None:
        """Which part of this directory a mount shows: a relative path, or None if none."""
        if mount.device != self.device:
            return None
        if mount.root == self.path:
            return ""
        start = self.path.rstrip("/") + "/"
        return mount.root.removeprefix(start) if mount.root.startswith(start) else None


@dataclass(frozen=True)
class Space:
    """A mount namespace as a process in it sees it.

    Attributes:
        number: of the namespace; 0 if that may not be known.
        process: id of the process; 0 for this one.
    """

    number: int
    process: int

    @cached_property
    def mounts(self) -> list[Mounted]:
        """What is mounted there; empty if the process is gone."""
        try:
            return points.table(self.process or "self")
        except OSError:
            return []

    def reached(self) -> Iterator[Mounted]:
        """Return mounts to which a path leads, not those that another mount covers."""
        paths = {mount.id: mount.path for mount in self.mounts}
        covered = {each.parent for each in self.mounts if paths.get(each.parent) == each.path}
        return (mount for mount in self.mounts if mount.id not in covered)


def spaces() -> Iterator[Space]:
    """All mount namespaces of this machine, this process's first.

    Processes of one namespace that have different roots see different parts of it.
    """
    own = Path("/proc/self/ns/mnt").stat().st_ino
    seen = {(own, _root("self"))}
    yield Space(own, 0)
    for process in processes():
        try:
            number = Path(f"/proc/{process}/ns/mnt").stat().st_ino
            root = _root(process)
        except PermissionError:
            yield Space(0, process)
        except OSError:  # it has ended
            continue
        else:
            if (number, root) not in seen:
                seen.add((number, root))
                yield Space(number, process)


def processes() -> list[int]:
    """Ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names only


def _root(process: int | str) -> tuple[int, int]:
    found = syscalls.look(f"/proc/{process}/root", follow=True)
    return found.mount, found.inode


def exchange(
    space: Space, mount: Mounted, tree: Path, note: Callable[[int], None] = lambda _: None
) -> bool:
    """Have a mount show another directory, without a moment in which it shows nothing.

    What is mounted in it is mounted in the other too, unless its directory is not there. Whoever
    is in the old tree stays there.

    Args:
        space: where the mount is.
        mount: as in ``space.mounts``; nothing is done if it is gone or another mount is above it.
        tree: a directory of this process's namespace.
        note: told the id of the mount that takes the place, before it does.

    Returns:
        Whether it was done.

    Raises:
        OSError: it cannot be; the mount is as it was.
    """
    with syscalls.clone(tree, flags=syscalls.flags_of(mount.options)) as made:
        note(syscalls.mount_of(made))
        if space.process == 0:
            return _exchange(space, mount, made)
        return _elsewhere(space, lambda: _exchange(space, mount, made))


def _elsewhere(space: Space, act: Callable[[], bool]) -> bool:
    """Do something in another namespace, which one thread can enter while the others stay."""
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


def _exchange(space: Space, mount: Mounted, made: int) -> bool:
    if not _is_top(mount):
        return False
    inside = [each for each in space.mounts if each.parent == mount.id]
    with contextlib.ExitStack() as clones:
        children = []
        for child in inside:
            if child.path == mount.path:  # what is above it; see ``_is_top``
                return False
            children.append((clones.enter_context(syscalls.clone(child.path)), child))
        below = True
        try:
            syscalls.attach(made, mount.path, below=True)
        except OSError as error:
            # It is locked to a namespace of fewer rights; that can be covered, but not moved.
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
    """Keep the file system of a mount until this is left, also where the mount is taken down.

    The kernel gives the device number of a file system that is gone to the next one that is
    mounted, by any process: what is compared with that number must not be compared with it after
    the file system has gone. A mount that is held is not busy by that.

    Raises:
        OSError: the mount is gone or another is above it; or this process may not copy mounts, and
            so may not change those of other namespaces either.
    """
    with syscalls.clone(mount.path, flags=0):
        if not _is_top(mount):
            raise FileNotFoundError(errno.ENOENT, "another mount is there", mount.path)
        yield


def withdraw(mount: Mounted) -> None:
    """Take down the copies of a mount that other namespaces were made with, where that is allowed.

    Views that were made on purpose, at other places, stay.

    Args:
        mount: stands, or is ``held``.
    """

    def drop() -> bool:
        if _is_top(each):
            syscalls.unmount(each.path, detach=True)
        return True

    for space in spaces():
        for each in space.reached():
            if space.process and (each.device, each.path) == (mount.device, mount.path):
                with contextlib.suppress(OSError):
                    _elsewhere(space, drop)
