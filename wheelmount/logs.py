"""Logs of processes that stay, none of which may fill a disk.

A program of its own too, which imports next to nothing: ``python logs.py PID DIRECTORY`` bounds all
files of a directory until a process has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import sys
import threading

SIZE = 16 << 20
"""Bytes of a log that are kept."""

GLANCE = 1.0
"""Seconds between looks at how large a log is."""


def cut(log: int, most: int = SIZE) -> None:
    """Empty a log that is too large, so that nothing that is said over and over fills a disk.

    Args:
        log: its descriptor, opened to append, as by all others that write to it; anything but a
            file is left alone.
        most: bytes that it may have.
    """
    found = os.fstat(log)
    if stat.S_ISREG(found.st_mode) and found.st_size > most:
        os.ftruncate(log, 0)
        os.write(log, b"(what was said before is left out: it was too much)\n")


def bound(log: int) -> threading.Event:
    """Cut a log whenever it has become too large, as long as this process runs.

    Args:
        log: its descriptor, which may be closed; what is written by it is appended from here on.

    Returns:
        To be set where that is to end before.
    """
    own, ended = os.dup(log), threading.Event()
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_APPEND)

    def watch() -> None:
        while not ended.wait(GLANCE):
            with contextlib.suppress(OSError):
                cut(own)
        os.close(own)

    threading.Thread(target=watch, name="log", daemon=True).start()
    return ended


def main(pid: int, directory: str) -> None:
    """Bound all logs in a directory until a process has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    while not select.select([process], [], [], GLANCE)[0]:
        for place, _, names in os.walk(directory):
            for name in names:
                with contextlib.suppress(OSError):
                    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
                    log = os.open(f"{place}/{name}", flags)
                    try:
                        cut(log)
                    finally:
                        os.close(log)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
