"""How time and memory grow with the number of files: ``python -m benchmarks.many``.

Trees of small files, a thousand in a directory, each mounted on hosts of this machine: until the
mount stands, until all has arrived, a refresh of which nothing changed, and one of one file; then
the most that each process ever had resident. Times are also given for each file: they are to be
the same for all trees.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.memory import DISK, beside, peak
from wheelmount import config, remotemount
from wheelmount.hosts import runtime
from wheelmount.hosts.local import LocalHosts

FOLDER = 1000
"""Files in a directory."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.many")
    parser.add_argument("--files", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--size", type=int, default=200, help="bytes of a file (%(default)s)")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--place", type=Path, default=DISK, help="for them (%(default)s)")
    given = parser.parse_args()
    for count in given.files:  # each in processes of its own, whose peaks are looked at
        arguments = count, given.size, given.hosts, given.place
        process = multiprocessing.get_context("spawn").Process(target=_measure, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)


def _measure(count: int, size: int, hosts: int, place: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir=place) as folder:
        source = Path(folder) / "source"
        for number in range(count):
            path = source / f"{number // FOLDER}"
            if number % FOLDER == 0:
                path.mkdir(parents=True)
            (path / f"{number}").write_bytes(os.urandom(size))
        times: dict[str, float] = {}
        with LocalHosts(hosts, config.load(), namespaces=False) as local:
            runtime.start()
            start = time.perf_counter()
            with remotemount(local, source, f"{folder}/{{host}}") as mount:
                times["mounted"] = time.perf_counter() - start
                mount.wait()
                times["arrived"] = time.perf_counter() - start
                for what in ("nothing changed", "one changed"):
                    if what == "one changed":
                        (source / "0" / "0").write_bytes(b"changed")
                    start = time.perf_counter()
                    mount.refresh()
                    times[what] = time.perf_counter() - start
                for path in mount.mntpoints.values():
                    if Path(path, "0", "0").read_bytes() != b"changed":
                        raise SystemExit(f"{path} shows the old bytes")
                memory = {"client": peak(psutil.Process())}
                memory |= {kind: max(found) for kind, found in beside().items()}
        print(f"{count:,} files of {size} bytes, {hosts} hosts")
        for what, took in times.items():
            print(f"  {what:16} {took:6.2f} s, {took / count * 1e6:5.1f} us a file")
        print("  MiB at most: " + ", ".join(f"{k} {v:.0f}" for k, v in sorted(memory.items())))
    runtime.stop()


if __name__ == "__main__":
    main()
