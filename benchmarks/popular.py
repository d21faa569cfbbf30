"""The most downloaded packages of PyPI, all the way: ``python -m benchmarks.popular``, as root.

All of ``benchmarks/popular.txt``, resolved together, are downloaded for each Python, checked and
mounted on a host of this machine. In a network namespace that has nothing but a loopback they are
installed from the mount into a fresh environment, in each way that there is; then ``pip check`` and
``uv pip check`` have their say, and every top-level module of each of the packages is imported. A
Python that is not on ``PATH`` is downloaded and checked for, and said to be missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uv
from packaging.requirements import Requirement

from wheelmount.wheels.install import clean_environment, install_command
from wheelmount.wheels.shipment import prepare
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

PACKAGES = Path(__file__).with_name("popular.txt")
IMPORTER = Path(__file__).with_name("importable.py")
WAYS = ("uv", "copies", "links")
TIMEOUT = 600.0
"""Seconds that one command may take."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one environment.

    Attributes:
        seconds: that the installation took.
        packages: how many were installed.
        interfaces: of the network that it saw.
        conflicts: what the two checks say; empty where they are content.
        faults: by package, why it does not import.
    """

    seconds: float
    packages: int
    interfaces: tuple[str, ...]
    conflicts: str
    faults: dict[str, str]


def main() -> None:
    """Do it and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.popular")
    parser.add_argument("-r", "--packages", type=Path, default=PACKAGES)
    parser.add_argument("--python-version", nargs="+", default=["3.11", "3.12"])
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, "pip"), default=WAYS)
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="of environments")  # noqa: S108
    parser.add_argument("--cache", type=Path, help="keeps wheels and what is unpacked")
    parser.add_argument("--json", type=Path, help="file for all that was found")
    given = parser.parse_args()
    lines = [line.partition("#")[0].strip() for line in given.packages.read_text().splitlines()]
    names = [Requirement(line).name for line in lines if line]
    found: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="wm-") as temporary,
        tempfile.TemporaryDirectory(prefix="wm-", dir=given.place) as place,
    ):
        cache = given.cache or Path(temporary)
        house = Wheelhouse(cache / "wheels")
        versions = [f"--python-version={version}" for version in given.python_version]
        wheelmount = [sys.executable, "-m", "wheelmount.cli.main"]
        started = time.perf_counter()
        directory = str(house.directory)
        target = ["-d", directory, "--platform", Target.here().platform, *versions]
        _run([*wheelmount, "download", "-q", "-r", str(given.packages.resolve()), *target])
        there = time.perf_counter()
        complete = _run([*wheelmount, "check", "-q", directory]).strip()
        checked = time.perf_counter()
        print(f"{len(names)} packages, downloaded in {there - started:.1f} s")
        print(f"{complete}, checked in {checked - there:.1f} s", flush=True)
        for version in given.python_version:
            tried = Tried(version, given.packages, names, house, Path(temporary), Path(place))
            for way in given.ways if tried.python else ():
                outcome = tried.install(way)
                found.setdefault(version, {})[way] = {
                    name: getattr(outcome, name) for name in Outcome.__slots__
                }
                _print(version, way, outcome, len(names))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


class Tried:
    """Installations for one Python.

    Args:
        version: of the Python.
        file: of requirements.
        names: of the packages in it.
        house: the wheelhouse that has them.
        mounts: directory for mounts.
        place: directory for environments.

    Attributes:
        python: path of the interpreter; None where there is none on ``PATH``.
    """

    def __init__(
        self,
        version: str,
        file: Path,
        names: Sequence[str],
        house: Wheelhouse,
        mounts: Path,
        place: Path,
    ) -> None:
        self.python = shutil.which(f"python{version}")
        if self.python is None:
            print(f"Python {version}: not on PATH, so not installed")
        self._target = Target(version, Target.here().platform)
        self._wheels = house.add(Wanted.of(files=[file]), targets=[self._target]).wheels
        self._names, self._house, self._mounts = names, house, mounts
        self._venv = place / f"venv-{version}"

    def install(self, way: str) -> Outcome:
        """Install in one way into an environment that is gone thereafter, and try everything."""
        directory, cache = self._house.directory, self._house.directory.parent / "unpacked"
        seed = ["--seed"] if way == "pip" else []
        python = str(self._venv / "bin" / "python")
        _run([uv.find_uv_bin(), "venv", "-q", *seed, "-p", str(self.python), str(self._venv)])
        try:
            if way in ("uv", "pip"):
                with _mounted(directory, self._mounts / "mount") as mounted:
                    flat = install_command(way, self._names, packages=str(mounted), python=python)
                    command = [uv.find_uv_bin() if word == "uv" else word for word in flat]
                    return self._outcome(command, python)
            shipment = prepare(directory, self._wheels, self._target, cache)
            with _mounted(shipment.tree, self._mounts / "mount") as mounted:
                mode = "symlink" if way == "links" else "copy"
                return self._outcome(shipment.command(python, str(mounted), mode), python)
        finally:
            shutil.rmtree(self._venv)

    def _outcome(self, command: Sequence[str], python: str) -> Outcome:
        started = time.perf_counter()
        _offline(command)
        seconds = time.perf_counter() - started
        pip = [uv.find_uv_bin(), "pip"]
        listed = json.loads(_offline([*pip, "list", "-p", python, "--format=json"]))
        conflicts = ""
        for check in ([python, "-m", "pip", "check"], [*pip, "check", "-p", python]):
            try:
                _offline(check)
            except subprocess.CalledProcessError as error:
                conflicts += f"{error.stdout}{error.stderr}"
        devices = _offline(["cat", "/proc/net/dev"]).splitlines()[2:]
        faults = json.loads(_offline([python, str(IMPORTER), *self._names]))
        return Outcome(
            seconds,
            len(listed),
            tuple(line.partition(":")[0].strip() for line in devices),
            conflicts,
            {name: fault for name, fault in faults.items() if fault},
        )


def _offline(command: Sequence[str]) -> str:
    return _run(["unshare", "--net", *command])


def _run(command: Sequence[str]) -> str:
    kept = {name: value for name, value in clean_environment().items() if name[:6] != "PYTHON"}
    return subprocess.run(
        command, env=kept, cwd="/", capture_output=True, text=True, timeout=TIMEOUT, check=True
    ).stdout


@contextmanager
def _mounted(source: Path, mntpoint: Path) -> Iterator[Path]:
    wheelmount = [sys.executable, "-m", "wheelmount.cli.main"]
    mntpoint.mkdir(exist_ok=True)
    _run([*wheelmount, "mount", "-q", str(source), str(mntpoint), "--hosts", "local:1"])
    try:
        yield mntpoint
    finally:
        _run([*wheelmount, "umount", "--force", str(mntpoint)])


def _print(version: str, way: str, outcome: Outcome, count: int) -> None:
    print(
        f"Python {version}, {way}: {outcome.packages} packages in {outcome.seconds:.1f} s, "
        f"network: {' '.join(outcome.interfaces)}; "
        f"checks: {outcome.conflicts.strip() or 'clean'}; "
        f"{count - len(outcome.faults)} of {count} import",
        flush=True,
    )
    for name, fault in outcome.faults.items():
        print(f"  {name}: {fault}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        words = " ".join(map(str, error.cmd[:6]))
        sys.exit(f"{words}… ended with {error.returncode}:\n{error.stderr}")
