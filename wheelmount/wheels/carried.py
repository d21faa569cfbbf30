"""Put an interpreter into an environment, so that hosts need none: uv's managed Pythons."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import uv

from wheelmount import owned, variables
from wheelmount.errors import InputError, UnavailableError
from wheelmount.wheels.bytecode import Compiler
from wheelmount.wheels.linktree import link
from wheelmount.wheels.target import Target

TIMEOUT = 600.0
"""Seconds that uv may take to download a Python."""

_QUESTION = """
import sys
free = "t" if "t" in getattr(sys, "abiflags", "") else ""
print("%s %d.%d%s" % (sys.implementation.name, *sys.version_info[:2], free), sys.version.split()[0])
print(sys.base_prefix)
"""

_LEFT_OUT = shutil.ignore_patterns("site-packages", "test", "*.a")


@dataclass(frozen=True, slots=True)
class Carried:
    """A relocatable Python: it works at any path.

    Attributes:
        version: ``3.12``; ``3.14t`` of a free-threaded build.
        full: version with the patch level.
        prefix: the directory that holds all of it.
    """

    version: str
    full: str
    prefix: Path

    def target(self, hosts: Target) -> Target:
        """Return the target of this Python on the platform of hosts."""
        return Target(self.version, hosts.platform)

    def compiler(self) -> Compiler | None:
        """Return the compiler of its bytecode, if this machine can run it."""
        if self.version.endswith("t"):
            return None
        tag = f"cpython-{self.version.replace('.', '')}"
        return Compiler(str(self.prefix / "bin" / f"python{self.version}"), tag)

    def place(self, folder: Path) -> None:
        """Place its files in a directory, by hardlinks where possible, otherwise as copies.

        Raises:
            OSError: a file cannot be placed; the first one's error.
        """
        errors: list[OSError] = []

        def place(source: str, target: str) -> None:
            try:
                link(source, target)
            except OSError as error:
                errors.append(error)
                raise

        try:
            shutil.copytree(
                self.prefix,
                folder,
                symlinks=True,
                dirs_exist_ok=True,
                ignore=_LEFT_OUT,
                copy_function=place,
            )
        except shutil.Error as error:  # the errors of all files, thousands on a full disk
            raise (errors or [error])[0] from None


def find(wanted: str) -> Carried:
    """Find a relocatable Python by version or path; uv downloads a missing version.

    Raises:
        InputError: the Python is part of the system, or is not CPython.
        UnavailableError: there is no such Python, and it cannot be downloaded.
    """
    path = str(Path(wanted).absolute()) if "/" in wanted else _managed(wanted)
    try:
        said = _run([path, "-I", "-c", _QUESTION])
        name, full, prefix = *said.splitlines()[0].rsplit(" ", 1), said.splitlines()[1]
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        raise UnavailableError(
            f"{path} does not say what it is: {error}", hint="give a version, such as 3.12"
        ) from None
    implementation, _, version = name.partition(" ")
    if implementation != "cpython" or prefix in ("/usr", "/usr/local", "/"):
        raise InputError(
            f"{path} cannot be brought along: it is {implementation} in {prefix}",
            hint="give a version, such as 3.12, for one of uv's Pythons",
        )
    return Carried(version, full, Path(prefix).resolve())


def _managed(version: str) -> str:
    program = uv.find_uv_bin()
    find = [program, "python", "find", "--managed-python", "--no-project", "--no-config"]
    find += ["--no-python-downloads", version]
    try:
        return _run(find).strip()
    except subprocess.CalledProcessError:
        pass
    try:
        _run([program, "python", "install", "--quiet", "--no-bin", version])
        return _run(find).strip()
    except subprocess.CalledProcessError as error:
        reason = " ".join(str(error.stderr).replace("error:", "").split())
        raise UnavailableError(
            f"uv has no Python {version}, and cannot download it: {reason}",
            hint="where it can: uv python install; UV_PYTHON_INSTALL_MIRROR names a mirror",
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"uv does not bring a Python: {error}", hint="try again") from None


def _run(command: list[str]) -> str:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
        umask=owned.umask(),
        env={**variables.for_programs(), "NO_COLOR": "1"},
    ).stdout
