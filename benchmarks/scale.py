"""How a delivery scales, on paper, and how far paper is right: ``python -m benchmarks.scale``.

The model: the last host has all bytes after the sum of

- ``size / rate``: every byte once over each link, the client's too (see ``RemoteMount.sent``);
- ``depth * (block / rate + call)``: the last block's way down the tree;
- ``boot``: seconds of a processor until a host, or the client, begins;
- ``size * work``: seconds of a processor for the bytes in the client, and on each host.

On a test-bed all processes share the machine's cores, else every machine has its own. ``boot`` and
``work`` are fitted by least squares to deliveries on test-beds (``tests/testbed``), and the error
against each of these is printed. Then the projection. That everything follows one after the other
is careful: the wire and the processors work at the same time.
Needs root.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.delivery import make, once
from benchmarks.trees import MIB
from wheelmount.mount.transfer.topology import FANOUT, Topology, block_size

GIGABIT = 1e9 / 8
"""Bytes a second."""

CALL = 1.5e-3
"""Seconds of a transfer of next to nothing; see ``benchmarks.rdma``."""

THREADS = 2
"""Cores that a machine of its own has for a delivery, to be careful."""


@dataclass(frozen=True)
class Run:
    """One delivery: what was asked for, and the seconds that it took."""

    hosts: int
    size: int
    rate: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Model:
    """Constants of this machine: seconds of a processor for a process, and for a byte."""

    boot: float
    work: float

    def seconds(self, run: Run, cores: float | None) -> float:
        """Time of a delivery.

        Args:
            run: what is delivered.
            cores: that all share; None if every machine has its own.
        """
        processes, bytes_ = factors(run, cores)
        return wire(run) + steps(run) + self.boot * processes + self.work * bytes_


def wire(run: Run) -> float:
    """Seconds in which the links carry every byte once."""
    return run.size / run.rate


def steps(run: Run) -> float:
    """Seconds of a block's way to the host that is farthest away."""
    return depth(run.hosts, run.size) * (block_size(run.size, run.hosts) / run.rate + CALL)


def factors(run: Run, cores: float | None) -> tuple[float, float]:
    """What the constants are multiplied by."""
    if cores is None:
        return 1.0, run.size / THREADS
    return (run.hosts + 1) / cores, run.size * (run.hosts + 1) / cores


def depth(hosts: int, size: int) -> int:
    """Steps from the client to the host that is farthest away."""
    names = [f"{number}" for number in range(hosts)]
    topology = Topology(names, size)
    return 1 + max(len(above) for name in names for above in topology.route(name))


def fit(runs: Sequence[Run], cores: float) -> Model:
    """Least squares of relative errors."""
    xx = xy = yy = xz = yz = 0.0
    for run in runs:
        x, y = (factor / run.seconds for factor in factors(run, cores))
        z = (run.seconds - wire(run) - steps(run)) / run.seconds
        xx, xy, yy, xz, yz = xx + x * x, xy + x * y, yy + y * y, xz + x * z, yz + y * z
    below = xx * yy - xy * xy
    if not below:
        raise SystemExit("deliveries of two sizes are needed")
    return Model((xz * yy - yz * xy) / below, (yz * xx - xz * xy) / below)


def measured(hosts: Sequence[int], sizes: Sequence[int], rate: int, rounds: int) -> list[Run]:
    """Deliveries of one file on test-beds with links of so many Mbit/s."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as place:
        for size in sizes:
            source = make(Path(place) / f"file{size}", "file", size * MIB)
            for count in hosts:
                took = median(
                    once(source, count, f"{rate}mbit", "wheelmount").seconds for _ in range(rounds)
                )
                runs.append(Run(count, size * MIB, rate * 1e6 / 8, took))
    return runs


def main() -> None:
    """Measure, fit, print, draw."""
    parser = argparse.ArgumentParser("python -m benchmarks.scale")
    parser.add_argument("--hosts", default="2,4,8", help="numbers of hosts (%(default)s)")
    parser.add_argument("--sizes", default="32,96", help="MiB of the file (%(default)s)")
    parser.add_argument("--rate", type=int, default=200, help="Mbit/s of a link (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write deliveries and constants")
    parser.add_argument("--from", dest="known", type=Path, help="take deliveries from such a file")
    parser.add_argument("--plot", type=Path, help="draw the projection (.svg, .png)")
    given = parser.parse_args()
    cores = float(len(os.sched_getaffinity(0)))
    if given.known:
        runs = [Run(**each) for each in json.loads(given.known.read_text())["deliveries"]]
    else:
        hosts, sizes = ([int(n) for n in text.split(",")] for text in (given.hosts, given.sizes))
        runs = measured(hosts, sizes, given.rate, given.rounds)
    model = fit(runs, cores)
    print(f"boot {model.boot:.2f} s a process, work {model.work * 1e9:.2f} s a GB")
    print("hosts    size   measured   model   error   wire alone")
    for run in runs:
        paper = model.seconds(run, cores)
        print(
            f"{run.hosts:5} {run.size / MIB:4.0f} MiB {run.seconds:8.2f} s {paper:6.2f} s"
            f" {paper / run.seconds - 1:+7.0%} {wire(run):10.2f} s"
        )
    project(model)
    if given.json:
        deliveries = [vars(run) for run in runs]
        given.json.write_text(json.dumps({"deliveries": deliveries, **vars(model)}, indent=1))
    if given.plot:
        plot(model, given.plot)


def project(model: Model) -> None:
    """Print what the model says of a cluster."""
    for hosts in (8, 64, 1024):
        run = Run(hosts, int(100e9), 100 * GIGABIT)
        print(
            f"100 GB to {hosts} hosts at 100 Gbit/s, {depth(hosts, run.size)} steps, fan-out"
            f" {FANOUT}: {model.seconds(run, None):.0f} s, on the wire {wire(run):.0f} s"
        )


def plot(model: Model, path: Path) -> None:
    """Draw seconds over hosts for some rates."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    counts = [2**power for power in range(1, 13)]
    for rate in (10, 25, 100, 400):
        runs = [Run(count, int(100e9), rate * GIGABIT) for count in counts]
        line = axis.plot(counts, [model.seconds(run, None) for run in runs], label=f"{rate} Gbit/s")
        axis.axhline(wire(runs[0]), color=line[0].get_color(), linestyle=":", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("hosts")
    axis.set_ylabel("seconds for 100 GB (dotted: the wire alone)")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
