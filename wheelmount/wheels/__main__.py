"""Installs into a virtual environment of this host, only from a mounted directory.

Run as ``python -m wheelmount.wheels [--python X.Y] uv|pip WHEELHOUSE VENV -r FILE|REQUIREMENT…``,
or for a tree of unpacked wheels ``… wheelmount TREE VENV PLAN copy|symlink``. The environment is
made where there is none, with the Python that is named, or the one that runs this program. Hosts
that share a home may run it at the same time: a lock admits one after the other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

import uv

from wheelmount import disk
from wheelmount.errors import UnavailableError, WaitError, WheelError, WheelmountError, tell
from wheelmount.lock import has_locks, locked
from wheelmount.owned import FILE, make_folders, umask
from wheelmount.wheels.install import clean_environment, install_command
from wheelmount.wheels.interpreter import describe, running_version
from wheelmount.wheels.shipment import Shipment

LOCK_TIMEOUT = 600.0
"""Seconds to wait for another installation into the same environment."""


def main(arguments: Sequence[str]) -> int:
    """Install; return the exit code."""
    version = ""
    if arguments[0] == "--python":
        version, arguments = arguments[1], arguments[2:]
    tool, packages, directory, *rest = arguments
    try:
        venv = Path(directory)
        with disk.explained(venv), _alone(venv), _cache(venv) as cache:
            return _install(tool, packages, venv, rest, version, cache)
    except WheelmountError as error:
        return tell(error)


def _install(
    tool: str, packages: str, venv: Path, rest: Sequence[str], version: str, cache: str
) -> int:
    python = venv / "bin" / "python"
    program = uv.find_uv_bin()
    environment = {
        **clean_environment(),
        "PATH": os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", "")]),
        "UV_CACHE_DIR": cache,
    }
    if tool == "wheelmount":
        plan, mode = rest
        command: Sequence[str] = Shipment(Path(packages), plan).command(str(python), packages, mode)
    else:
        named, file = (rest, None) if rest[0] != "-r" else ((), f"{packages}/{rest[1]}")
        command = install_command(
            cast(Literal["uv", "pip"], tool),
            named,
            packages=packages,
            python=str(python),
            file=file,
        )
    try:
        if not python.exists():
            base = _interpreter(version, program, environment)
            making = [program, "venv", "--quiet", "--no-cache", "--offline", "--allow-existing"]
            making += ["--python", base]
            if tool == "pip":
                making = [base, "-m", "venv"]  # with pip, which Python brings along
            made = subprocess.run([*making, str(venv)], env=environment, check=False)
            if made.returncode:
                return made.returncode
        elif version:
            _refuse_other(venv, version)
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        with contextlib.suppress(FileNotFoundError):
            (venv / ".lock").chmod(FILE)  # uv lets all users write to it, whatever the umask is


def _interpreter(version: str, program: str, environment: dict[str, str]) -> str:
    """Return the path of an interpreter of a version on this host."""
    if version in ("", running_version()):
        return sys.executable
    command = [program, "python", "find", "--offline", "--no-python-downloads", "--system", version]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UnavailableError(
            f"there is no Python {version} here to make an environment with",
            hint=f"install it, or one that is here: --python-version {running_version()}",
        )
    return done.stdout.strip()


def _refuse_other(venv: Path, version: str) -> None:
    try:
        found = describe(str(venv)).partition(" ")[0]
    except (OSError, subprocess.SubprocessError) as error:
        raise WheelError(
            f"the Python of {venv} does not say what it is: {error}", hint="remove the environment"
        ) from None
    if found != version:
        raise WheelError(
            f"{venv} has Python {found}, and the wheels are for {version}",
            hint="name another environment with --venv, or omit --python-version",
        )


@contextlib.contextmanager
def _cache(venv: Path) -> Iterator[str]:
    """Yield a directory for uv's cache during the context.

    It is inside the environment: uv's other cache may hold another wheel of the same name, and uv
    can make links only within one file system. But uv must be able to lock it.
    """
    if not has_locks(venv):
        with tempfile.TemporaryDirectory(prefix="wheelmount-cache-") as place:
            yield place
        return
    inside = venv / ".wheelmount-cache"
    try:
        yield str(inside)
    finally:
        shutil.rmtree(inside, ignore_errors=True)


@contextlib.contextmanager
def _alone(venv: Path) -> Iterator[None]:
    """Lock an environment against other installations, also those of other hosts."""
    held = WaitError(
        f"another installation has held {venv} for {LOCK_TIMEOUT:.0f} s",
        hint="end it, or use another environment",
    )
    with contextlib.ExitStack() as stack:
        try:
            make_folders(venv)
            stack.enter_context(locked(venv / ".wheelmount.lock", LOCK_TIMEOUT, held, mode=FILE))
        except OSError as error:
            raise UnavailableError(
                f"{error.filename or venv}: {error.strerror or error}",
                hint="name an environment that can be written: --venv PATH",
            ) from None
        yield


if __name__ == "__main__":
    os.umask(umask())  # for uv, pip and what they start
    sys.exit(main(sys.argv[1:]))
