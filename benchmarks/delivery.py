"""How fast a directory gets to several hosts: ``python -m benchmarks.delivery``, as root.

On a test-bed of hosts of their own on this machine (``tests/testbed``), over its network, with
links of a given rate or as fast as they will go. In every round all contenders in turn, the first a
different one each time; medians. ``sockets`` is the limit where all come from the client, and with
``--rate`` the size divided by the rate is the limit of all.

All is kept in memory: the tree, if no other place is given, and what each host makes of it;
``sbcast`` has a directory twice on each. It has a Slurm of its own, made for it as all hosts are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks import contenders, system
from benchmarks.reserve import Reserve
from benchmarks.system import MEMORY
from benchmarks.trees import MIB, big, fill, lengths
from tests.testbed import LOGIN, Lab
from tests.testbed.network import CARD
from tests.testbed.service import Service, start_workers
from tests.testbed.slurm import start_slurm


@dataclass(frozen=True)
class Taken:
    """What a delivery took.

    Attributes:
        seconds: until every host had every byte.
        egress: bytes that left the client, with all that a network adds.
        memory: the most that the client's process had in memory, bytes.
    """

    seconds: float
    egress: int
    memory: int


SPARE = 512 * MIB
"""Bytes left free beside what one host looks for before it begins."""

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
    parser.add_argument("--warm", action="store_true", help="with memory that the machine has got")
    parser.add_argument("--place", type=Path, default=MEMORY, help="of the trees (%(default)s)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(contenders.CONTENDERS)
    for name, program in (("rsync", "rsync"), ("sbcast", "slurmctld")):
        if name in names and not shutil.which(program):
            print(f"{name} is left out: it is not installed", file=sys.stderr)
            names.remove(name)
    counts = [int(count) for count in given.hosts.split(",")]
    twice = "sbcast" in names and given.trees != "file"
    sizes = [system.allocated(Path(tree)) for tree in given.trees.split(",") if tree[0] == "/"]
    size = max([given.size * MIB, *sizes])
    beside = (given.place == MEMORY) + ("rdma" in names)
    check_memory(size * (max(counts) * (1 + twice) + beside) + SPARE)
    results: dict[str, dict[str, Taken]] = {}
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="wm-bench-", dir=given.place)
        )
        reserve = stack.enter_context(Reserve(size + SPARE)) if given.warm else None
        for tree in given.trees.split(","):
            source = make(Path(place) / Path(tree).name, tree, given.size * MIB)
            held = contenders.held(source)
            for count in counts:
                found = measure(source, count, given.rate, names, given.rounds, reserve)
                results[f"{tree} {count}"] = found
                show(tree, count, held, given.rate, found)
            shutil.rmtree(source)
    if given.json:
        shown = {key: {n: vars(each) for n, each in its.items()} for key, its in results.items()}
        given.json.write_text(json.dumps(shown, indent=1))


def check_memory(needed: int) -> None:
    """End with a message where this machine cannot hold so many bytes."""
    free = psutil.virtual_memory().available
    if needed > free:
        sys.exit(
            f"{needed / MIB:.0f} MiB of memory are needed, {free / MIB:.0f} are free:"
            " give a smaller --size, or fewer --hosts"
        )


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
    source: Path,
    count: int,
    rate: str | None,
    names: list[str],
    rounds: int,
    reserve: Reserve | None,
) -> dict[str, Taken]:
    """What each contender took, the medians of all rounds."""
    taken = defaultdict(list)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if reserve is not None:
                reserve.fill()
            try:
                found = once(source, count, rate, name)
            except subprocess.SubprocessError as error:
                said = getattr(error, "stderr", None) or str(error)
                print(f"{name}, {count} hosts: {said.strip()[-500:]}", file=sys.stderr)
            else:
                taken[name].append(found)
    return {
        name: Taken(
            median(each.seconds for each in found),
            int(median(each.egress for each in found)),
            int(median(each.memory for each in found)),
        )
        for name, found in taken.items()
    }


def once(source: Path, count: int, rate: str | None, name: str) -> Taken:
    """One delivery, on hosts made for it."""
    with Lab(count, rate, [source.parent]) as lab:
        if name == "sockets":
            sink = [sys.executable, "-m", "benchmarks.contenders", "sink"]
            services = [Service(lab, host, sink, contenders.SINK_PORT) for host in lab.hosts]
        elif name == "rsync":
            services = [_rsync(lab, host) for host in lab.hosts]
        elif name == "sbcast":
            services = start_slurm(lab)
        else:
            services = start_workers(lab)
        for each in services:
            each.await_port()
        started, egress = time.perf_counter(), _egress(lab)
        command = [sys.executable, "-m", "benchmarks.contenders", name, source, *lab.hosts]
        done = lab.run(LOGIN, command, timeout=900, check=True)
        whole = time.perf_counter() - started
        taken = Taken(egress=_egress(lab) - egress, **json.loads(done.stdout.splitlines()[-1]))
        print(
            f"{name}, {count} hosts: {taken.seconds:.2f} s ({whole:.1f} s with all)",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return taken


def _egress(lab: Lab) -> int:
    """Bytes that left the client's network card: proc_net(5)."""
    lines = lab.run(LOGIN, ["cat", "/proc/self/net/dev"]).stdout.splitlines()
    return sum(int(line.split()[9]) for line in lines if line.strip().startswith(f"{CARD}:"))


def _rsync(lab: Lab, host: str) -> Service:
    configuration = f"/dev/shm/{host}.conf"  # noqa: S108 - the lab's own
    script = f"mkdir -p /dev/shm/tree; cat > {configuration}"
    lab.run(host, ["sh", "-c", script], stdin=None, input=RSYNC, check=True)
    daemon = ["rsync", "--daemon", "--no-detach", f"--port={contenders.RSYNC_PORT}"]
    return Service(lab, host, [*daemon, f"--config={configuration}"], contenders.RSYNC_PORT)


def show(tree: str, count: int, held: int, rate: str | None, found: dict[str, Taken]) -> None:
    """Print a table; each speed as a multiple of the others'."""
    link = f"links of {rate}" if rate else "links without limit"
    print(f"\n{tree}, {held / MIB:.0f} MiB to {count} hosts, {link}", end="")
    wire = held / bandwidth(rate) if rate else None
    print(f": {wire:.2f} s on the wire" if wire else "")
    print("              seconds  MiB/s a host  sent x size  client MiB", end="")
    print("  x wire" if wire else "", "".join(f"{f'/ {name}':>13}" for name in found))
    for name, its in found.items():
        speed = held / MIB / its.seconds
        print(f"  {name:12}{its.seconds:7.2f} {speed:13.0f} {its.egress / held:12.2f}", end="")
        print(f" {its.memory / MIB:11.0f}", f" {its.seconds / wire:7.2f}" if wire else "", end="")
        print("", "".join(f"{other.seconds / its.seconds:13.2f}" for other in found.values()))
    sys.stdout.flush()


def bandwidth(rate: str) -> float:
    """Bytes a second of a rate in bits, as ``tc`` knows it."""
    number, unit = rate[:-4], rate[-4:]
    return float(number) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[unit] / 8


if __name__ == "__main__":
    main()
