"""Directories whose files cannot be locked, for processes that tests start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def without_locks(place: Path, scratch: Path) -> dict[str, str]:
    """Return an environment for processes that cannot lock files below a directory.

    A file system that refuses locks cannot be had without a server for it, so flock(2) is replaced.

    Args:
        place: the directory.
        scratch: a directory for the replacement.
    """
    library = scratch / "lockless.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), "LOCKLESS": str(place)}
