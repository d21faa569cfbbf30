"""Locks between processes of one user.

The package filelock serves where a lock is waited for. It would make a directory again that another
process has removed meanwhile, readable for all users; ``try_lock`` does not.

Some network file systems have no locks, such as Lustre where it is mounted without them. filelock
then takes the existence of a file for the lock; everything else says here how it does without.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from wheelmount import disk
from wheelmount.errors import WaitError

NO_LOCKS = errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL
"""Error numbers of flock(2) in file systems without locks: some network file systems."""


def flock(descriptor: int, how: int) -> bool:
    """Lock an open file or directory, without waiting.

    Args:
        descriptor: of the file; its lock ends when it is closed.
        how: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.

    Returns:
        False if a lock of another process forbids it; True also in a file system without locks,
        where no process can hold one.

    Raises:
        OSError: the file cannot be locked for another reason.
    """
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def has_locks(directory: Path) -> bool:
    """Return whether files in a directory can be locked; a file is made for that, and deleted.

    The directory itself tells nothing: network file systems lock directories for one machine only.

    Raises:
        OSError: no file can be made in the directory.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return False
    return True


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


@contextlib.contextmanager
def locked(
    file: Path,
    timeout: float,
    error: WaitError | None = None,
    *,
    mode: int = 0o600,
    waiting: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Hold a lock during the context.

    Args:
        file: the lock; made if it is missing.
        timeout: seconds to wait for a process that holds it; -1 for no bound.
        error: raised when they have passed; default one that names the file.
        mode: of the file; by default other users cannot open it.
        waiting: called once if another process holds it.

    Raises:
        ConfigError: the file system has no locks, and the directory is that of a setting.
        SourceError: it has none, and the directory is another one.
        WaitError: another process held it for ``timeout``.
        OSError: the file cannot be made.
    """
    import filelock  # most commands wait for no lock

    warnings.filterwarnings("ignore", "flock not supported")  # the module says what it does then
    lock = filelock.FileLock(file, mode=mode)
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            waiting()
            lock.acquire(timeout=timeout)
    except filelock.Timeout:
        raise error or WaitError(
            f"another process has held {file} for {timeout:g} s",
            hint="end it: a network or disk that it waits for may hang",
        ) from None
    except OSError as failure:
        if failure.errno not in NO_LOCKS:
            raise
        raise disk.without_locks(file.parent) from None
    try:
        yield
    finally:
        lock.release()
