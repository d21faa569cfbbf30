"""Processes that Monarch starts on a host, private from their first moment.

A worker calls ``prepare`` before it listens. Monarch then starts processes by way of this module
(``python -m wheelmount.hosts.process``), which closes its sockets to other users before it opens
any; by itself it would have them open until the first actor is there. Until then all of its files
are private as well. An actor calls ``settle``: what it makes is for others to see again.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import resource
import runpy
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from wheelmount import variables
from wheelmount.hosts import socketguard

log = logging.getLogger("wheelmount")

NAME = "wheelmount.hosts.process"
"""Of this module, also where it is the one that is run."""

PROGRAM = "FB_XAR_INVOKED_NAME"
"""Variable by which Monarch is told what to start processes by, instead of the worker's Python."""

MODULE = "PAR_MAIN_OVERRIDE"
"""Variable that it sets for such a program: the module that is to be run."""

BEFORE = "WHEELMOUNT_BEFORE"
"""Variable that says what ``prepare`` has changed: JSON of ``umask`` and ``TMPDIR``."""

TEMPORARY = "TMPDIR"
"""Variable that says where temporary files go."""

ENOUGH = 65536
"""Descriptors that a host's process wants."""

OF_WORKER = "worker-"
"""Prefix of the directories of workers that nothing of ours has started."""


def main() -> None:
    """Be a process of Monarch."""
    os.environ.pop(PROGRAM, None)
    module = os.environ.pop(MODULE, "monarch._src.actor.bootstrap_main")
    socketguard.close()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def prepare(directory: Path) -> None:
    """Have what this process makes and starts be private, and its temporary files in a directory.

    Args:
        directory: goes with the host; made with mode 0700 if it is not there.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    before = {"umask": os.umask(0o077), TEMPORARY: os.environ.get(TEMPORARY)}
    os.environ[BEFORE] = json.dumps(before)
    os.environ[TEMPORARY] = str(directory)
    _raise_limit()
    program = directory / "process"
    program.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {NAME}\n")
    program.chmod(0o700)
    if os.access(program, os.X_OK):
        os.environ[PROGRAM] = str(program)
    else:
        log.warning("security: programs cannot be run in %s; hosts are closed late", directory)


def _raise_limit() -> None:
    """Have as many descriptors as are allowed: callers that show no certificate take some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def settle() -> None:
    """Be private no more in what is made from here on; Monarch's sockets stay closed to others."""
    socketguard.close()
    before = os.environ.get(BEFORE)
    if before is not None:
        os.umask(json.loads(before)["umask"])


def environment() -> dict[str, str]:
    """Variables for what is started on the host, if that is no process of Monarch's.

    Temporary files go where the user has said, or else go with the host.
    """
    environ = variables.for_programs()
    wanted = json.loads(environ.pop(BEFORE, "{}")).get(TEMPORARY)
    if wanted is not None:
        environ[TEMPORARY] = wanted
    return environ


def make_directory(place: Path, prefix: str) -> Path:
    """A private directory of this process, for temporary files.

    It is locked as long as this process runs. Those that are not, of processes that were killed,
    are removed with the next one that is made.

    Args:
        place: where it is made; others may write there.
        prefix: of its name, for its kind.
    """
    for old in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # gone
            mine = old.lstat().st_uid == os.geteuid()
            if mine and (lock := _lock(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        # Another process may have taken it for one that was left, before it was locked.
        if _lock(path) is not None and path.exists():
            atexit.register(_remove, path, os.getpid())
            return path


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _lock(path: Path) -> int | None:
    """Lock a directory for as long as the descriptor is open; None if it is locked, or gone."""
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(directory)
        return None
    return directory


if __name__ == "__main__":
    main()
