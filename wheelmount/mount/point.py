"""Mount points: where a mount may go, what holds it, how it is taken down."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wheelmount.errors import InputError, MountError, UnavailableError
from wheelmount.mount import kernel

FILE_SYSTEM = "fuse.wheelmount"
"""Type of our mounts in ``/proc/self/mountinfo``."""


@dataclass(frozen=True, slots=True)
class View:
    """What a process sees of file systems: two with equal views see each other's mounts.

    Attributes:
        machine: kernel boot id.
        namespace: number of the mount namespace.
    """

    machine: str
    namespace: int

    @classmethod
    def here(cls) -> View:
        """The view of this process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(boot, Path("/proc/self/ns/mnt").stat().st_ino)


def place(
    mntpoint: str, names: Sequence[str], views: Sequence[View], source: str, client: View
) -> list[str]:
    """Where each host is to mount.

    ``{host}`` becomes the host's name. Where several hosts share one view of the file system and
    the path does not tell them apart, the name is added to it.

    Args:
        mntpoint: absolute path, may hold ``{host}``.
        names: of the hosts.
        views: of the hosts.
        source: the directory that is mounted.
        client: the view of the client.

    Raises:
        InputError: the path is not absolute, or a mount there would hide its own source.
    """
    if not mntpoint.startswith("/"):
        raise InputError(f"the mount point {mntpoint} is relative", hint="give an absolute path")
    shared = Counter(views)
    paths = []
    for name, view in zip(names, views, strict=True):
        path = mntpoint.replace("{host}", name)
        if path == mntpoint and shared[view] > 1:
            path = f"{mntpoint}-{name}"
        if view == client and (path == source or Path(path) in Path(source).parents):
            raise InputError(
                f"a mount at {path} would hide its own source",
                hint="give another mount point, for example `/mnt/{host}`",
            )
        paths.append(path)
    return paths


def prepare(path: str, *, cover: bool) -> bool:
    """Make sure that something can be mounted at ``path``.

    What a dead server of ours left there is taken away.

    Args:
        path: absolute.
        cover: whether a directory that is not empty may be covered.

    Returns:
        True if the directory was made by this call.

    Raises:
        MountError: it is taken, not empty or not a directory, or cannot be made.
    """
    if kind := mounted(path):
        if kind != FILE_SYSTEM or not _dead(path):
            raise MountError(
                f"something is mounted at {path} already ({kind})",
                hint=f"run `wheelmount umount {path}`, or give another mount point",
            )
        unmount(path, force=True)
    try:
        Path(path).mkdir(parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise MountError(
            f"cannot make the mount point {path}: {error.strerror}",
            hint="give a mount point that you may write to",
        ) from None
    else:
        return True
    try:
        empty = next(Path(path).iterdir(), None) is None
    except OSError as error:
        raise MountError(
            f"cannot mount at {path}: {error.strerror}", hint="give an empty directory"
        ) from None
    if not empty and not cover:
        raise MountError(
            f"the mount point {path} is not empty",
            hint="give an empty directory, or one that does not exist yet",
        )
    return False


def available() -> None:
    """Check that this user can mount FUSE file systems here.

    Raises:
        UnavailableError: naming what lacks.
    """
    if not Path("/dev/fuse").exists():
        raise UnavailableError(
            "there is no /dev/fuse on this host",
            hint="load the kernel module (`modprobe fuse`), or start the container with the device",
        )
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise UnavailableError(
            "/dev/fuse may not be opened by you", hint="as root: chmod 666 /dev/fuse"
        )
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise UnavailableError(
            "there is no fusermount3 on this host", hint="install the package fuse3"
        )


@dataclass(frozen=True, slots=True)
class Mounted:
    """A line of ``/proc/self/mountinfo``.

    Attributes:
        kind: type of the file system.
        device: its device, as ``major:minor``.
    """

    kind: str
    device: str


def find(path: str) -> Mounted | None:
    """What is mounted topmost at exactly ``path``; it is not touched."""
    found = None
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields, _, rest = line.partition(b" - ")
        _, _, device, _, point, *_ = fields.split()
        # Blanks in a path are written as octal escapes: proc(5).
        point = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), point)
        if os.fsdecode(point) == path:
            found = Mounted(rest.split()[0].decode(), device.decode())
    return found


def mounted(path: str) -> str | None:
    """Type of the topmost file system mounted at exactly ``path``, or None."""
    found = find(path)
    return None if found is None else found.kind


def shows(path: str, store: Path) -> bool:
    """Whether a generation of a store is mounted at ``path``; a FUSE mount there is not touched."""
    if mounted(path) in (None, FILE_SYSTEM):
        return False
    try:
        found = Path(path).stat()
        roots = [each.stat() for each in store.iterdir() if each.name.isdigit()]
    except OSError:
        return False
    return (found.st_dev, found.st_ino) in {(root.st_dev, root.st_ino) for root in roots}


def await_change() -> None:
    """Wait until something was mounted or unmounted, or for ten seconds."""
    with Path("/proc/self/mountinfo").open("rb") as mounts:
        changes = select.poll()
        changes.register(mounts, select.POLLERR | select.POLLPRI)  # proc(5)
        changes.poll(10_000)


def _dead(path: str) -> bool:
    try:
        os.statvfs(path)  # which the kernel never answers from what it remembers
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def unmount(path: str, *, force: bool) -> None:
    """Take a mount down.

    Args:
        path: where it is.
        force: detach it although it is in use; users keep what they have open.

    Raises:
        MountError: it is in use, or may not be taken down; ``busy`` in the message.
    """
    try:
        kernel.unmount(path, detach=force)
    except OSError as error:
        code = error.errno or errno.EIO
    else:
        return
    if code in (errno.EINVAL, errno.ENOENT):  # not mounted (any more)
        return
    if code == errno.EPERM and os.geteuid() != 0:
        helper = ["fusermount3", "-u", *(["-z"] if force else []), "--", path]
        done = subprocess.run(helper, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        code = errno.EBUSY if "busy" in done.stderr else code
    if code == errno.EBUSY:
        raise MountError(f"{path} is busy", hint="end what uses it, or detach it with --force")
    raise MountError(f"cannot unmount {path}: {os.strerror(code)}", hint="try --force")


def holders(path: str) -> list[str]:
    """Processes that use files below ``path``, as ``name (pid)``; only those we may look into."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            links = [process / "cwd", process / "root", process / "exe"]
            links += (process / "fd").iterdir()
            mapped = (process / "maps").read_bytes()
            if any(_below(link, path) for link in links) or os.fsencode(path) + b"/" in mapped:
                found.append(f"{(process / 'comm').read_text().strip()} ({process.name})")
    return found


def inhabited(path: str) -> bool:
    """Whether a process that we may look into has its working directory at or below ``path``."""
    return any(_below(process / "cwd", path) for process in Path("/proc").glob("[0-9]*"))


def _below(link: Path, path: str) -> bool:
    try:
        target = str(link.readlink())
    except OSError:
        return False
    return target == path or target.startswith(path + "/")
