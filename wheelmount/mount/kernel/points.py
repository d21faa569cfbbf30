"""Mount points: where a mount may be made, which processes use it, how it is unmounted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import shutil
import stat
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wheelmount.errors import InputError, MountError, UnavailableError
from wheelmount.mount.kernel import syscalls

FILE_SYSTEM = "fuse.wheelmount"
"""Type of our mounts in ``/proc/self/mountinfo``."""

PRIVATE = "{private}"
"""Begins mount points in a host's own runtime directory, which it alone knows: on another machine,
a directory with the name that the client's has may be another user's."""

MOUNTS = "mounts"
"""Name of the file of ``remember``."""


@dataclass(frozen=True, slots=True)
class View:
    """What a process sees of file systems: two with equal views see each other's mounts.

    Attributes:
        machine: kernel boot id.
        namespace: number of the mount namespace.
        private: the user's own runtime directory there, where it was asked for.
    """

    machine: str
    namespace: int
    private: str = field(default="", compare=False)

    @classmethod
    def here(cls, private: str = "") -> View:
        """The view of this process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(boot, Path("/proc/self/ns/mnt").stat().st_ino, private)


def place(
    mntpoint: str, names: Sequence[str], views: Sequence[View], source: str, client: View
) -> list[str]:
    """Where each host is to mount.

    ``{host}`` becomes the host's name. Where several hosts share one view of the file system and
    the path does not tell them apart, the name is added to it.

    Args:
        mntpoint: absolute path, may hold ``{host}``; or one that begins with ``PRIVATE``.
        names: of the hosts.
        views: of the hosts.
        source: the directory that is mounted.
        client: the view of the client.

    Raises:
        InputError: the path is not absolute, or a mount there would hide its own source.
    """
    if not mntpoint.startswith(("/", f"{PRIVATE}/")):
        raise InputError(f"the mount point {mntpoint} is relative", hint="give an absolute path")
    if mntpoint.startswith("/"):
        mntpoint = os.path.normpath("/" + mntpoint.lstrip("/"))  # of two slashes it keeps both
    shared = Counter(views)
    paths = []
    for name, view in zip(names, views, strict=True):
        path = mntpoint.replace("{host}", name)
        if path == mntpoint and shared[view] > 1:
            path = f"{mntpoint}-{name}"
        path = within(path, view.private)
        if view == client:
            _check_apart(same(path), os.path.realpath(source))
        paths.append(path)
    return paths


def within(path: str, private: str) -> str:
    """A mount point on a host whose own runtime directory is ``private``."""
    return private + path.removeprefix(PRIVATE) if path.startswith(f"{PRIVATE}/") else path


def _check_apart(path: str, source: str) -> None:
    hint = "give another mount point, for example `/mnt/{host}`"
    if Path(path) in (Path(source), *Path(source).parents):
        raise InputError(f"a mount at {path} would hide its own source", hint=hint)
    if Path(source) in Path(path).parents:
        raise InputError(f"a mount at {path} would be inside its own source", hint=hint)


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
    """A line of ``mountinfo`` as in proc(5).

    Attributes:
        id: of the mount; no other has it as long as this one is anywhere.
        parent: id of the mount that it is mounted in.
        device: of its file system, as ``major:minor``.
        root: what of the file system it shows.
        path: where it is, for a process of its namespace.
        options: of the mount.
        kind: type of the file system.
    """

    id: int
    parent: int
    device: str
    root: str
    path: str
    options: frozenset[str]
    kind: str


def table(process: int | str = "self") -> list[Mounted]:
    """All mounts that a process sees, those above others after them."""
    found = []
    for line in Path(f"/proc/{process}/mountinfo").read_bytes().splitlines():
        fields, _, rest = line.partition(b" - ")
        number, parent, device, root, path, options, *_ = fields.split()
        found.append(
            Mounted(
                int(number),
                int(parent),
                device.decode(),
                _unescaped(root),
                _unescaped(path),
                frozenset(options.decode().split(",")),
                rest.split()[0].decode(),
            )
        )
    return found


def _unescaped(path: bytes) -> str:
    """Blanks in a path are written as octal escapes."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), path))


def find(path: str) -> Mounted | None:
    """What is mounted topmost at exactly ``path``; it is not touched."""
    try:
        found = syscalls.look(path)
    except OSError:
        return None
    return _by_id(found.mount) if found.top else None


def _by_id(number: int) -> Mounted | None:
    return next((each for each in table() if each.id == number), None)


def mounted(path: str) -> str | None:
    """Type of the topmost file system mounted at exactly ``path``, or None."""
    found = find(path)
    return None if found is None else found.kind


def resolve(path: str) -> str:
    """A path as the kernel's own lists of mounts have it.

    Args:
        path: absolute; its last component need not exist and is not touched.

    Raises:
        InputError: its last component is a symlink.
    """
    parent, name = os.path.split(os.path.normpath(path))
    found = str(Path(os.path.realpath(parent), name))
    try:
        link = stat.S_ISLNK(syscalls.look(found).mode)
    except OSError:  # it is to be made
        link = False
    if link:
        raise InputError(
            f"the mount point {path} is a symbolic link",
            hint=f"give the directory itself: {os.path.realpath(found)}",
        )
    return found


def same(path: str) -> str:
    """``resolve`` for a path that is only compared with others."""
    try:
        return resolve(path)
    except InputError:
        return path


def remember(directory: Path, *mounts: tuple[int, str, str]) -> None:
    """Write down which mount is that of a serving process.

    Args:
        directory: of the mount.
        mounts: id, device and root of the mount, and of the one that is about to take its place.
            The kernel gives the id of a mount that is gone to another one.
    """
    note = directory / MOUNTS
    note.with_suffix(".new").write_text(json.dumps(mounts))
    note.with_suffix(".new").replace(note)


def standing(directory: Path) -> Mounted | None:
    """The mount of a serving process as it stands, wherever it was moved; None if it is gone.

    What else is mounted above it does not matter.

    Args:
        directory: of the mount.
    """
    before = None
    while (note := _note(directory)) != before:  # else another mount took its place meanwhile
        known = json.loads(note)
        found = [
            each
            for each in table()
            if [each.id, each.device, each.root.removesuffix("//deleted")] in known  # proc(5)
        ]
        if found:
            return found[-1]
        before = note
    return None


def _note(directory: Path) -> str:
    try:
        return (directory / MOUNTS).read_text()
    except OSError:
        return "[]"


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
        force: detach it although it is in use; users keep the files they have open.

    Raises:
        MountError: it is in use, or may not be taken down; ``busy`` in the message.
    """
    try:
        syscalls.unmount(path, detach=force)
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


def take_down(mount: Mounted, *, force: bool) -> None:
    """``unmount`` for one mount, and no other that is above it; harmless if it is gone.

    Raises:
        MountError: as of ``unmount``, or another mount is above it.
    """
    above = find(mount.path)
    if _by_id(mount.id) is None:
        return
    if above is None or above.id != mount.id:
        raise MountError(
            f"another mount is above that at {mount.path}",
            hint=f"unmount that one first: umount {mount.path}",
        )
    unmount(mount.path, force=force)


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


def _below(link: Path, path: str) -> bool:
    try:
        target = str(link.readlink())
    except OSError:
        return False
    return target == path or target.startswith(path + "/")
