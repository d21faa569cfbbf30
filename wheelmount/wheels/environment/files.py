"""Copy or link files in a few processes, and write scripts for an interpreter."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import shlex
import signal

WORKERS = min(8, 2 * len(os.sched_getaffinity(0)))
"""Processes that copy and link: twice the cores, as they wait for the kernel too."""

_SMALL = 1 << 16
_LONGEST_SHEBANG = 127

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Work: TypeAlias = tuple[str, str, list[str], str]


def in_parallel(work: list[Work]) -> None:
    """Copy or link files in a few processes, as the kernel does most of the work.

    Args:
        work: for each group of files the source directory, the target directory, their names, and
            ``copy`` or ``symlink``.

    Raises:
        OSError: a file cannot be copied or linked.
    """
    # Dealt out in turn, directories with many files first, so that shares are about equal.
    work = sorted(work, key=lambda item: len(item[2]), reverse=True)
    children = {}
    try:
        for number in range(min(WORKERS, len(work))):
            reading, writing = os.pipe()
            pid = os.fork()
            if not pid:
                _worker(work[number::WORKERS], writing)
            os.close(writing)
            children[pid] = reading
        for pid in list(children):
            with open(children[pid], "rb") as stream:
                said = json.loads(stream.read() or b'[5, "a process of the installation died", ""]')
            os.waitpid(pid, 0)
            del children[pid]
            if said[0]:
                raise OSError(*said)
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _worker(work: list[Work], writing: int) -> None:
    """Run one process: do its share of the work, report the result, and exit."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    said: list[object] = [0, "", ""]
    try:
        for source, target, names, way in work:
            if way == "symlink":
                _link(source, target, names)
            else:
                _copy(source, target, names)
    except OSError as error:
        said = [error.errno or errno.EIO, error.strerror, error.filename or ""]
    except BaseException as error:  # never into the code that this process was forked from
        said = [errno.EIO, repr(error), ""]
    finally:
        os.write(writing, json.dumps(said).encode())
        os._exit(0)


def _link(source: str, target: str, names: list[str]) -> None:
    before = os.path.join(source, "")
    folder = os.open(target, os.O_RDONLY)
    for name in names:
        os.symlink(before + name, name, dir_fd=folder)
    os.close(folder)


def _copy(source: str, target: str, names: list[str]) -> None:
    for name in names:
        reading = os.open(os.path.join(source, name), os.O_RDONLY)
        status = os.fstat(reading)
        mode = 0o777 if status.st_mode & 0o100 else 0o666
        writing = os.open(os.path.join(target, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        left = status.st_size
        while left:
            if left <= _SMALL:
                done = os.write(writing, os.read(reading, left))
            else:
                done = os.sendfile(writing, reading, None, left)
            if not done:
                raise OSError(errno.EIO, "it ended too soon", os.path.join(source, name))
            left -= done
        # Bytecode is valid for a source with this mtime only.
        os.utime(writing, ns=(status.st_mtime_ns, status.st_mtime_ns))
        os.close(writing)
        os.close(reading)


def for_interpreter(script: bytes, interpreter: str) -> bytes:
    """Return a script with its first line ``#!python`` replaced by this interpreter."""
    if not script.startswith(b"#!python"):
        return script
    _, _, rest = script.partition(b"\n")
    path = os.fsencode(interpreter)
    line = b"#!" + path
    if len(line) >= _LONGEST_SHEBANG or any(c in b" \t" for c in path):
        # A shell and Python can both run this; the kernel accepts neither blanks nor long paths.
        line = b"#!/bin/sh\n'''exec' " + os.fsencode(shlex.quote(interpreter)) + b' "$0" "$@"\n'
        line += b"' '''"
    return line + b"\n" + rest


def row_of(data: bytes) -> list[str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return [f"sha256={digest}", str(len(data))]
