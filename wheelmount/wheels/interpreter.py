"""Describe an interpreter in the terms of a target: its version and platform.

Also a program, run by path or as ``python -m wheelmount.wheels.interpreter [VENV]``: it prints what
the Python of a virtual environment is, or the one that runs it where there is none yet; with
``--base`` instead of a path, in further lines, the full version of the one that runs it and where
that is installed. It imports the standard library only, so that any Python can run it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT = 20.0
"""Seconds that an interpreter may take to describe itself."""


def running_version() -> str:
    """Return the running Python's version: ``3.11``, ``3.14t`` (free-threaded), ``pypy3.11``."""
    pypy = "pypy" if sys.implementation.name == "pypy" else ""
    free = "t" if "t" in getattr(sys, "abiflags", "") else ""
    return f"{pypy}{sys.version_info[0]}.{sys.version_info[1]}{free}"


def full_version() -> str:
    """Return the running Python's version with the patch level: ``3.11.9``."""
    return ".".join(map(str, sys.version_info[:3]))


def running_platform() -> str:
    """Return the platform, such as ``manylinux_2_36_x86_64``; empty without glibc."""
    try:
        libc, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except ValueError:
        return ""
    return f"manylinux_{version.replace('.', '_')}_{os.uname().machine}" if libc == "glibc" else ""


def base_executable() -> str:
    """Return the path of the running interpreter, or of the base of its virtual environment."""
    return str(getattr(sys, "_base_executable", "") or sys.executable)


def describe(venv: str = "") -> str:
    """Return version and platform of a virtual environment's interpreter, separated by a blank.

    Args:
        venv: its path; where there is none, and without, it is about the running interpreter.

    Raises:
        OSError: it can't be run.
        subprocess.SubprocessError: it fails, or does not answer within ``TIMEOUT``.
    """
    python = Path(venv, "bin", "python")
    if not venv or not python.exists():
        return f"{running_version()} {running_platform()}"
    command = [str(python), "-I", str(Path(__file__).absolute())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:] == ["--base"]:
        print(describe(), full_version(), base_executable(), sep="\n")
    else:
        print(describe(*sys.argv[1:]))
