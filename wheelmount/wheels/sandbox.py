"""A sandbox for builds of strangers' code: no network, no home, one writable directory.

This module is also the program that sets the sandbox up, run by path in new namespaces:
``python sandbox.py PLAN``. So it imports only the standard library. A build started by root runs as
the user ``nobody``; a build started by another user runs in a new user namespace without any
capability.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

NOBODY = _NOBODY = 65534
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 4096, 16384, 1 << 18, 2, 4
_MNT_DETACH = 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _RDONLY = 442, -100, 0x8000, 1
_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _CLEAR_ALL = 38, 24, 47, 4

HIDDEN = ("/home", "/root", "/run", "/var/run", "/tmp", "/var/tmp", "/dev/shm", "/mnt", "/media")
"""Directories hidden from builds, besides the home: files and sockets of users and services.

Others are not, as compilers and their libraries may be anywhere.
"""

_DEVICES = ("null", "zero", "full", "random", "urandom")

_PASSED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "SOURCE_DATE_EPOCH", "MAKEFLAGS")
_COMPILERS = ("CC", "CXX", "AR", "LD", "FC", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")


def available() -> bool:
    """Return whether this machine lets this user make such namespaces."""
    return _try(tuple(_unshare()))


def _try(unshare: tuple[str, ...]) -> bool:
    if shutil.which("unshare") is None:
        return False
    plan = json.dumps(
        {"place": "/", "keep": [], "hide": [], "nobody": os.getuid() == 0, "command": ["true"]}
    )
    command = [*unshare, sys.executable, "-I", __file__, plan]
    try:
        environ = environment(Path("/"))
        done = subprocess.run(command, env=environ, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def command(argv: Sequence[str], place: Path, keep: Iterable[str]) -> list[str]:
    """Return the command that runs another command in a sandbox.

    Args:
        argv: the command to run there.
        place: the only directory that it may write to; contains its home.
        keep: files and directories that it needs, also in hidden directories.
    """
    own = os.path.realpath(os.path.expanduser("~"))
    around = os.path.dirname(os.path.realpath(place))  # which only this user may enter
    plan = {
        "place": str(place),
        "keep": sorted({os.path.realpath(path) for path in keep} | {*keep}),
        "hide": [each for each in (*HIDDEN, own, around) if each != "/"],
        "nobody": os.getuid() == 0,
        "command": list(argv),
    }
    return [*_unshare(), sys.executable, "-I", os.path.abspath(__file__), json.dumps(plan)]


def environment(place: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables for programs in the sandbox, without any that may be secret."""
    passed = {name: environ[name] for name in (*_PASSED, *_COMPILERS) if name in environ}
    return {**passed, "HOME": str(place), "TMPDIR": str(place), "USER": "nobody"}


def _unshare() -> list[str]:
    argv = ["unshare", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child"]
    return argv if os.getuid() == 0 else [*argv, "--user", "--map-root-user"]


# --- in there -------------------------------------------------------------------------------------


def main(text: str) -> None:
    """Make the sandbox around this process, and execute the command."""
    plan = json.loads(text)
    # uv keeps the output of a build: if memory runs out, the kernel ends this process first.
    with (
        contextlib.suppress(OSError),  # a container may forbid it
        open("/proc/self/oom_score_adj", "w", encoding="ascii") as score,
    ):
        score.write("1000")
    os.umask(0o022)  # other users must be able to enter the directories that are made
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    if plan["hide"]:
        _detach(plan["place"], plan["keep"], plan["hide"])
        _hide(plan["place"], plan["keep"], plan["hide"])
    _give_up(plan["place"], nobody=plan["nobody"])
    os.execvp(plan["command"][0], plan["command"])


def _detach(place: str, keep: list[str], hide: list[str]) -> None:
    """Detach mounts below hidden directories: they could not be unmounted elsewhere otherwise."""
    with open("/proc/self/mountinfo", "rb") as table:
        mounted = [line.split()[4] for line in table]
    libc = ctypes.CDLL(None)
    for point in reversed(mounted):
        path = os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda one: bytes([int(one[1], 8)]), point))
        needed = any(_is_below(one, [path]) or _is_below(path, [one]) for one in (place, *keep))
        if _is_below(path, hide) and not needed:
            libc.umount2(os.fsencode(path), _MNT_DETACH)  # fails in another's user namespace


def _hide(place: str, keep: list[str], hide: list[str]) -> None:
    kept = [place, *(path for path in keep if _is_below(path, hide))]
    stash = f"{place}.stash"  # its directory is private too
    os.makedirs(stash, exist_ok=True)
    _mount("tmpfs", stash, "tmpfs", 0)
    for number, path in enumerate(kept):
        _make(os.path.join(stash, str(number)), path)
        _mount(path, os.path.join(stash, str(number)), None, _MS_BIND | _MS_REC)
    _devices(stash)
    # Directories below hidden ones need not be hidden again.
    tops = [p for p in dict.fromkeys(map(os.path.realpath, hide)) if os.path.isdir(p)]
    stashed = os.open(stash, os.O_PATH)
    for top in (p for p in tops if not any(_is_below(p, [o]) for o in tops if o != p)):
        _mount("tmpfs", top, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
    for number, path in sorted(enumerate(kept), key=lambda one: one[1].count("/")):
        source = f"/proc/self/fd/{stashed}/{number}"
        if not os.path.exists(path):
            _make(path, source)
        _mount(source, path, None, _MS_BIND | _MS_REC)
    os.close(stashed)
    try:
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    except OSError:  # in a container that hides parts of its own
        _mount("tmpfs", "/proc", "tmpfs", 0)
    _set_read_only("/", recursive=True)
    _set_read_only(place, recursive=False, clear=True)


def _devices(stash: str) -> None:
    """Mount a /dev without devices of the machine."""
    folder = os.path.join(stash, "dev")
    os.mkdir(folder)
    for name in _DEVICES:
        _make(os.path.join(folder, name), f"/dev/{name}")
        _mount(f"/dev/{name}", os.path.join(folder, name), None, _MS_BIND)
    for name, target in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        os.symlink(f"/proc/self/{target}", os.path.join(folder, name))
    _mount(folder, "/dev", None, _MS_BIND | _MS_REC)


def _give_up(place: str, *, nobody: bool) -> None:
    """Give up all privileges for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    if nobody:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _drop_capabilities(libc)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.chdir(place)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == top or path.startswith(f"{top}/") for top in folders)


def _make(path: str, like: str) -> None:
    if os.path.isdir(like):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="ascii"):
            pass


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [one and os.fsencode(one) for one in (source, target, kind)]
    if libc.mount(*arguments, ctypes.c_ulong(flags), os.fsencode(options)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def _set_read_only(path: str, *, recursive: bool, clear: bool = False) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = (ctypes.c_uint64 * 4)(0 if clear else _RDONLY, _RDONLY if clear else 0, 0, 0)
    if libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(path),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        attributes,
        ctypes.c_size_t(32),
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


if __name__ == "__main__":
    main(sys.argv[1])
