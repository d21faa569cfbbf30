"""Mount points: choose and prepare them, find what is mounted, list its users, unmount."""

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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wheelmount import disk, linux
from wheelmount.errors import InputError, MountError, UnavailableError
from wheelmount.mount.kernel import syscalls
from wheelmount.owned import make_folders

FILE_SYSTEM = "fuse.wheelmount"
"""Type of wheelmount's FUSE mounts in ``/proc/self/mountinfo``."""

PRIVATE = "{private}"
"""First component of mount points in a host's own runtime directory. Only the host knows its path:
a directory with the path of the client's may belong to another user on another machine."""

MOUNTS = "mounts"
"""Name of the file that ``remember`` writes."""


@dataclass(frozen=True, slots=True)
class View:
    """The mount namespace of a process: processes with equal views see each other's mounts.

    Attributes:
        machine: kernel boot id.
        namespace: number of the mount namespace.
        private: the user's own runtime directory there; empty if unknown.
        rack: the switch that the host is at, if Slurm says that; empty if unknown.
    """

    machine: str
    namespace: int
    private: str = field(default="", compare=False)
    rack: str = field(default="", compare=False)

    @classmethod
    def here(cls, private: str = "") -> View:
        """Return the view of this process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        switches = os.environ.get("SLURM_TOPOLOGY_ADDR", "")  # as in top.switch.node
        rack, _, _ = switches.rpartition(".")
        return cls(boot, Path("/proc/self/ns/mnt").stat().st_ino, private, rack)


def apart() -> bool:
    """Return whether this process has a mount namespace of its own, not the machine's."""
    with contextlib.suppress(PermissionError):  # of an ordinary user
        return not Path("/proc/1/ns/mnt").samefile("/proc/self/ns/mnt")
    return not linux.maps_root()


def place(
    mntpoint: str, names: Sequence[str], views: Sequence[View], source: str, client: View
) -> list[str]:
    """Return the mount point of each host.

    ``{host}`` is replaced by the host's name. If several hosts share a view and the path does not
    contain ``{host}``, the host's name is appended.

    Args:
        mntpoint: absolute path, or a path that begins with ``PRIVATE``; may contain ``{host}``.
        names: names of the hosts.
        views: views of the hosts.
        source: the directory to mount.
        client: the view of the client.

    Raises:
        InputError: the path is not absolute, or a mount there would hide its own source.
    """
    if not mntpoint.startswith(("/", f"{PRIVATE}/")):
        raise InputError(f"the mount point {mntpoint} is relative", hint="give an absolute path")
    if mntpoint.startswith("/"):
        # ``normpath`` keeps two leading slashes.
        mntpoint = os.path.normpath("/" + mntpoint.lstrip("/"))
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
    """Replace a leading ``PRIVATE`` in a mount point by a host's own runtime directory."""
    return private + path.removeprefix(PRIVATE) if path.startswith(f"{PRIVATE}/") else path


def _check_apart(path: str, source: str) -> None:
    hint = "give another mount point, for example `/mnt/{host}`"
    if Path(path) in (Path(source), *Path(source).parents):
        raise InputError(f"a mount at {path} would hide its own source", hint=hint)
    if Path(source) in Path(path).parents:
        raise InputError(f"a mount at {path} would be inside its own source", hint=hint)


def prepare(path: str, *, cover: bool) -> bool:
    """Prepare a mount point: make the directory if it is missing, unmount a dead mount.

    Args:
        path: absolute path of the mount point.
        cover: allow a directory that is not empty, whose entries the mount hides.

    Returns:
        True if this call made the directory.

    Raises:
        MountError: another mount is there, or the directory is not empty, is another kind of file,
            or cannot be made.
    """
    if kind := mounted(path):
        if kind != FILE_SYSTEM or not _dead(path):
            raise MountError(
                f"something is mounted at {path} already ({kind})",
                hint=f"run `wheelmount umount {path}`, or give another mount point",
            )
        unmount(path, force=True)
    try:
        make_folders(Path(path), exist_ok=False)
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
        UnavailableError: the device or program that is missing.
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
    """A mount: one line of ``mountinfo``, see proc(5).

    Attributes:
        id: number of the mount, unique as long as the mount exists in any namespace.
        parent: id of the mount that holds the mount point.
        device: device number of the file system, as ``major:minor``.
        root: directory of the file system that is shown.
        path: mount point, as processes of the namespace see it.
        options: options of the mount.
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
    """Return all mounts that a process sees; a mount comes after those that it covers."""
    found = []
    # Not by ``splitlines`` and ``split``: paths may contain all blanks but those that are escaped.
    for line in Path(f"/proc/{process}/mountinfo").read_bytes().removesuffix(b"\n").split(b"\n"):
        fields, _, rest = line.partition(b" - ")
        number, parent, device, root, path, options, *_ = fields.split(b" ")
        found.append(
            Mounted(
                int(number),
                int(parent),
                device.decode(),
                _unescaped(root),
                _unescaped(path),
                frozenset(options.decode().split(",")),
                rest.split(b" ")[0].decode(),
            )
        )
    return found


def _unescaped(path: bytes) -> str:
    """Decode the octal escapes of ``mountinfo``, which stand for blanks in a path."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), path))


def find(path: str) -> Mounted | None:
    """Return the topmost mount at exactly ``path``, or None, without access to its file system."""
    try:
        found = syscalls.look(path)
    except OSError:
        return None
    return _by_id(found.mount) if found.top else None


def _by_id(number: int) -> Mounted | None:
    return next((each for each in table() if each.id == number), None)


