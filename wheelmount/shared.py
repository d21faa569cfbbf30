"""Directories that machines may share, as on a network file system, with what runs on one of them.

A process of another machine cannot be looked for, so what it has must be left alone.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

MACHINE = "machine"
"""Name of the file with the names of the machines that use a directory, one a line; and key, in the
record of hosts, of the machine on which alone they can be reached."""


def mark(directory: Path) -> None:
    """Note in a directory that this machine uses it.

    Raises:
        OSError: there is no room, or no directory.
    """
    with (directory / MACHINE).open("a") as file:
        file.write(f"{socket.gethostname()}\n")


def elsewhere(directory: Path) -> bool:
    """Return whether another machine has ever used a directory, and so may use it now."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = (directory / MACHINE).read_text().splitlines()
        return any(name != socket.gethostname() for name in names)
    return False
