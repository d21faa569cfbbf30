"""How fast hosts verify what they keep: ``python -m benchmarks.verify``.

Large files, and files as site-packages have them, mounted on one host of this machine from memory.
``RemoteMount.verify()`` against blake3 of the same files through the mount, by one thread and by as
many as there are processors: it reads as much, but looks at no tree and compares nothing. Medians
of rounds in turn.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from benchmarks.memory import DISK
from benchmarks.trees import MIB, big, fill, lengths
from wheelmount import config, remotemount
from wheelmount.hosts import runtime
from wheelmount.hosts.local import LocalHosts

LARGE = 4
"""Number of large files."""

MEAN = 9 << 10
"""Bytes of a small file in the mean; see ``lengths``."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.verify")
    parser.add_argument("--size", type=int, default=1024, help="MiB of a tree (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--place", type=Path, default=DISK, help="for them (%(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir=given.place) as folder:
        rng = random.Random(7)  # noqa: S311 - the same every time
        trees = {name: Path(folder) / name for name in ("large", "small")}
        trees["large"].mkdir()
        for number in range(LARGE):
            big(trees["large"] / f"{number}", given.size * MIB // LARGE, rng)
        count = given.size * MIB // MEAN
        fill(trees["small"], Path(folder) / "names", lengths(count, rng), rng)
        with LocalHosts(1, config.load(), namespaces=False) as hosts:
            for name, source in trees.items():
                with remotemount(hosts, source, f"{folder}/{{host}}-{name}") as mount:
                    mount.wait()
                    (point,) = mount.mntpoints.values()
                    (status,) = mount.status().values()
                    files = [Path(at, each) for at, _, found in os.walk(point) for each in found]
                    size = sum(file.stat().st_size for file in files)
                    print(f"{name}: {len(files):,} files, {size >> 20} MiB, {status['adapter']}")
                    _compare(files, size, mount.verify, given.rounds)
    runtime.stop()
    sys.stdout.flush()
    os._exit(0)  # threads of Monarch that still run can abort the end of Python


def _compare(files: list[Path], size: int, verify: Callable[[], object], rounds: int) -> None:
    processors = len(os.sched_getaffinity(0))
    ways: dict[str, Callable[[], object]] = {
        "verify": verify,
        "blake3, one thread": lambda: _hash(files, 1),
        f"blake3, {processors} threads": lambda: _hash(files, processors),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            took[name].append(time.perf_counter() - start)
    for name, times in took.items():
        middle = statistics.median(times)
        print(f"  {name:20} {middle:6.2f} s, {size / middle / 1e9:5.2f} GB/s")


def _hash(files: list[Path], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(_digests, files[n::threads]) for n in range(threads)]:
            done.result()


def _digests(files: list[Path]) -> None:
    buffer = memoryview(bytearray(MIB))
    for path in files:
        hasher = blake3()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
        hasher.digest()


if __name__ == "__main__":
    main()
