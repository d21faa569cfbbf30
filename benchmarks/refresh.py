"""How fast a mount follows its directory: ``python -m benchmarks.refresh``, from the checkout.

A tree of many small files and a big one, on some hosts of this machine; nothing changed, one file
of 1 KiB changed, and a thousand, from the call of ``refresh`` to its end, when all hosts show it,
and from the start of the command ``wheelmount refresh`` to its end, for a mount without a session.
Beside them, in turns: what the client alone needs, a walk of the tree with ``lstat`` of every file,
which no way to find what changed can do without; and ``rsync -a`` to as many directories in memory,
one after the other.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks import trees
from benchmarks.memory import DISK
from wheelmount import config, remotemount
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.serve import processes

EDITS = {"nothing changed": 0, "1 KiB changed": 1, "1,000 files of 1 KiB changed": 1000}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.refresh")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=30_000)
    parser.add_argument("--big", type=int, default=3, help="GiB in a big file beside the small")
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--pause", type=float, default=3, help="seconds ahead of each")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="wm-", dir=DISK) as place,
        tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as memory,
    ):
        work = Path(place)
        made = trees.make(work, trees.Sizes(0, given.files, 0, given.big << 30, 0, 0), (), None)
        os.environ["WHEELMOUNT_RUNTIME_DIR"] = str(work / "runtime")
        settings = replace(config.load(), adapter=given.adapter)
        files = itertools.cycle(sorted((made.main / "small").glob("*/*/*.py")))
        copies = [Path(memory, f"copy-{number}") for number in range(given.hosts)]
        _rsync(made.main, copies)
        stays = f"{work}/stays-on-{{host}}"
        _command("mount", str(made.main), stays, "--hosts", f"local:{given.hosts}")
        (directory, *_) = processes.find(settings)
        identity = processes.identity(directory)
        try:
            with LocalHosts(given.hosts, settings, namespaces=False) as hosts:
                where = f"{work}/on-{{host}}"
                with remotemount(hosts, made.main, where, settings=settings) as mount:
                    mount.wait()
                    ways: dict[str, tuple[Callable[[], object], list[str]]] = {
                        "by refresh()": (mount.refresh, list(mount.mntpoints.values())),
                        "by the command": (
                            lambda: _command("refresh", identity),
                            [stays.replace("{host}", f"host{n}") for n in range(given.hosts)],
                        ),
                        "by rsync": (lambda: _rsync(made.main, copies), list(map(str, copies))),
                    }
                    _measure(given, made.main, files, ways)
        finally:
            _command("umount", identity)


def _measure(
    given: argparse.Namespace,
    main: Path,
    files: itertools.cycle[Path],
    ways: Mapping[str, tuple[Callable[[], object], list[str]]],
) -> None:
    times = defaultdict(list)
    for _ in range(given.rounds):
        times["walk and lstat alone"].append(_timed(given.pause, lambda: _walk(main)))
        for what, count in EDITS.items():
            edited = list(itertools.islice(files, count))
            for file in edited:
                file.write_bytes(os.urandom(1024))
            for way, (refresh, places) in ways.items():
                times[f"{what}, {way}"].append(_timed(given.pause, refresh))
                for file, place in itertools.product(edited, places):
                    if Path(place, file.relative_to(main)).read_bytes() != file.read_bytes():
                        raise SystemExit(f"{place} shows old bytes")
    for what, found in times.items():
        every = " ".join(f"{each:.2f}" for each in found)
        print(f"{what}: {median(found):.3f} s on {given.hosts} hosts ({every})")


def _timed(pause: float, work: Callable[[], object]) -> float:
    time.sleep(pause)  # until what the last one left is cleared away
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _command(*words: str) -> None:
    command = [sys.executable, "-m", "wheelmount.cli.main", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _rsync(source: Path, copies: list[Path]) -> None:
    if program := shutil.which("rsync"):
        for copy in copies:
            subprocess.run([program, "-a", f"{source}/", f"{copy}/"], check=True)


def _walk(folder: Path) -> None:
    for directory, _, files in os.walk(folder):
        for name in files:
            os.lstat(os.path.join(directory, name))  # noqa: PTH118 - the least there is


if __name__ == "__main__":
    main()
