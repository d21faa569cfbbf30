"""Remains of containers on a host whose owner was killed before it could clean up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from wheelmount import shared
from wheelmount.containers.instance import INSTANCES, Instance
from wheelmount.containers.overlay import remove_tree
from wheelmount.lock import flock

PREFIX = "container-"
"""Prefix of the private directories of containers that end with their command."""


@contextlib.contextmanager
def claimed(workdir: Path) -> Iterator[None]:
    """Mark a container's directory as in use by this machine while this process lives.

    Raises:
        OSError: there is no room for the mark.
    """
    shared.mark(workdir)
    descriptor = os.open(workdir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def find(runtime: Path) -> list[Path]:
    """Return directories of containers and instances that are not in use.

    Those of other machines, which may share ``runtime``, are left out.
    """
    killed = [each.path for each in Instance.all(runtime) if each.record() is None]
    unused = [path for path in sorted(runtime.glob(f"{PREFIX}*")) if not in_use(path)]
    return [path for path in unused + killed if not shared.elsewhere(path)]


def remove(path: Path) -> None:
    """Delete a directory that ``find`` returned.

    Raises:
        ContainerError: some of it belongs to another user.
    """
    if path.parent.parent.name == INSTANCES:
        Instance(path.parents[2], path.parent.name, path.name).discard()
    else:
        remove_tree(path)


def in_use(workdir: Path) -> bool:
    """Return whether a container's directory is in use."""
    try:
        descriptor = os.open(workdir, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # its container has ended meanwhile
        return True
    try:
        return not flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    remove(Path(sys.argv[1]))
