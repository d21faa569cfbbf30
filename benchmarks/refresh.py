"""How fast a mount follows its directory: ``python -m benchmarks.refresh``, from the checkout.

A tree of many small files and a big one, on some hosts of this machine; nothing changed, and
one file of 1 KiB changed, from the call of ``refresh`` to its end, when all hosts show it. Beside
it what the client alone needs: a walk of the tree with ``lstat`` of every file, which no way to
find what changed can do without.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks import trees
from wheelmount import config, remotemount
from wheelmount.hosts.local import LocalHosts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.refresh")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--big", type=int, default=3, help="GiB in a big file beside 30,000 small")
    parser.add_argument("--adapter", default="auto")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wm-") as place:
        work = Path(place)
        made = trees.make(work, trees.Sizes(0, 30_000, 0, given.big << 30, 0, 0), (), None)
        settings = replace(config.load(), adapter=given.adapter, runtime_dir=str(work / "runtime"))
        with LocalHosts(given.hosts, settings, namespaces=False) as hosts:
            where = f"{work}/on-{{host}}"
            with remotemount(hosts, made.main, where, settings=settings) as mount:
                mount.wait()
                file = next((made.main / "small").glob("*/*/*.py"))
                shown = file.relative_to(made.main)

                def edited() -> None:
                    mount.refresh()
                    for path in mount.mntpoints.values():
                        if Path(path, shown).read_bytes() != file.read_bytes():
                            raise SystemExit(f"{path} shows the old bytes")

                for what, before, work_of in (
                    ("walk and lstat alone", lambda: None, lambda: _walk(made.main)),
                    ("nothing changed", lambda: None, mount.refresh),
                    ("1 KiB changed", lambda: _edit(file), edited),
                ):
                    times = [_timed(before, work_of) for _ in range(given.rounds)]
                    every = " ".join(f"{t:.2f}" for t in times)
                    print(f"{what}: {median(times):.3f} s on {given.hosts} hosts ({every})")


def _timed(before: Callable[[], object], work: Callable[[], object]) -> float:
    before()
    time.sleep(3)  # until what the last one left is cleared away
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _edit(file: Path) -> None:
    file.write_bytes(os.urandom(1024))


def _walk(folder: Path) -> None:
    for directory, _, files in os.walk(folder):
        for name in files:
            os.lstat(os.path.join(directory, name))  # noqa: PTH118 - the least there is


if __name__ == "__main__":
    main()
