"""Compile bytecode for a target, on a machine that has the target's Python."""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from wheelmount import child, variables
from wheelmount.errors import UnavailableError
from wheelmount.progress import Task
from wheelmount.wheels.target import Target

TIMEOUT = 1800.0
"""Seconds that compiling may take; 13,000 files take half a minute on two cores."""

_ANSWER = 20.0
"""Seconds in which an interpreter must answer."""

_OLDEST = 9
"""Minor version of the first Python that compiles as it is done here."""

_QUESTION = "import sys; print(sys.implementation.name, sys.implementation.cache_tag)"

# Invalidated by times, not by hashes: an edited file of an environment must take effect.
_PROGRAM = """
import functools, json, os, sys
from compileall import compile_file
from concurrent.futures import ProcessPoolExecutor
from py_compile import PycInvalidationMode
work = json.load(sys.stdin)
with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
    done = []
    for root, paths in work.items():
        one = functools.partial(
            compile_file, quiet=2, stripdir=root, invalidation_mode=PycInvalidationMode.TIMESTAMP
        )
        done.append(pool.map(one, [os.path.join(root, path) for path in paths], chunksize=16))
    for results in done:
        for _ in results:
            print(flush=True)
"""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A Python that compiles bytecode.

    Attributes:
        python: the interpreter.
        tag: tag in the names of its bytecode files, such as ``cpython-311`` (PEP 3147).
    """

    python: str
    tag: str

    @classmethod
    def find(cls, target: Target) -> Compiler | None:
        """Find an interpreter for a target on ``PATH``; return None if there is none."""
        release = target.minor_release
        major, minor = release.split(".")
        if target.implementation != "cpython" or target.free_threaded or int(minor) < _OLDEST:
            return None
        tag = f"cpython-{major}{minor}"
        for python in (sys.executable, shutil.which(f"python{release}")):
            if python and _says(python) == f"cpython {tag}":
                return cls(python, tag)
        return None

    def path(self, source: str) -> str:
        """Return the path of a source's bytecode, relative to the same directory."""
        folder, name = posixpath.split(source)
        return posixpath.join(folder, "__pycache__", f"{name.removesuffix('.py')}.{self.tag}.pyc")

    def compile(self, sources: Mapping[Path, Sequence[str]], task: Task) -> None:
        """Compile sources to bytecode beside them; sources that do not compile are skipped.

        Args:
            sources: for each directory, paths relative to it; tracebacks show these paths.
            task: informed of each file.

        Raises:
            UnavailableError: the interpreter gave up, or took longer than ``TIMEOUT``.
        """
        task.total(sum(map(len, sources.values())))
        process = subprocess.Popen(
            [self.python, "-I", "-W", "ignore", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=variables.for_programs(),
            start_new_session=True,  # a process group, so that all workers can be ended
        )
        timer = threading.Timer(TIMEOUT, _end_group, (process.pid,))
        timer.start()
        try:
            with process, cast(IO[str], process.stdin) as work:
                json.dump({str(root): list(paths) for root, paths in sources.items()}, work)
                work.close()
                for _ in process.stdout or ():
                    task.advance(1)
        except BrokenPipeError:
            pass  # the process ended; its exit code tells how
        finally:
            timer.cancel()
            _end_group(process.pid)  # its workers would wait for a killed worker
        if process.returncode:
            raise UnavailableError(
                f"{self.python} ended with {process.returncode} while it compiled",
                hint="free some memory, or omit bytecode: --no-compile",
            )


def _end_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _says(python: str) -> str:
    try:
        done = child.run([python, "-I", "-c", _QUESTION], timeout=_ANSWER)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.code == 0 else ""
