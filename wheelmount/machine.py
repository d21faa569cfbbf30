"""Set up a Debian machine for mounts and containers: ``wheelmount setup``.

Only the standard library is imported: ``examples/setup.sh`` runs ``python -m wheelmount.machine``
before it makes an environment.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from wheelmount.containers import debian
from wheelmount.errors import UnavailableError, WheelmountError
from wheelmount.progress import SILENT, Progress, Silent, number_of

_FUSE = Path("/dev/fuse")
_FUSE_CONFIG = Path("/etc/fuse.conf")
_SUBORDINATE = Path("/etc/subuid")
_PROGRAMS_OF_ROOT = ":/usr/sbin:/sbin"
"""Directories that ordinary users often lack in PATH."""


@dataclass(frozen=True, slots=True)
class Lack:
    """A program or a setting that this machine lacks.

    Attributes:
        name: name of the program or file.
        effect: what does not work without it.
        package: Debian package that brings the program; empty for a setting.
    """

    name: str
    effect: str
    package: str = ""


def lacks() -> list[Lack]:
    """Return what this machine lacks for mounts of all users, for containers and for images."""
    found = []
    if not _which("fusermount3"):
        found.append(Lack("fusermount3", "ordinary users cannot mount", "fuse3"))
    if not _FUSE.is_char_device():
        found.append(Lack(str(_FUSE), "nothing can be mounted (try: modprobe fuse)"))
    elif _FUSE.stat().st_mode & 0o666 != 0o666:
        found.append(Lack(f"access to {_FUSE}", "ordinary users cannot mount"))
    if not re.search(r"^user_allow_other\b", _text(_FUSE_CONFIG), re.MULTILINE):
        found.append(
            Lack(f"user_allow_other in {_FUSE_CONFIG}", "mounts cannot be opened to other users")
        )
    if not _apptainer():
        found.append(Lack("apptainer", "there are no containers", "apptainer"))
    # apptainer writes root as 0.
    if not re.search(r"^(root|0):", _text(_SUBORDINATE), re.MULTILINE):
        found.append(Lack(f"root in {_SUBORDINATE}", "root cannot build images by --fakeroot"))
    if not _which("debootstrap"):
        found.append(Lack("debootstrap", "images of Debian cannot be built", "debootstrap"))
    return found


def set_up(apptainer: Path | None = None, progress: Progress = SILENT) -> list[Lack]:
    """Install what this machine lacks, and change its settings; nothing that is there is changed.

    Args:
        apptainer: a Debian package of apptainer to install; None to find one.
        progress: told each step.

    Returns:
        What it still lacks, such as ``/dev/fuse``.

    Raises:
        UnavailableError: this user is not root, this machine is not a Debian, or apt failed.
    """
    missing = lacks()
    if not missing:
        return []
    if os.getuid() != 0:
        raise UnavailableError(
            f"only root can install {', '.join(lack.name for lack in missing)}",
            hint=f"as root: {shutil.which('wheelmount') or 'wheelmount'} setup",
        )
    packages = [lack.package for lack in missing if lack.package]
    if packages:
        if not _which("apt-get"):
            raise UnavailableError(
                f"this machine is not a Debian, and lacks {', '.join(packages)}",
                hint="install them by the package manager of this machine",
            )
        with progress.task("packages", unit="package") as task:
            progress.log(f"installing {', '.join(packages)}")
            debian.update(progress)
            if plain := [name for name in packages if name != "apptainer"]:
                debian.install(plain, progress)
            # Settings first: mounts work, whether there is an apptainer or not.
            _set(progress)
            if "apptainer" in packages:
                debian.install_apptainer(apptainer, progress)
            task.note(number_of(len(packages), "package"))
    _set(progress)
    return lacks()


def _set(progress: Progress) -> None:
    # Some machines make /dev/fuse at each start with a mode for root alone.
    if _FUSE.is_char_device() and _FUSE.stat().st_mode & 0o666 != 0o666:
        _FUSE.chmod(0o666)
        progress.log(f"opened {_FUSE} to all users, until the machine starts again")
    names = [lack.name for lack in lacks()]
    if f"user_allow_other in {_FUSE_CONFIG}" in names:
        before = _text(_FUSE_CONFIG)
        end = "" if not before or before.endswith("\n") else "\n"
        with _FUSE_CONFIG.open("a", encoding="utf-8") as file:
            file.write(f"{end}user_allow_other\n")
    program = _apptainer()
    if program and f"root in {_SUBORDINATE}" in names:
        subprocess.run(
            [program, "config", "fakeroot", "--add", "root"], check=False, stdin=subprocess.DEVNULL
        )


def _apptainer() -> str | None:
    return _which("apptainer") or _which("singularity")


def _which(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + _PROGRAMS_OF_ROOT)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class _Lines(Silent):
    """Prints lines on standard error, where nothing that draws progress is installed yet."""

    def log(self, text: str) -> None:
        print(f"setup: {text}", file=sys.stderr)


def main() -> int:
    """Run ``python -m wheelmount.machine [--check]``; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m wheelmount.machine", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    given = parser.parse_args()
    package = os.environ.get("APPTAINER_DEB")
    progress = _Lines()
    try:
        left = lacks() if given.check else set_up(Path(package) if package else None, progress)
    except WheelmountError as error:
        progress.log(f"error: {error.message}")
        progress.log(f"hint: {error.hint}")
        return error.exit_code
    for lack in left:
        progress.log(f"missing: {lack.name}; {lack.effect}")
    return UnavailableError.exit_code if left else 0


if __name__ == "__main__":
    sys.exit(main())
