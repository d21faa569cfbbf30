"""Locks between commands that start in a mount and the server that replaces the mount.

When all bytes have arrived, a bind mount replaces a FUSE mount, unless a process works there: the
kernel could no longer tell that process its working directory. The server searches all processes
for it, but one that is just being started is in the mount only a moment after the search.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from wheelmount import shared
from wheelmount.config import Settings
from wheelmount.errors import WheelmountError
from wheelmount.lock import flock

FILE = "entry"
"""Name of the lock in the private directory of a mount."""

PATIENCE = 2.0
"""Seconds to wait for processes that hold such a lock; they need milliseconds."""

_PAUSE = 0.005


def make(directory: Path) -> None:
    """Make the lock of a mount.

    Args:
        directory: private directory of the mount.

    Raises:
        OSError: there is no room for it.
    """
    (directory / FILE).touch(mode=0o600)


@contextlib.contextmanager
def starting(settings: Settings) -> Iterator[None]:
    """Keep this user's FUSE mounts in place during the context, in which a command starts.

    Args:
        settings: those of the mounts.
    """
    mounts: list[Path] = []
    with contextlib.suppress(WheelmountError, OSError):  # this machine has none of them
        # Locks of other machines' mounts in a shared directory would be locks over the network.
        mounts = [each for each in settings.listed("mounts") if not shared.elsewhere(each)]
    with _held((each / FILE for each in mounts), fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[bool]:
    """Let no command start in a mount during the context, in which another mount replaces it.

    Args:
        directory: private directory of the mount.

    Yields:
        Whether the mount may be replaced: commands that were starting have started.
    """
    with _held([directory / FILE], fcntl.LOCK_EX) as held:
        yield held


@contextlib.contextmanager
def _held(files: Iterable[Path], kind: int) -> Iterator[bool]:
    """Hold locks during the context; yield whether all are held. Missing files are passed over."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as opened:
        held = True
        for file in files:
            try:
                descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:  # the mount ends, or an earlier version made it
                continue
            opened.callback(os.close, descriptor)
            held &= _take(descriptor, kind, deadline)
        yield held


def _take(descriptor: int, kind: int, deadline: float) -> bool:
    with contextlib.suppress(OSError):  # commands start, and mounts change, also where locks fail
        while not flock(descriptor, kind):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
    return True
