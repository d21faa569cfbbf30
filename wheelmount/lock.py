"""Locks between processes, on files in directories that other processes may remove meanwhile.

The package filelock serves for other locks. It would make a removed directory again, readable for
all users.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Try to lock a file, which is made if its directory exists.

    Args:
        path: path of the file.

    Returns:
        The descriptor of the file, locked until it is closed (flock(2)); None if another process
        holds the lock, or the directory is gone or being removed.

    Raises:
        OSError: the file cannot be made, or its file system has no locks.
    """
    lock = None
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        if lock is not None:
            os.close(lock)
        raise
    if lock is not None:
        os.close(lock)
    return None
