"""How fast a wheelhouse is proven: ``python -m benchmarks.check DIRECTORY``, from the checkout.

``wheelmount check`` of a directory that was downloaded, whose contents were looked into then, and
``sha256sum`` of the same files, in turn in every round. Beside the time on the wall stands the
processor time of all their processes, which says more on a busy machine.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run took.

    Attributes:
        seconds: on the wall.
        cpu: seconds of all processors.
    """

    seconds: float
    cpu: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.check")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    wheels = sorted(given.directory.glob("*.whl"))
    command = [sys.executable, "-m", "wheelmount.cli.main", "check", "-q", str(given.directory)]
    samples = [(_run(command), _run(["sha256sum", *map(str, wheels)])) for _ in range(given.rounds)]
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 1e6:.0f} MB; medians of {given.rounds} rounds")
    for number, name in enumerate(("wheelmount check", "sha256sum")):
        costs = [sample[number] for sample in samples]
        seconds, cpu = median(c.seconds for c in costs), median(c.cpu for c in costs)
        every = " ".join(f"{c.seconds:.2f}" for c in costs)
        print(f"{name}: {seconds:.2f} s ({every}), {cpu:.2f} s of processors")
    ratios = " ".join(f"{ours.seconds / theirs.seconds:.2f}" for ours, theirs in samples)
    print(f"check / sha256sum, round by round: {ratios}")


def _run(command: Sequence[str]) -> Cost:
    used, started = _used(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return Cost(time.perf_counter() - started, _used() - used)


def _used() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
