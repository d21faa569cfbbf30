"""Processes that Monarch starts on a host, private from their first moment.

A worker calls ``prepare`` before it listens. Monarch then starts processes through this module
(``python -m wheelmount.hosts.process``), which protects their sockets from other users before they
open; otherwise sockets would be open to others until the first actor starts. Until then, all files
of the process are private as well. An actor calls ``settle``, after which new files have normal
permissions.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import resource
import runpy
import shlex
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from wheelmount import variables
from wheelmount.hosts import socketguard
from wheelmount.lock import NO_LOCKS

log = logging.getLogger("wheelmount")

NAME = "wheelmount.hosts.process"
"""Name of this module, also if it is run as a program."""

SERVER = "wheelmount.mount.serve.server"
"""Module in the command line of a process that serves a mount, which may outlive its host."""

PROGRAM = "FB_XAR_INVOKED_NAME"
"""Variable with the program by which Monarch starts processes, instead of the worker's Python."""

MODULE = "PAR_MAIN_OVERRIDE"
"""Variable that Monarch sets for this program: the module to run."""

BEFORE = "WHEELMOUNT_BEFORE"
"""Variable with the values that ``prepare`` has changed: JSON of ``umask`` and ``TMPDIR``."""

TEMPORARY = "TMPDIR"
"""Variable with the directory of temporary files."""

ENOUGH = 65536
"""Number of file descriptors that a host's process needs."""

OF_WORKER = "worker-"
"""Prefix of the directories of workers that wheelmount has not started."""

MACHINE_DIGITS = 6
"""Digits, in names of directories, that stand for the machine: paths of sockets are limited."""


def main() -> None:
    """Run a process of Monarch."""
    os.environ.pop(PROGRAM, None)
    module = os.environ.pop(MODULE, "monarch._src.actor.bootstrap_main")
    socketguard.close()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def prepare(directory: Path) -> None:
    """Make files of this process and its children private, and set their temporary directory.

    Args:
        directory: a directory that is deleted with the host; made with mode 0700 if it is missing.
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
    """Raise the limit of descriptors: callers without a certificate use some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def settle() -> None:
    """Restore normal permissions for new files; Monarch's sockets stay closed to others."""
    socketguard.close()
    before = os.environ.get(BEFORE)
    if before is not None:
        os.umask(json.loads(before)["umask"])


def environment() -> dict[str, str]:
    """Return the environment of programs on the host that are not Monarch's processes.

    Temporary files go to the user's directory, or to one that is deleted with the host.
    """
    environ = variables.for_programs()
    wanted = json.loads(environ.pop(BEFORE, "{}")).get(TEMPORARY)
    if wanted is not None:
        environ[TEMPORARY] = wanted
    return environ


def make_directory(place: Path, prefix: str) -> Path:
    """Make a private directory of this process for temporary files.

    It is locked as long as this process runs. Unlocked directories of this machine, of killed
    processes, are removed at the same time.

    Args:
        place: directory to make it in, to which others may write.
        prefix: prefix of its name.

    Raises:
        OSError: it cannot be made, or locked; but a file system without locks is used all the same.
    """
    # Machines may share the place, and not see each other's locks of directories.
    machine = hashlib.sha256(os.fsencode(socket.gethostname())).hexdigest()[:MACHINE_DIGITS]
    prefix = f"{prefix}{machine}-"
    for old in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # gone
            mine = old.lstat().st_uid == os.geteuid()
            if mine and (lock := _lock(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        try:
            locked = _lock(path) is not None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                shutil.rmtree(path, ignore_errors=True)
                raise
            locked = True  # as far as other processes, which cannot lock it either, are concerned
        # Another process may have removed it before it was locked.
        if locked and path.exists():
            atexit.register(_remove, path, os.getpid())
            return path


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _lock(path: Path) -> int | None:
    """Lock a directory while the descriptor is open; None if it is locked or deleted.

    Raises:
        OSError: it cannot be locked.
    """
    directory = None
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if directory is not None:
            os.close(directory)
        if isinstance(error, BlockingIOError | FileNotFoundError):
            return None
        raise
    return directory


if __name__ == "__main__":
    main()
