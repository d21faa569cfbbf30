"""How much memory a delivery takes beside what is delivered: ``python -m benchmarks.memory``.

One file from a disk to hosts of this machine, whose bytes each host keeps in memory. Looked at are
the most that each process ever had resident (``VmHWM``, proc(5)): the client, which is this one,
and on each host its agent and the process that serves the mount. None of them maps the files that
hosts keep. What it takes before anything is mounted is printed, too: most of it is Monarch's.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.trees import MIB, big
from wheelmount import config, remotemount
from wheelmount.hosts import runtime
from wheelmount.hosts.local import LocalHosts

DISK = Path("/var/tmp")  # noqa: S108 - a private directory is made in it
"""Where the file lies, and not in memory."""

KINDS = {"wheelmount.hosts.process": "agent", "wheelmount.mount.serve.server": "server"}
"""Processes of a host, by a word of their command lines."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.memory")
    parser.add_argument("--size", type=int, default=10240, help="MiB of the file (%(default)s)")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--place", type=Path, default=DISK, help="for it (%(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir=given.place) as place:
        source = Path(place) / "source"
        source.mkdir()
        big(source / "file", given.size * MIB, random.Random(7))  # noqa: S311 - the same every time
        with LocalHosts(given.hosts, config.load(), namespaces=False) as hosts:
            runtime.start()
            before = peak(psutil.Process())
            start = time.perf_counter()
            with remotemount(hosts, source, f"{place}/{{host}}") as mount:
                mount.wait()
                took = time.perf_counter() - start
                print(f"{given.size} MiB to {given.hosts} hosts in {took:.1f} s; MiB at most")
                print(f"  client {peak(psutil.Process()):6.0f}, before {before:.0f}")
                for kind, found in sorted(beside().items()):
                    print(f"  {kind:6} {max(found):6.0f} (of {len(found)})")
    runtime.stop()


def beside() -> dict[str, list[float]]:
    """Peaks of the processes of hosts, MiB, by their kind."""
    found: dict[str, list[float]] = {}
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        for word, kind in KINDS.items():
            if word in line:
                found.setdefault(kind, []).append(peak(process))
    return found


def peak(process: psutil.Process) -> float:
    """The most that a process ever had in memory, MiB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
