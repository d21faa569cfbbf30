"""How fast a directory gets to several hosts: ``python -m benchmarks.delivery``, as root.

On a test-bed of hosts of their own on this machine (``tests/testbed``), over its network, with
links of a given rate or as fast as they will go. In every round all contenders in turn, the first a
different one each time; medians. ``sockets`` is the limit where all come from the client, and with
``--rate`` the size divided by the rate is the limit of all.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks import contenders
from benchmarks.trees import MIB, big, fill, lengths
from tests.testbed import LOGIN, Lab
from tests.testbed.service import Service, start_workers

RSYNC = """
use chroot = no
[tree]
path = /dev/shm/tree
read only = no
uid = root
gid = root
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.delivery")
    parser.add_argument("--hosts", default="2,4", help="numbers of hosts (%(default)s)")
    parser.add_argument("--size", type=int, default=512, help="MiB of each tree (%(default)s)")
    parser.add_argument("--rate", help="of each host's link, such as 1gbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="contenders, with commas")
    parser.add_argument("--trees", default="file,files", help="or directories (%(default)s)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(contenders.CONTENDERS)
    if "rsync" in names and not shutil.which("rsync"):
        print("rsync is left out: it is not installed", file=sys.stderr)
        names.remove("rsync")
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as place:
        for tree in given.trees.split(","):
            source = make(Path(place) / Path(tree).name, tree, given.size * MIB)
            held = contenders.held(source)
            for count in map(int, given.hosts.split(",")):
                found = measure(source, count, given.rate, names, given.rounds)
                results[f"{tree} {count}"] = found
                show(tree, count, held, given.rate, found)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


def make(folder: Path, kind: str, size: int) -> Path:
    """One file, files as an environment of packages has them, or a copy of a directory."""
    if Path(kind).is_absolute():
        shutil.copytree(kind, folder, symlinks=True)
        return folder
    folder.mkdir()
    rng = random.Random(7)  # noqa: S311 - the same every time
    if kind == "file":
        big(folder / "file", size, rng)
    else:
        found, left = [], size * 2 // 3
        for length in lengths(1 << 30, rng):
            if left <= 0:
                break
            found.append(length)
            left -= length
        fill(folder / "small", folder / "names", iter(found), rng)
        for number in range(4):
            big(folder / f"library{number}.so", size // 12, rng)
    return folder


def measure(
    source: Path, count: int, rate: str | None, names: list[str], rounds: int
) -> dict[str, float]:
    """Seconds of each contender, the median of all rounds."""
    seconds = defaultdict(list)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            try:
                seconds[name].append(once(source, count, rate, name))
            except subprocess.SubprocessError as error:
                said = getattr(error, "stderr", None) or str(error)
                print(f"{name}, {count} hosts: {said.strip()[-500:]}", file=sys.stderr)
    return {name: median(found) for name, found in seconds.items()}


def once(source: Path, count: int, rate: str | None, name: str) -> float:
    """One delivery, on hosts made for it."""
    with Lab(count, rate, [source.parent]) as lab:
        if name == "sockets":
            sink = [sys.executable, "-m", "benchmarks.contenders", "sink"]
            services = [Service(lab, host, sink, contenders.SINK_PORT) for host in lab.hosts]
        elif name == "rsync":
            services = [_rsync(lab, host) for host in lab.hosts]
        else:
            services = start_workers(lab)
        for each in services:
            each.await_port()
        started = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.contenders", name, source, *lab.hosts]
        done = lab.run(LOGIN, command, timeout=900, check=True)
        whole = time.perf_counter() - started
        seconds = float(done.stdout.splitlines()[-1])
        notes = [line for line in done.stderr.splitlines() if line.startswith("sent ")]
        print(
            f"{name}, {count} hosts: {seconds:.2f} s ({whole:.1f} s with all)", *notes,
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return seconds


def _rsync(lab: Lab, host: str) -> Service:
    configuration = f"/dev/shm/{host}.conf"  # noqa: S108 - the lab's own
    script = f"mkdir -p /dev/shm/tree; cat > {configuration}"
    lab.run(host, ["sh", "-c", script], stdin=None, input=RSYNC, check=True)
    daemon = ["rsync", "--daemon", "--no-detach", f"--port={contenders.RSYNC_PORT}"]
    return Service(lab, host, [*daemon, f"--config={configuration}"], contenders.RSYNC_PORT)


def show(tree: str, count: int, held: int, rate: str | None, found: dict[str, float]) -> None:
    """Print a table."""
    link = f"links of {rate}" if rate else "links without limit"
    print(f"\n{tree}, {held / MIB:.0f} MiB to {count} hosts, {link}")
    limit = found.get("sockets")
    for name, seconds in found.items():
        ratio = f"{limit / seconds:6.2f} of sockets" if limit else ""
        print(f"  {name:12} {seconds:7.2f} s {held / MIB / seconds:7.0f} MiB/s a host {ratio}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
