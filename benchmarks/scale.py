"""How a delivery scales, on paper, and how far paper is right: ``python -m benchmarks.scale``.

The model: a host has all bytes after the sum of

- ``start``: until the first block is asked for, whatever the size;
- ``size / rate``: each link carries every byte once in (``sent`` shows that the client's does too);
- ``size * work * processes / cores``: what processors do to a byte on the way, in the client and on
  each host; on a test-bed they share ``cores``, else every machine has its own;
- ``depth * hop``: the last block's way down the tree.

``start``, ``work`` and ``hop`` are fitted by least squares to deliveries on test-beds
(``tests/testbed``), and the error against each of these is printed. Then the projection.
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
from wheelmount.mount.topology import FANOUT, Topology

GIGABIT = 1e9 / 8
"""Bytes a second."""

CLIENT_THREADS = 2
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
    """Constants of this machine: seconds, seconds a byte, seconds a step."""

    start: float
    work: float
    hop: float

    def seconds(self, run: Run, cores: float | None) -> float:
        """Time of a delivery.

        Args:
            run: what is delivered.
            cores: that all share; None if every machine has its own.
        """
        return sum(
            constant * factor
            for constant, factor in zip(
                (self.start, self.work, self.hop), factors(run, cores), strict=True
            )
        ) + wire(run)


def wire(run: Run) -> float:
    """Seconds in which the links carry every byte once."""
    return run.size / run.rate


def factors(run: Run, cores: float | None) -> tuple[float, float, float]:
    """What the constants are multiplied by."""
    shared = (run.hosts + 1) / cores if cores else 1 / CLIENT_THREADS
    return 1.0, run.size * shared, float(depth(run.hosts, run.size))


def depth(hosts: int, size: int) -> int:
    """Steps from the client to the host that is farthest away."""
    names = [f"{number}" for number in range(hosts)]
    topology = Topology(names, size)
    return 1 + max(len(above) for name in names for above in topology.route(name))


def fit(runs: Sequence[Run], cores: float) -> Model:
    """Least squares of relative errors, none of the constants below zero."""
    best: tuple[float, Model] | None = None
    for used in range(1, 8):  # every choice of constants; the others are zero
        columns = [place for place in range(3) if used >> place & 1]
        rows = [[factors(run, cores)[place] / run.seconds for place in columns] for run in runs]
        wanted = [(run.seconds - wire(run)) / run.seconds for run in runs]
        found = _solve(rows, wanted)
        if found is None or min(found) < 0:
            continue
        constants = [0.0, 0.0, 0.0]
        for place, value in zip(columns, found, strict=True):
            constants[place] = value
        model = Model(*constants)
        error = sum((model.seconds(run, cores) / run.seconds - 1) ** 2 for run in runs)
        if best is None or error < best[0]:
            best = error, model
    if best is None:
        raise SystemExit("the deliveries fit no model")
    return best[1]


def _solve(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """Least squares by the normal equations; None if they have no single solution."""
    count = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(count)]
        + [sum(row[i] * value for row, value in zip(rows, wanted, strict=True))]
        for i in range(count)
    ]
    for i in range(count):
        pivot = max(range(i, count), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-30:
            return None
        for k in range(count):
            if k != i:
                share = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - share * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][count] / matrix[i][i] for i in range(count)]


def measured(hosts: Sequence[int], sizes: Sequence[int], rate: int, rounds: int) -> list[Run]:
    """Deliveries of one file on test-beds with links of so many Mbit/s."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as place:
        for size in sizes:
            source = make(Path(place) / f"file{size}", "file", size * MIB)
            for count in hosts:
                took = median(
                    once(source, count, f"{rate}mbit", "wheelmount") for _ in range(rounds)
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
    print(f"start {model.start:.2f} s, work {model.work * 1e9:.2f} s a GB, hop {model.hop:.3f} s")
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
