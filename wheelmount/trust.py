"""Check which users can have written a settings file that was found, and record trusted files.

A file counts if only this user and root can have written it: they own it and every directory above
it, and no other user may write there. Any other file, and settings that a project may not make for
itself, count only after ``wheelmount config trust``, and only with the content of that moment.
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

from wheelmount import linux

LIMIT = 1 << 20
"""Most bytes that are read of a file; no settings file is as large."""

ROOT_OF_PROJECT = ".git", "pyproject.toml"
"""Names that mark the root directory of a project."""

ALL_USERS = "other users"
"""Words for all users besides this one and root."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Found:
    """A settings file, read only once, so that the checked content is the content that counts.

    Attributes:
        path: absolute path without symlinks.
        content: content of the file.
        doubt: the reason why other users may have written it; empty if they cannot have.
    """

    path: Path
    content: bytes
    doubt: str


def read(path: Path) -> Found | None:
    """Read a file, and check which users can have written it; None if there is no regular file.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # no such file, or a symlink to itself
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
        # In a sticky directory others may add files, but not remove or rename existing ones.
        passage = directory != path.parent and state.st_mode & stat.S_ISVTX
        if not passage and _open_to_others(directory, state):
            return f"others may write to {directory}"
    return ""


def _ours() -> tuple[int, int]:
    return 0, os.getuid()


def _hidden() -> int | None:
    """Return the user id that root's files show in a user namespace that does not map root."""
    if linux.maps_root():
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
    """Return whether a group has no members but this user and root, such as a user's own group."""
    try:
        if "system.posix_acl_access" in os.listxattr(path):
            return False  # with an ACL, the group's bits are a mask for other users' rights
    except OSError:  # a file system without ACLs
        pass
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    named = group.gr_name == user.pw_name and gid == user.pw_gid
    return (gid == 0 or named) and {*group.gr_mem} <= {user.pw_name, "root"}


def is_own(path: Path) -> bool:
    """Return whether a directory (symlinks followed) is this user's, and only theirs to write to.

    Raises:
        OSError: the directory does not exist.
    """
    state = path.stat()
    own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
    return own and not _open_to_others(path, state)


def shared_above(path: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield directories in which others may put something else in the place of what is there.

    Args:
        path: an absolute path; the directories above it are looked at, also those of symlinks on
            the way and of what they lead to. Those that are missing count for nothing.

    Yields:
        Such a directory, the others in words, and whether any user can be one of them.
    """
    pending, seen = [path], set[Path]()
    while pending:
        for directory in pending.pop().parents:
            if directory in seen:
                continue
            seen.add(directory)
            try:
                state = directory.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISLNK(state.st_mode):
                target = Path(os.path.normpath(directory.parent / directory.readlink()))
                pending.append(target / path.name)  # so that the target is above it, too
            elif others := _others(directory, state):
                yield directory, *others


def _others(directory: Path, state: os.stat_result) -> tuple[str, bool] | None:
    """Return which other users may rename what is in a directory, and whether any user can.

    The owner may also in a sticky directory. Where all users may make directories, any user can
    have made one.
    """
    shared = not state.st_mode & stat.S_ISVTX and _open_to_others(directory, state)
    if shared and state.st_mode & stat.S_IWOTH:
        return ALL_USERS, True
    if state.st_uid not in (*_ours(), _hidden()):
        return _name(state.st_uid), bool(directory.parent.stat().st_mode & stat.S_IWOTH)
    return ("users of its group", False) if shared else None


def is_private(path: Path) -> bool:
    """Return whether a directory is this user's own, and no other user may enter it."""
    try:
        return private(path.lstat())
    except OSError:
        return False


def private(state: os.stat_result) -> bool:
    """Return whether the result of ``lstat`` is of a private directory, as ``is_private`` does."""
    return (
        stat.S_ISDIR(state.st_mode)
        and state.st_uid == os.getuid()
        and not state.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    )


def places(directory: Path) -> Iterator[Path]:
    """Yield the directories to search for a directory's settings: itself and those above it.

    The last one is the root of its project, the user's home, or the last directory of the same
    user and file system.
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
    """The files that the user trusts, by path and content.

    For each, a private directory has an empty file whose name is the hash of both.

    Args:
        directory: the private directory; may be missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __contains__(self, found: Found) -> bool:
        return is_private(self.directory) and (self.directory / _key(found)).is_file()

    def add(self, found: Found) -> None:
        """Trust a file with its current content. The private directory must exist."""
        self.remove(found.path)
        (self.directory / _key(found)).touch(mode=0o600)

    def remove(self, path: Path) -> None:
        """Withdraw the trust in a file, for any content."""
        for mark in self.directory.glob(f"{_hash(bytes(path))}-*"):
            mark.unlink(missing_ok=True)


def _key(found: Found) -> str:
    return f"{_hash(bytes(found.path))}-{_hash(found.content)}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
