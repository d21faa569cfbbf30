"""Directories and files that only their owner may write to, whatever the umask is.

A umask of 000 or 002 would let other users put code into the cache, or into an environment. It only
takes permissions away from what is made here. It belongs to the whole process, which may be a
user's own program, and is therefore never changed here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

FOLDER = 0o755
"""Mode of directories."""

FILE = 0o644
"""Mode of files."""

OTHERS = 0o022
"""Permissions to write that other users must not have."""


def make_folders(path: Path, *, exist_ok: bool = True) -> None:
    """Make a directory, and those above it that are missing.

    Raises:
        OSError: a directory cannot be made, or ``path`` is something else.
        FileExistsError: the directory exists, and ``exist_ok`` is False.
    """
    try:
        path.mkdir(FOLDER, exist_ok=exist_ok)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_folders(path.parent)
        path.mkdir(FOLDER, exist_ok=exist_ok)


def unlock_folders(tree: Path) -> None:
    """Let their owner enter all directories below one, and write to them, before it is deleted.

    Those of other users stay as they are.
    """
    for folder, names, _ in os.walk(tree):
        for name in names:
            inner = Path(folder, name)
            with contextlib.suppress(OSError):
                if not inner.is_symlink() and inner.stat().st_mode & 0o700 != 0o700:
                    inner.chmod(0o700)


def delete_tree(tree: Path) -> None:
    """Delete a directory, also with read-only directories in it; what cannot be deleted stays."""
    shutil.rmtree(tree, ignore_errors=True)
    if tree.exists():
        unlock_folders(tree)
        shutil.rmtree(tree, ignore_errors=True)


def opener(path: str, flags: int) -> int:
    """Open a file, as an ``opener`` of ``open``."""
    return os.open(path, flags, FILE)


def umask() -> int:
    """Return a umask for programs that make files: this process's, and no writing by others."""
    with Path("/proc/self/status").open(encoding="utf-8", errors="replace") as status:
        own = next((line for line in status if line.startswith("Umask:")), "Umask: 022")
    return int(own.split()[1], 8) | OTHERS
