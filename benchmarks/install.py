"""How fast a host installs: ``python -m benchmarks.install``, as root from the checkout.

One set of packages from what is mounted on a host of this machine, all bytes there, into a fresh
environment each time: with pip and with uv from the flat wheelhouse, neither with a cache; with
``wheelmount install --link-mode`` from unpacked wheels, by copies and by links; and with uv from a
cache that is made of links, which is filled once; in turn in every round. After each the first
import of what was installed, which is where bytecode that is missing is made. All have to come to
the same versions, and ``uv pip check`` has to find nothing.

With ``--environments`` instead nothing is installed: ``wheelmount run --with`` the same set, all
wheels in its cache, on two hosts of a session of this machine, and ``uv run --with`` with a warm
cache, which is here alone; in turn in every round: the environment made anew, the same again, and
with one package more. Seconds are those from the start of the command to its first line.

Beside the installations what no copy can go below: ``cp -r`` of the same unpacked wheels from the
same mount, by one process and by as many as the copies are made with.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uv

from wheelmount.wheels.environment.files import WORKERS
from wheelmount.wheels.install import clean_environment, install_command
from wheelmount.wheels.shipment import Shipment, prepare
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

PACKAGES = ("torch", "transformers", "numpy", "scipy", "pandas", "scikit-learn", "pyarrow")
MODULES = "torch, transformers, numpy, scipy, pandas, sklearn, pyarrow"
OURS = ("wheelmount, links", "wheelmount, copies", "uv, cache of links")
THEIRS = ("uv", "pip")
LIMITS = {"cp -r": 1, f"cp -r, {WORKERS} at a time": WORKERS}


@dataclass(frozen=True, slots=True)
class Sample:
    """What one installation took.

    Attributes:
        seconds: until it was done.
        loading: seconds of the first import thereafter.
    """

    seconds: float
    loading: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.install")
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--modules", default=MODULES, help="what to import then")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="of environments")  # noqa: S108
    parser.add_argument("--cache", type=Path, help="keeps wheels and what is unpacked")
    parser.add_argument(
        "--pip", default=sys.executable, help="a Python that has the pip to measure"
    )
    parser.add_argument("--environments", action="store_true", help="mounted ones, and uv run")
    parser.add_argument("--one-more", default="humanize", help="package that the set has not")
    parser.add_argument("--json", type=Path, help="file for all samples")
    given = parser.parse_args()
    if given.environments:
        _environments(given.packages, given.one_more, given.rounds)
        return
    samples: dict[str, list[Sample]] = {way: [] for way in (*OURS, *THEIRS)}
    limits: dict[str, list[float]] = {way: [] for way in LIMITS}
    with (
        tempfile.TemporaryDirectory(prefix="wm-") as temporary,
        tempfile.TemporaryDirectory(prefix="wm-", dir=given.place) as place,
    ):
        house, shipment = _prepare(given.packages, given.cache or Path(temporary))
        with (
            _mounted(house.directory, Path(temporary, "on-host-wheels")) as wheels,
            _mounted(shipment.tree, Path(temporary, "on-host-tree")) as tree,
        ):
            variables = _fill(shipment, tree, Path(place, "cache"))
            for _ in range(given.rounds):
                versions = set()
                for way in samples:
                    venv = Path(place, "venv")
                    python = str(venv / "bin" / "python")
                    _run([uv.find_uv_bin(), "venv", "-q", "-p", sys.executable, str(venv)], {})
                    command = _command(way, given.packages, wheels, tree, shipment, python)
                    if way == "pip":
                        command[:3] = [given.pip, "-m", "pip", "--python", python]
                    more = variables if way == OURS[2] else {"UV_CACHE_DIR": str(venv / "cache")}
                    seconds = _run(command, more)
                    loading = _run([python, "-c", f"import {given.modules}"], {})
                    samples[way].append(Sample(seconds, loading))
                    versions.add(_versions(python))
                    shutil.rmtree(venv)
                if len(versions) != 1:
                    raise SystemExit("not all have installed the same")
                for way, workers in LIMITS.items():
                    limits[way].append(_copy(tree, Path(place, "copy"), workers))
        _print(samples, limits, house, shipment)
    if given.json:
        plain = {way: [[s.seconds, s.loading] for s in found] for way, found in samples.items()}
        given.json.write_text(json.dumps({**plain, **limits}))


def _environments(packages: Sequence[str], more: str, rounds: int) -> None:
    """Measure and print what ``--environments`` says."""
    wheelmount = [sys.executable, "-m", "wheelmount.cli.main"]
    steps = ("made anew", "again", f"with {more}")
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="wm-") as temporary:
        place = Path(temporary)
        script = place / "first.py"
        script.write_text("print('first')\n")
        for name in ("CACHE", "RUNTIME", "STATE"):
            os.environ[f"WHEELMOUNT_{name}_DIR"] = str(place / name)
            (place / name).mkdir()
        os.environ["UV_CACHE_DIR"] = str(place / "uv")
        sets = [list(packages), list(packages), [*packages, more]]

        def ours(named: Sequence[str], hosts: str) -> list[str]:
            return [
                *wheelmount,
                "run",
                "-q",
                "--with",
                ",".join(named),
                "--hosts",
                hosts,
                str(script),
            ]

        def theirs(named: Sequence[str]) -> list[str]:
            run = [uv.find_uv_bin(), "run", "-q", "--no-project", "-p", sys.executable]
            return [*run, "--with", ",".join(named), str(script)]

        for named in sets[1:]:
            _first_line(ours(named, "local:1"))
            _first_line(theirs(named))
        for _ in range(rounds):
            # Moved, not removed: ext4 makes a directory several times slower while it skips the
            # inodes of thousands that were removed in the last minutes.
            for folder in (place / "CACHE" / "environments").iterdir():
                folder.rename(place / f"{folder.name}-{time.time_ns()}")
            for folder in (place / "uv").glob("environments-*"):
                folder.rename(place / f"{folder.name}-{time.time_ns()}")
            _run([*wheelmount, "up", "-q", "--hosts", "local:2"], os.environ)
            try:
                for step, named in zip(steps, sets, strict=True):
                    mine = _first_line(ours(named, "session:default"))
                    times.setdefault((step, "wheelmount run, two hosts"), []).append(mine)
                    times.setdefault((step, "uv run, here"), []).append(_first_line(theirs(named)))
            finally:
                _run([*wheelmount, "down", "-q"], os.environ)
    for (step, way), found in times.items():
        every = " ".join(f"{seconds:.2f}" for seconds in found)
        print(f"{step}: {way}: {median(found):.2f} s ({every})")
    for step in steps:
        pairs = zip(
            times[step, "uv run, here"], times[step, "wheelmount run, two hosts"], strict=True
        )
        print(f"{step}: uv / wheelmount: {' '.join(f'{one / other:.2f}' for one, other in pairs)}")


def _first_line(command: Sequence[str]) -> float:
    """Seconds until a command prints its first line; it is waited for."""
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        line = run.stdout.readline() if run.stdout else ""
        seconds = time.perf_counter() - started
        said = run.communicate()[1]
    if run.returncode or not line:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{said}")
    return seconds


def _prepare(packages: Sequence[str], cache: Path) -> tuple[Wheelhouse, Shipment]:
    house = Wheelhouse(cache / "wheels")
    started = time.perf_counter()
    report = house.add(Wanted.of(packages), targets=[Target.here()])
    print(f"{len(report.wheels)} wheels, {report.size / 1e6:.0f} MB", end=", ")
    there = time.perf_counter()
    shipment = prepare(house.directory, report.answers[0], Target.here(), cache / "unpacked")
    print(
        f"downloaded in {there - started:.1f} s, "
        f"unpacked and compiled in {time.perf_counter() - there:.1f} s"
    )
    return house, shipment


@contextmanager
def _mounted(source: Path, mntpoint: Path) -> Iterator[Path]:
    wheelmount = [sys.executable, "-m", "wheelmount.cli.main"]
    mntpoint.mkdir()
    _run([*wheelmount, "mount", "-q", str(source), str(mntpoint), "--hosts", "local:1"], {})
    try:
        yield mntpoint
    finally:
        _run([*wheelmount, "umount", "--force", str(mntpoint)], {})


def _command(
    way: str, packages: Sequence[str], wheels: Path, tree: Path, shipment: Shipment, python: str
) -> list[str]:
    if way in OURS[:2]:
        mode = "symlink" if way.endswith("links") else "copy"
        return list(shipment.command(python, str(tree), mode))
    if way in OURS:
        return [uv.find_uv_bin(), "pip", "install", "-p", python, *packages]
    command = install_command(
        "uv" if way == "uv" else "pip", packages, packages=str(wheels), python=python
    )
    return [uv.find_uv_bin() if item == "uv" else item for item in command]


def _fill(shipment: Shipment, tree: Path, cache: Path) -> dict[str, str]:
    started = time.perf_counter()
    path = f"{Path(uv.find_uv_bin()).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*shipment.command(sys.executable, str(tree), "uv"), str(cache)],
        env={**clean_environment(), "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    print(f"uv's cache filled in {time.perf_counter() - started:.2f} s")
    exports = [word for word in shlex.split(done.stdout) if word != "export"]
    return dict(word.split("=", 1) for word in exports)


def _copy(tree: Path, place: Path, workers: int) -> float:
    place.mkdir()
    wheels = [str(path) for path in tree.iterdir() if path.is_dir()]
    order = ["xargs", "-0", "-n", "1", "-P", str(workers)] if workers > 1 else ["xargs", "-0"]
    started = time.perf_counter()
    subprocess.run(
        [*order, "cp", "-r", "--preserve=timestamps", "-t", str(place)],
        input="\0".join(wheels).encode(),
        check=True,
    )
    seconds = time.perf_counter() - started
    shutil.rmtree(place)
    return seconds


def _run(command: Sequence[str], more: Mapping[str, str]) -> float:
    kept = {name: value for name, value in clean_environment().items() if name[:6] != "PYTHON"}
    started = time.perf_counter()
    done = subprocess.run(
        command, env={**kept, **more}, cwd="/", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - started


def _versions(python: str) -> str:
    pip = [uv.find_uv_bin(), "pip"]
    _run([*pip, "check", "-p", python], {})
    freeze = [*pip, "freeze", "-p", python]
    return subprocess.run(
        freeze, env={**os.environ, "UV_NO_CONFIG": "1"}, capture_output=True, text=True, check=True
    ).stdout


def _print(
    samples: Mapping[str, Sequence[Sample]],
    limits: Mapping[str, Sequence[float]],
    house: Wheelhouse,
    shipment: Shipment,
) -> None:
    files = {f.stat().st_ino: f.stat().st_size for f in shipment.tree.rglob("*") if f.is_file()}
    print(f"flat {house.size() / 1e6:.0f} MB; unpacked {sum(files.values()) / 1e6:.0f} MB")
    print("medians; ratios round by round")
    for way, found in samples.items():
        every = " ".join(f"{sample.seconds:.2f}" for sample in found)
        loading = median(sample.loading for sample in found)
        seconds = median(sample.seconds for sample in found)
        print(f"{way}: {seconds:.2f} s ({every}), first import {loading:.2f} s")
    for way, times in limits.items():
        print(f"{way}: {median(times):.2f} s ({' '.join(f'{time:.2f}' for time in times)})")
    for way in OURS:
        for other in THEIRS:
            pairs = zip(samples[other], samples[way], strict=True)
            ratios = [theirs.seconds / ours.seconds for theirs, ours in pairs]
            every = " ".join(f"{ratio:.1f}" for ratio in ratios)
            print(f"{other} / {way}: {median(ratios):.1f} ({every})")


if __name__ == "__main__":
    main()
