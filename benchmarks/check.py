"""How fast a wheelhouse is proven: ``python -m benchmarks.check DIRECTORY``, from the checkout.

``wheelmount check`` of a directory that was downloaded, whose contents were looked into then, and
``sha256sum`` of the same files, in turn in every round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median


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
        every = " ".join(f"{sample[number]:.2f}" for sample in samples)
        print(f"{name}: {median(sample[number] for sample in samples):.2f} s ({every})")
    ratios = " ".join(f"{ours / theirs:.2f}" for ours, theirs in samples)
    print(f"check / sha256sum, round by round: {ratios}")


def _run(command: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