def mounted(path: str) -> str | None:
    """Return the type of the topmost file system mounted at exactly ``path``, or None."""
    found = find(path)
    return None if found is None else found.kind


def resolve(path: str) -> str:
    """Resolve symlinks in a path, as the kernel does in its list of mounts.

    Args:
        path: absolute; its last component need not exist, and its file system is not accessed.

    Raises:
        InputError: its last component is a symlink.
    """
    parent, name = os.path.split(os.path.normpath(path))
    found = str(Path(os.path.realpath(parent), name))
    try:
        link = stat.S_ISLNK(syscalls.look(found).mode)
    except OSError:  # it does not exist yet
        link = False
    if link:
        raise InputError(
            f"the mount point {path} is a symbolic link",
            hint=f"give the directory itself: {os.path.realpath(found)}",
        )
    return found


def same(path: str) -> str:
    """Resolve a path for comparison with others; a path that ends in a symlink is kept."""
    try:
        return resolve(path)
    except InputError:
        return path


def remember(directory: Path, *mounts: tuple[int, str, str]) -> None:
    """Record which mount a serving process serves, for ``standing``.

    Args:
        directory: private directory of the mount.
        mounts: id, device and root of the mount, and of the mount that is about to replace it.
            The id alone is not enough: the kernel reuses the ids of unmounted mounts.
    """
    disk.write(directory / MOUNTS, json.dumps(mounts))


def standing(directory: Path) -> Mounted | None:
    """Find the mount of a serving process, also if it was moved or is covered; None if it is gone.

    Args:
        directory: private directory of the mount.

    Raises:
        OSError: that cannot be found out now, as where no more files may be opened.
    """
    before = None
    while (note := _note(directory)) != before:  # if the note changed, a new mount took the place
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


def to_take_down(directory: Path) -> Mounted | None:
    """Return what ``standing`` returns, for a command that unmounts.

    Raises:
        MountError: that cannot be found out now.
    """
    with _finding():
        return standing(directory)


@contextlib.contextmanager
def _finding() -> Iterator[None]:
    """Raise ``MountError`` in the context where the list of mounts cannot be read."""
    try:
        yield
    except OSError as error:
        raise MountError(f"cannot find the mount: {error.strerror}", hint="try again") from None


def _note(directory: Path) -> str:
    try:
        return (directory / MOUNTS).read_text()
    except FileNotFoundError:  # any other error says nothing of the mount
        return "[]"


def await_change() -> None:
    """Wait until a file system is mounted or unmounted, for ten seconds at most."""
    try:
        mounts = Path("/proc/self/mountinfo").open("rb")  # noqa: SIM115 - closed below
    except OSError:  # no more files may be opened
        time.sleep(1)
        return
    with mounts:
        changes = select.poll()
        changes.register(mounts, select.POLLERR | select.POLLPRI)  # proc(5)
        changes.poll(10_000)


def _dead(path: str) -> bool:
    try:
        os.statvfs(path)  # the kernel asks the server each time, and caches no answer
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def unmount(path: str, *, force: bool) -> None:
    """Unmount the topmost mount at a path; do nothing if there is none.

    Args:
        path: the mount point.
        force: detach a mount that is in use; processes keep the files that they have open.

    Raises:
        MountError: the mount is in use (the message contains ``busy``), or this user may not
            unmount it.
    """
    try:
        syscalls.unmount(path, detach=force)
    except OSError as error:
        code = error.errno or errno.EIO
    else:
        return
    if code in (errno.EINVAL, errno.ENOENT):  # nothing is mounted there
        return
    reason = os.strerror(code)
    if code == errno.EPERM and os.geteuid() != 0:
        helper = ["fusermount3", "-u", *(["-z"] if force else []), "--", path]
        done = subprocess.run(helper, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        code = errno.EBUSY if "busy" in done.stderr else code
        reason = done.stderr.strip() or reason
    if code == errno.EBUSY:
        raise MountError(f"{path} is busy", hint="end what uses it, or detach it with --force")
    raise MountError(f"cannot unmount {path}: {reason}", hint="try --force")


def take_down(mount: Mounted, *, force: bool) -> None:
    """Unmount one mount, but no other mount at its path; do nothing if it is gone.

    Raises:
        MountError: another mount covers it, it is in use, this user may not unmount it, or the list
            of mounts cannot be read.
    """
    with _finding():
        above, present = find(mount.path), _by_id(mount.id)
    if present is None:
        return
    if above is None or above.id != mount.id:
        raise MountError(
            f"another mount is above that at {mount.path}",
            hint=f"unmount that one first: umount {mount.path}",
        )
    unmount(mount.path, force=force)


def holders(path: str) -> list[str]:
    """Return the processes that use files below a path, as ``name (pid)``.

    Processes of other users are left out where this user may not inspect them.
    """
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            links = [process / "cwd", process / "root", process / "exe"]
            links += (process / "fd").iterdir()
            mapped = (process / "maps").read_bytes()
            if any(_below(link, path) for link in links) or os.fsencode(path) + b"/" in mapped:
                found.append(name_of(process.name))
    return found


def name_of(process: int | str) -> str:
    """Return name and id of a process, for messages."""
    with contextlib.suppress(OSError):
        # The kernel cuts names at 15 bytes, also inside a character.
        return f"{Path(f'/proc/{process}/comm').read_text(errors='replace').strip()} ({process})"
    return f"({process})"


def _below(link: Path, path: str) -> bool:
    try:
        target = str(link.readlink())
    except OSError:
        return False
    return target == path or target.startswith(path + "/")
