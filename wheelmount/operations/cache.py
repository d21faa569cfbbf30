"""The cache of this user: wheelhouses that commands made, unpacked wheels, environments and images.

All parts that are deleted can be made again: an image that an overlay of this machine goes with
stays, as the same reference pulled again is another image for it. The least recently used parts are
deleted first. Contents of unpacked wheels are deleted with the last wheel that has them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.errors import WaitError
from wheelmount.hosts.session import Session
from wheelmount.lock import flock
from wheelmount.operations.records import all_mounts
from wheelmount.wheels.scratch import abandoned, scratch

LONGEST = 600.0
"""Seconds to wait for a command that deletes parts of the cache."""

_INTERVAL = 0.1
"""Seconds between two looks whether it has ended."""

_IN_USE = ".in-use"

_HOUSES = "wheelhouses"
"""Directory of the wheelhouses in the cache."""

_TREES = Path("unpacked", "trees")
"""Directory of the trees of unpacked wheels in the cache."""

_MOUNTED = ("wheelhouse", "tree", "environment", "image")
"""Kinds of parts that sessions may have mounted."""

_HELD = ("environment", "image")
"""Kinds of parts that commands hold while they use them."""

_OF_SESSION = "session-"
"""Prefix of the names of parts that belong to a session."""


@dataclass(frozen=True, slots=True)
class Item:
    """A part of the cache that is kept or deleted as a whole.

    Attributes:
        kind: ``wheelhouse``, ``tree``, ``environment``, ``image`` (of a registry), ``unpacked``,
            a wheel unpacked, or ``reads``, what programs read first of a directory.
        path: a directory; for ``unpacked`` the file that describes the wheel, for ``reads`` the
            record.
        size: bytes on the disk that no other part has.
        used: time of its last use, in seconds since 1970.
    """

    kind: str
    path: Path
    size: int
    used: float


def items(settings: Settings, kind: str = "") -> list[Item]:
    """Return all parts, or all of a kind, the least recently used first."""
    cache = Path(settings.cache_dir)
    if kind == "environment":
        return sorted(_environments(cache), key=lambda item: item.used)
    found = [
        Item("wheelhouse", path, _size(path), _time(_mark(path), path / ".wheelmount.lock", path))
        for path in _folders(cache / _HOUSES)
    ]
    unpacked = cache / "unpacked"
    found += [
        Item("tree", path, _size(path, shared=False), _time(_mark(path), path))
        for path in _folders(cache / _TREES)
    ]
    found += _environments(cache)
    found += [Item("image", path, _size(path), _time(path)) for path in _folders(cache / "images")]
    found += [
        Item("unpacked", path, _contents(unpacked, path), path.stat().st_mtime)
        for path in (unpacked / "wheels").glob("*.json")
    ]
    found += [
        Item("reads", path, path.stat().st_size, path.stat().st_mtime)
        for path in (cache / "reads").glob("[!.]*")
    ]
    return sorted(found, key=lambda item: item.used)


def _environments(cache: Path) -> list[Item]:
    return [
        Item("environment", path, _size(path, shared=False), _time(path))
        for path in _folders(cache / "environments")
    ]


def size(settings: Settings) -> int:
    """Return bytes of the cache on the disk; a file with several names counts once."""
    return _size(Path(settings.cache_dir))


def prune(settings: Settings, bound: int) -> list[Item]:
    """Delete the least recently used parts, until the cache has at most a number of bytes.

    Parts that a running session uses stay, and those that one may use whose record cannot be read,
    and images with an overlay.

    Returns:
        The removed parts.

    Raises:
        WaitError: another command uses the cache.
    """
    from wheelmount.containers import registry, sif  # most commands need no containers
    from wheelmount.containers.overlay import Overlay

    with alone(settings):
        _clear(settings)
        standing = _standing(settings)
        gone: list[Item] = []
        cache = Path(settings.cache_dir)
        space = _Space(cache)
        if space.used <= bound:
            return gone
        shares = _Shares(cache / "unpacked", space)
        unsure = bool(Session.unreadable(settings))
        shown = {Path(os.path.realpath(note.source)) for _, note in all_mounts(settings)}
        with_overlays = {each.image_id for each in Overlay.all(Path(settings.state_dir))}
        for item in items(settings):
            if space.used <= bound:
                break
            if item.kind in _MOUNTED:
                name = item.path.name
                # Wheelhouses that sessions fill have their names.
                doubtful = unsure and (item.kind != "wheelhouse" or name.startswith(_OF_SESSION))
                if doubtful or name in standing or _overlaps(item.path.resolve(), shown):
                    continue
            if item.kind == "image" and sif.identity(item.path / registry.FILE) in with_overlays:
                continue
            if item.kind in _HELD and not removable(item.path):
                continue
            contents = _names(item.path) if item.kind == "unpacked" else ()
            space.free(item.path)
            discard(item.path)
            gone.append(item)
            shares.drop(contents)
        return gone


class _Space:
    """Bytes of a directory on the disk, from which those of files are taken that are deleted.

    A file with several names counts until its last one is deleted.

    Args:
        place: the directory.

    Attributes:
        used: bytes of the files that are left.
    """

    def __init__(self, place: Path) -> None:
        self.used = 0
        self._names: Counter[tuple[int, int]] = Counter()
        _walk(place, self._add)

    def _add(self, status: os.stat_result) -> None:
        file = status.st_dev, status.st_ino
        if file not in self._names:
            self.used += status.st_blocks * 512
        self._names[file] += 1

    def free(self, path: Path) -> None:
        """Count a file, or all files of a directory, as deleted; they must be there still."""
        if path.is_dir():
            _walk(path, self._remove)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._remove(path.stat())

    def _remove(self, status: os.stat_result) -> None:
        file = status.st_dev, status.st_ino
        self._names[file] -= 1
        if not self._names[file]:
            self.used -= status.st_blocks * 512


class _Shares:
    """Contents of unpacked wheels, each of which is deleted with the last wheel that has it.

    Trees have hard links to theirs. Contents that no wheel has, as of commands that were killed,
    are deleted at once.

    Args:
        unpacked: the directory of unpacked wheels.
        space: told of what is deleted.
    """

    def __init__(self, unpacked: Path, space: _Space) -> None:
        self._objects, self._space = unpacked / "objects", space
        self._wheels = Counter(
            name for recipe in (unpacked / "wheels").glob("*.json") for name in _names(recipe)
        )
        for folder in _folders(self._objects):
            for file in folder.iterdir():
                if file.name not in self._wheels:
                    self._delete(file)

    def drop(self, names: Iterable[str]) -> None:
        """Delete those of some contents that no other wheel has, after their wheel is deleted."""
        for name in names:
            self._wheels[name] -= 1
            if not self._wheels[name]:
                self._delete(self._objects / name[:2] / name)

    def _delete(self, file: Path) -> None:
        self._space.free(file)
        file.unlink(missing_ok=True)


def _overlaps(path: Path, shown: Iterable[Path]) -> bool:
    """Return whether a directory is one of those shown, or is above or below one."""
    return any(one == path or one in path.parents or path in one.parents for one in shown)


def clean(settings: Settings) -> list[Item]:
    """Delete the cache, except for parts that a session or an overlay uses; see ``prune``."""
    return prune(settings, -1)


@contextlib.contextmanager
def used(settings: Settings) -> Iterator[None]:
    """Keep other commands from deleting parts of the cache during the context.

    Raises:
        WaitError: a command has been deleting parts of it for ``LONGEST``.
    """
    with _held(settings) as descriptor:
        deadline = time.monotonic() + LONGEST
        while not flock(descriptor, fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                raise WaitError(
                    f"another command has been deleting parts of {settings.cache_dir} for "
                    f"{LONGEST:.0f} s",
                    hint="end it: a disk or a network that it waits for may hang; or set "
                    "WHEELMOUNT_CACHE_DIR to another directory",
                )
            time.sleep(_INTERVAL)
        yield


@contextlib.contextmanager
def alone(settings: Settings) -> Iterator[None]:
    """Keep other commands from using the cache during the context.

    Raises:
        WaitError: another command uses it.
    """
    with _held(settings) as descriptor:
        if not flock(descriptor, fcntl.LOCK_EX):
            raise WaitError("another command uses the cache", hint="try again when it has ended")
        yield


@contextlib.contextmanager
def _held(settings: Settings) -> Iterator[int]:
    descriptor = os.open(
        settings.own_cache() / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _standing(settings: Settings) -> set[str]:
    return {
        f"{_OF_SESSION}{one.name}-{record.created:.0f}" for one, record in Session.records(settings)
    }


def _clear(settings: Settings) -> None:
    """What runs that were killed have left."""
    cache = Path(settings.cache_dir)
    unpacked = cache / "unpacked"
    for folder in (cache / "environments", cache / "images", unpacked, cache / _TREES):
        for place in abandoned(folder):
            shutil.rmtree(place, ignore_errors=True)


def _names(recipe: Path) -> set[str]:
    """Return the names of the files with the contents of an unpacked wheel; none if damaged."""
    from wheelmount.wheels.unpacked import Recipe  # which takes long to load

    with contextlib.suppress(OSError, ValueError):
        found = Recipe.read(recipe)
        contents = (*found.files.values(), found.bytecode)
        return {content.name for files in contents for content in files.values()}
    return set()


def _contents(unpacked: Path, recipe: Path) -> int:
    with contextlib.suppress(OSError):
        files = (unpacked / "objects" / name[:2] / name for name in _names(recipe))
        return sum(file.stat().st_size for file in files)
    return 0


def mounted(settings: Settings) -> set[Path]:
    """Return the directories that running sessions have mounted.

    Raises:
        HostError: the record of a session cannot be read.
    """
    for _, error in Session.unreadable(settings):
        raise error
    return {Path(note.source) for _, note in all_mounts(settings)}


def wheelhouse(settings: Settings, name: str) -> Path:
    """Return the path of a wheelhouse in the cache."""
    return Path(settings.cache_dir) / _HOUSES / name


def touch(folder: Path, settings: Settings) -> None:
    """Note that a directory is used now, for ``prune``, if it is a wheelhouse or tree of the cache.

    Where nothing can be written, the time of the last use stays as it was.
    """
    with contextlib.suppress(OSError):
        path = folder.resolve()
        place = Path(settings.cache_dir).resolve()
        if path.parent in (place / _HOUSES, place / _TREES):
            _mark(path).touch(0o600)


def _mark(path: Path) -> Path:
    """Return the file whose mtime is the last use of a wheelhouse or a tree.

    It lies outside of them, as a change in them would be sent to hosts that have them mounted.
    """
    if path.parent.name == _TREES.name:
        return path.parent.with_name("used") / path.name
    return _lock_path(path)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep an environment or an image from being removed during the context."""
    descriptor = _lock(folder)
    try:
        with contextlib.suppress(OSError):  # of a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def removable(folder: Path) -> bool:
    """Return whether no command uses an environment or an image."""
    descriptor = _lock(folder)
    try:
        return flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    """Open the lock of an environment or an image: a file, as NFS locks no directories for all."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(_lock_path(folder), flags, 0o600)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.used")


def discard(path: Path) -> None:
    """Remove a part of the cache so that none is ever there in part."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        with scratch(path.parent) as place:
            path.rename(place / path.name)
    except OSError:  # a disk so full that nothing can be made on it
        shutil.rmtree(path)
    for file in (_lock_path(path), _mark(path)):
        file.unlink(missing_ok=True)


def _folders(place: Path) -> Iterable[Path]:
    if not place.is_dir():
        return []
    return [path for path in place.iterdir() if path.is_dir() and path.name[0] != "."]


def _size(place: Path, *, shared: bool = True) -> int:
    seen: dict[tuple[int, int], int] = {}

    def count(status: os.stat_result) -> None:
        if shared or status.st_nlink == 1:
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512

    _walk(place, count)
    return sum(seen.values())


def _walk(place: Path, count: Callable[[os.stat_result], None]) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(place) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if not entry.is_dir(follow_symlinks=False):
                    count(entry.stat(follow_symlinks=False))
                else:
                    _walk(Path(entry.path), count)


def _time(*files: Path) -> float:
    return next((file.stat().st_mtime for file in files if file.exists()), 0.0)
