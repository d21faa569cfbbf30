"""Scratch directories; the next run clears those of killed runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".wheelmount-scratch-"


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Make a private directory for the context; also delete those that killed runs left.

    Args:
        parent: directory to make it in, on the file system that files are moved to later;
            default the directory of temporary files.
    """
    folder = parent or Path(tempfile.gettempdir())
    for left in abandoned(folder):
        shutil.rmtree(left, ignore_errors=True)
    place, held = _make(folder)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(held)


def abandoned(folder: Path) -> list[Path]:
    """Return scratch directories whose makers have ended, so that their locks are free."""
    found = []
    for place in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, in use, or deleted meanwhile
            held = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(held).st_uid == os.getuid():
                    found.append(place)
            finally:
                os.close(held)
    return found


def _make(folder: Path) -> tuple[Path, int]:
    while True:
        place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        try:
            held = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process deleted it before it was locked
            continue
        with contextlib.suppress(OSError):  # NFS has no locks of directories
            fcntl.flock(held, fcntl.LOCK_SH)
        if place.is_dir():
            return place, held
        os.close(held)


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
