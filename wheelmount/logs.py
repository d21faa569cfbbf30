"""Bound the logs of long-running processes, so that they do not fill a disk.

Also a program, which imports next to nothing: ``python logs.py PID DIRECTORY LOCK`` bounds all
files of a directory until a process has ended, for which it holds a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import sys
import threading
import time

SIZE = 16 << 20
"""Size of a log, in bytes, above which it is emptied."""

POLL_INTERVAL = 1.0
"""Seconds between checks of a log's size."""


def cut(log: int, most: int = SIZE) -> None:
    """Empty a log that is too large, so that repeated messages do not fill a disk.

    Args:
        log: descriptor of the log. All its writers must have opened it to append. A descriptor of
            anything but a regular file is left alone.
        most: largest size, in bytes.
    """
    found = os.fstat(log)
    if stat.S_ISREG(found.st_mode) and found.st_size > most:
        os.ftruncate(log, 0)
        os.write(log, b"(what was said before is left out: it was too much)\n")


def bound(log: int) -> threading.Event:
    """Empty a log whenever it becomes too large, on a thread, as long as this process runs.

    Args:
        log: descriptor of the log, which may be closed later. Writes to it append from now on.

    Returns:
        An event; set it to end the thread earlier.
    """
    own, ended = os.dup(log), threading.Event()
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_APPEND)

    def watch() -> None:
        while not ended.wait(POLL_INTERVAL):
            with contextlib.suppress(OSError):
                cut(own)
        os.close(own)

    threading.Thread(target=watch, name="log", daemon=True).start()
    return ended


USE_INTERVAL = 3600.0
"""Seconds after which the time of a lock is set again: a machine may end without notice."""


def main(pid: int, directory: str, lock: int) -> None:
    """Bound all logs in a directory until a process has ended.

    Args:
        pid: the process.
        directory: the directory.
        lock: descriptor of a file, whose times are to be those at which the process still ran.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    noted = time.monotonic()
    while not select.select([process], [], [], POLL_INTERVAL)[0]:
        if time.monotonic() > noted + USE_INTERVAL:
            _note_use(lock)
            noted = time.monotonic()
        for place, _, names in os.walk(directory):
            for name in names:
                with contextlib.suppress(OSError):
                    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
                    log = os.open(f"{place}/{name}", flags)
                    try:
                        cut(log)
                    finally:
                        os.close(log)
    _note_use(lock)


def _note_use(lock: int) -> None:
    """Set the times of a lock; where its file system fails, holding the lock matters more."""
    with contextlib.suppress(OSError):
        os.utime(lock)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
