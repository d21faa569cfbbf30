"""Files of settings that are found, not named: who can have written them, and which are trusted.

A file counts if only this user and root can have written it: they own it and every directory that
leads to it, and nobody else may write there. Any other file, and what a project may not set for
itself, counts only after ``wheelmount config trust``, and only with the content of that moment.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIMIT = 1 << 20
"""Bytes of a file that are read; no file of settings is as large."""

ROOT_OF_PROJECT = ".git", "pyproject.toml"
"""Names in a directory above which its project does not go."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Found:
    """A file as it was read: once, so that what was checked is what counts.

    Attributes:
        path: absolute, without symlinks.
        content: of the file.
        doubt: why others may have written it; empty if they cannot have.
    """

    path: Path
    content: bytes
    doubt: str


def read(path: Path) -> Found | None:
    """Read a file and see who can have written it; None if there is no regular file.

    Raises:
        OSError: it cannot be read.
    """
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # it is not there, or a symlink leads to itself
        return None
    if not stat.S_ISREG(real.lstat().st_mode):  # a pipe or a device is not even opened
        return None
    descriptor = os.open(real, _READ)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            return None
        content = file.read(LIMIT)
    return Found(real, content, _doubt(real, state))


def _doubt(path: Path, state: os.stat_result) -> str:
    if state.st_uid not in _ours():
        return f"it belongs to {_name(state.st_uid)}"
    if _open_to_others(path, state):
        return "others may write to it"
    hidden = _hidden()
    for directory in path.parents:
        state = directory.lstat()
        if state.st_uid not in (*_ours(), hidden):
            return f"{directory} belongs to {_name(state.st_uid)}"
        # In a sticky directory others may not take away what is there, but they may add to it.
        passage = directory != path.parent and state.st_mode & stat.S_ISVTX
        if not passage and _open_to_others(directory, state):
            return f"others may write to {directory}"
    return ""


def _ours() -> tuple[int, int]:
    return 0, os.getuid()


def _hidden() -> int | None:
    """What root's files seem to belong to in a user namespace that does not know root."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    if any(int(first) == 0 for first, _, _ in ranges):
        return None
    return int(Path("/proc/sys/kernel/overflowuid").read_text())


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _open_to_others(path: Path, state: os.stat_result) -> bool:
    if state.st_mode & stat.S_IWOTH:
        return True
    return bool(state.st_mode & stat.S_IWGRP) and not _private_group(path, state.st_gid)


def _private_group(path: Path, gid: int) -> bool:
    """Whether only this user and root are in a group, as of a system with a group for each user."""
    try:
        if "system.posix_acl_access" in os.listxattr(path):
            return False  # the group's bits are the rights of others then
    except OSError:  # a file system without any
        pass
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    named = group.gr_name == user.pw_name and gid == user.pw_gid
    return (gid == 0 or named) and {*group.gr_mem} <= {user.pw_name, "root"}


def is_own(path: Path) -> bool:
    """Whether a directory is this user's, or what a link leads to, and others may not write there.

    Raises:
        OSError: it is not there.
    """
    state = path.stat()
    own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
    return own and not _open_to_others(path, state)


def is_private(path: Path) -> bool:
    """Whether a directory is this user's own and for nobody else to enter."""
    try:
        return private(path.lstat())
    except OSError:
        return False


def private(state: os.stat_result) -> bool:
    """``is_private`` of what ``lstat`` gave."""
    return (
        stat.S_ISDIR(state.st_mode)
        and state.st_uid == os.getuid()
        and not state.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    )


def places(directory: Path) -> Iterator[Path]:
    """Directories where files for a directory may lie: itself and those above it.

    The last is the root of its project or the user's home, or that below which another user or
    another file system begins.
    """
    home = Path("~").expanduser().resolve()
    first = directory.stat()
    for place in (directory, *directory.parents):
        state = place.stat()
        if (state.st_uid, state.st_dev) != (first.st_uid, first.st_dev):
            return
        yield place
        if place == home or any((place / name).exists() for name in ROOT_OF_PROJECT):
            return


class Trusted:
    """Files that the user said are trusted, by path and content.

    Each is an empty file named by the hash of both, in a private directory.

    Args:
        directory: that directory; need not be there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __contains__(self, found: Found) -> bool:
        return is_private(self.directory) and (self.directory / _key(found)).is_file()

    def add(self, found: Found) -> None:
        """Trust a file as it is. The directory must be there."""
        self.remove(found.path)
        (self.directory / _key(found)).touch(mode=0o600)

    def remove(self, path: Path) -> None:
        """Trust a file no longer, whatever is in it."""
        for mark in self.directory.glob(f"{_hash(bytes(path))}-*"):
            mark.unlink(missing_ok=True)


def _key(found: Found) -> str:
    return f"{_hash(bytes(found.path))}-{_hash(found.content)}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
