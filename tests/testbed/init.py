"""First process of a lab, and of each of its hosts: it holds their namespaces open.

Run in new namespaces as ``python init.py PLAN``, with nothing but the standard library. It arranges
what processes there see, says ``ready``, and ends when its standard input does: when whoever made
the lab closes it, or is gone, however that came. As the first process of a namespace of processes
it takes all others with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

PRIVATE = "tmp", "run", "var/tmp", "dev/shm"
"""Directories that are empty on a new host, whatever the machine has in them."""

APART = "/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp"
"""What a host has of its own, so that what the machine has mounted there does not matter."""

_NOSUID, _NODEV, _BIND, _REC = 2, 4, 4096, 16384
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the first process is to arrange.

    Attributes:
        name: host name.
        hosts: text of ``/etc/hosts``; None to leave files as they are.
        shared: absolute paths that are the machine's own on all hosts, as on a network file system,
            as are file systems mounted below the root. All else is a copy that a host may write to
            and that ends with it.
    """

    name: str
    hosts: str | None = None
    shared: tuple[str, ...] = field(default=())

    def encode(self) -> str:
        """As an argument of the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Plan:
        """Read what ``encode`` made."""
        plan = json.loads(text)
        return cls(plan["name"], plan["hosts"], tuple(plan["shared"]))


def main() -> None:
    plan = Plan.decode(sys.argv[1])
    # Orphans of the namespace become children of this process; so nobody has to wait for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    socket.sethostname(plan.name)
    if plan.hosts is None:
        release_servers()
        mount("proc", "/proc", "proc")
    else:
        enter_root(make_root(plan.hosts, plan.shared))
    os.write(1, b"ready\n")
    while os.read(0, 4096):
        pass


def make_root(hosts: str, shared: tuple[str, ...]) -> Path:
    """Make a host's file systems: the machine's with all writes kept in memory.

    Raises:
        OSError: naming what could not be mounted.
    """
    place = Path("/run")  # there on every Linux, and seen by nobody but this process from here on
    mount("tmpfs", place, "tmpfs", options="mode=0755")
    root, upper, work = (place / name for name in ("root", "upper", "work"))
    for directory in (root, upper, work):
        directory.mkdir()
    disks = find_disks()
    mount("overlay", root, "overlay", options=f"lowerdir=/,upperdir={upper},workdir={work}")
    for path in disks:
        mount(path, root / path.lstrip("/"), flags=_BIND)
    mount("/dev", root / "dev", flags=_BIND | _REC)
    mount("proc", root / "proc", "proc")
    mount("sysfs", root / "sys", "sysfs")
    for name in PRIVATE:
        mount("tmpfs", root / name, "tmpfs", _NOSUID | _NODEV, "mode=1777")
    for path in shared:
        target = root / path.lstrip("/")
        if os.path.isdir(path):
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        mount(path, target, flags=_BIND | _REC)
    (root / "etc/hosts").write_text(hosts)
    return root


def find_disks() -> list[str]:
    """Where the machine's other file systems are mounted: an overlay shows what is below them."""
    found = []
    for path, _ in _mounts():
        apart = path == "/" or any(Path(path).is_relative_to(place) for place in APART)
        if not apart and os.path.isdir(path):  # files (/etc/hosts of many containers) get written
            found.append(path)
    return found


def release_servers() -> None:
    """Let go of what is served by processes: they would not see that it was unmounted outside."""
    for path, kind in reversed(_mounts()):
        if kind.startswith(("fuse", "autofs")):
            _check(_libc.umount2(os.fsencode(path), _MNT_DETACH), path)


def _mounts() -> list[tuple[str, str]]:
    """Paths and types of the file systems that are mounted, in order."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        # Blanks in a path are written as octal escapes: proc(5).
        path = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields.split()[4])
        found.append((path, rest.split()[0]))
    return found


def enter_root(root: Path) -> None:
    """Make a directory the root of this mount namespace, and forget the old one."""
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), root)  # the old root now lies on top of the new one
    _check(_libc.umount2(b".", _MNT_DETACH), root)
    os.chdir("/")


def mount(
    source: str, target: str | Path, kind: str = "", flags: int = 0, options: str = ""
) -> None:
    """Mount, as ``mount(2)`` does.

    Raises:
        OSError: the mount failed; the error names the target.
    """
    words = (source, str(target), kind)
    text = (os.fsencode(word) for word in words)
    _check(_libc.mount(*text, ctypes.c_ulong(flags), os.fsencode(options)), target)


def _check(result: int, path: str | Path) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


if __name__ == "__main__":
    main()
