"""Scratch directories; the next run clears those of killed runs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from wheelmount.lock import NO_LOCKS, try_lock
from wheelmount.owned import delete_tree

_PREFIX = ".wheelmount-temporary-"
"""Of the names; another one than in old versions, which lock the directories themselves."""

_LOCK = ".lock"
"""File in each, which its maker locks: NFS has locks between machines of files only."""


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Make a private directory for the context; also delete those that killed runs left.

    Args:
        parent: directory to make it in, on the file system that files are moved to later;
            default the directory of temporary files.
    """
    folder = parent or Path(tempfile.gettempdir())
    for left in abandoned(folder):
        delete_tree(left)
    place, held = _make(folder)
    try:
        yield place
    finally:
        delete_tree(place)
        _release(place, held)


def is_scratch(place: Path) -> bool:
    """Return whether a directory has the name of a scratch directory."""
    return place.name.startswith(_PREFIX)


def abandoned(folder: Path) -> Iterator[Path]:
    """Yield scratch directories whose makers have ended; each is locked until the next one."""
    for place in folder.glob(f"{_PREFIX}*"):
        held = None
        with contextlib.suppress(OSError):  # of another user, or deleted meanwhile
            state = place.lstat()
            if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid():
                held = try_lock(place / _LOCK)
        if held is not None:
            try:
                yield place
            finally:
                _release(place, held)


def _make(folder: Path) -> tuple[Path, int | None]:
    while True:
        place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        try:
            held = try_lock(place / _LOCK)
        except OSError as error:
            if error.errno in NO_LOCKS:  # and no other process can take it for abandoned
                return place, None
            shutil.rmtree(place, ignore_errors=True)
            raise
        if held is not None:
            return place, held
        # Another process saw it before it was locked, and deletes it.


def _release(place: Path, held: int | None) -> None:
    if held is not None:
        os.close(held)
    with contextlib.suppress(OSError):  # NFS keeps a file that is open, and thus its directory
        place.rmdir()


def clear_fresh(folder: Path, names: re.Pattern[str]) -> None:
    """Remove files of a killed ``disk.write``; the caller must hold a lock.

    Args:
        folder: a directory, in which the user may have files too.
        names: names of the files that are written there.
    """
    for file in folder.glob(".*.*[0-9]"):
        if file.suffix[1:].isdecimal() and names.fullmatch(file.stem[1:]) and file.is_file():
            with contextlib.suppress(OSError):
                file.unlink()
