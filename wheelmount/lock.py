"""Locks between processes, on files of directories that other processes may remove meanwhile.

Elsewhere locks are those of filelock, which would make such a directory anew, for all to read.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Lock a file, which is made if its directory is there.

    Args:
        path: of the file.

    Returns:
        The open file, locked until it is closed (flock(2)); None if another process has it locked,
        or the directory is gone or just being removed.
    """
    lock = None
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    if lock is not None:
        os.close(lock)
    return None
