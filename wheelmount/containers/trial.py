"""Start a container of this machine's own programs, to test whether containers start here."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from wheelmount.containers.container import Bind, Container
from wheelmount.errors import ContainerError

TIMEOUT = 30.0
"""Seconds that the test may take."""

_EMPTY = "dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "var/tmp"
_PROGRAMS = "usr", "bin", "sbin", "lib", "lib64"


def start(directory: Path) -> None:
    """Start a test container, and wait for its end.

    Args:
        directory: a private directory for its files.

    Raises:
        ContainerError: the container does not start.
        UnavailableError: apptainer is missing, or lacks a permission.
        WaitError: the container does not end.
    """
    with tempfile.TemporaryDirectory(prefix="trial-", dir=directory) as name:
        root = Path(name, "root")
        for each in _EMPTY:
            (root / each).mkdir(parents=True)
        with Container(root, Path(name, "work"), binds=list(_programs(root))) as container:
            code = container.run(["/bin/sh", "-c", ":"], stderr=subprocess.DEVNULL, timeout=TIMEOUT)
    if code:
        raise ContainerError(f"a container started and its shell ended with {code}")


def _programs(root: Path) -> Iterator[Bind]:
    """Show the machine's programs in a root directory, as they lie outside."""
    for name in _PROGRAMS:
        outside = Path("/", name)
        if outside.is_symlink():
            (root / name).symlink_to(os.readlink(outside))  # noqa: PTH115 - as it is
        elif outside.is_dir():
            (root / name).mkdir()
            yield Bind(outside, f"/{name}")
