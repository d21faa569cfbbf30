"""How fast a mount of an ordinary user's is on a Slurm node: ``python -m benchmarks.rootless``.

Run as root, which makes a test-bed with a user and a real Slurm. Each round takes every contender
in turn: a session of the user's on one node, whose job mounts the tree; a script that
``wheelmount run`` starts there reads the mount cold, warm, and then the tree itself, which lies on
tmpfs. Figures are multiples of the speed of tmpfs in the same round: medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks import measure, trees
from benchmarks.measure import METRICS
from benchmarks.peers import Backend
from benchmarks.system import MEMORY, BenchmarkError
from benchmarks.trees import Sizes, Trees
from tests.hosts.user import HOME, as_user, make_user
from tests.testbed import LOGIN, Lab
from tests.testbed.slurm import start_slurm

CONTENDERS = {"own namespace": "auto", "devfuse": "devfuse"}
"""The setting ``adapter`` of each contender."""

MOUNT = f"{HOME}/tree"

Figures = dict[str, dict[str, float]]
"""Speeds by place and metric; seconds of an import."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.rootless")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small tree")
    parser.add_argument("--import", dest="modules", action="append", metavar="MODULE")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(read(**json.loads(given.inside))))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing is left behind
    folder = Path(tempfile.mkdtemp(prefix="wm-bench-", dir=MEMORY))
    try:
        folder.chmod(0o755)
        sizes = trees.QUICK if given.quick else Sizes()
        made = trees.make(folder, sizes, given.modules or ["numpy"], None)
        with Lab(1, shared=[folder]) as lab:
            for host in lab.names:
                make_user(lab, host)
            start_slurm(lab)
            rounds: list[dict[str, Figures]] = []
            for number in range(given.rounds):
                rounds.append({name: take(lab, name, made, sizes) for name in _order(number)})
                show(rounds)
    finally:
        shutil.rmtree(folder)


def _order(number: int) -> list[str]:
    names = list(CONTENDERS)
    first = number % len(names)
    return names[first:] + names[:first]


def take(lab: Lab, name: str, made: Trees, sizes: Sizes) -> Figures:
    """Have a session of the user's mount the tree, and read it in a script there."""
    inside = {
        "main": str(made.main),
        "names": str(made.names),
        "modules": made.modules,
        "sizes": dataclasses.asdict(sizes),
        "held": made.held,
    }
    words = [sys.executable, "-m", "benchmarks.rootless", "--inside", json.dumps(inside)]
    script = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"
    adapter = CONTENDERS[name]
    _call(lab, adapter, "up", "--hosts", "slurm:1", "--quiet")
    try:
        _call(lab, adapter, "mount", made.main, MOUNT, "--quiet")
        said = _call(
            lab, adapter, "run", "--mntpoint", MOUNT, "--quiet", made.main, "-", given=script
        )
    finally:
        _call(lab, adapter, "down", "--quiet")
    print(f"{name}: done", file=sys.stderr, flush=True)
    found: Figures = json.loads(said.splitlines()[-1])
    return found


def _call(lab: Lab, adapter: str, *words: str | Path, given: str = "") -> str:
    own = ["env", f"WHEELMOUNT_ADAPTER={adapter}", sys.executable, "-m", "wheelmount.cli.main"]
    done = lab.run(LOGIN, as_user(*own, *words), stdin=None, input=given, timeout=400)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(map(str, words))}: {done.stderr or done.stdout}")
    return done.stdout


def read(main: str, names: str, modules: list[str], sizes: dict[str, int], held: int) -> Figures:
    """Read the mount and the tree itself; on a node, as the user."""
    made = Trees(Path(main), Path(), Path(names), tuple(modules), "", held)
    backend, wanted = Backend(Path(), Path()), Sizes(**sizes)

    def taken(root: str, *, cold: bool = False) -> dict[str, float]:
        samples = measure.one_pass(backend, Path(root), made, wanted, cold=cold)
        return {metric: sample() for metric, sample in samples}

    taken(main)  # after it, programs that measure are as warm for the first as for the last
    return {"cold": taken(MOUNT, cold=True), "warm": taken(MOUNT), "tmpfs": taken(main)}


def show(rounds: list[dict[str, Figures]]) -> None:
    """Print a table for each temperature, of the rounds until now."""
    print(f"rounds: {len(rounds)}")
    for temperature in ("cold", "warm"):
        print("| " + " | ".join([temperature, *(metric.name for metric in METRICS)]) + " |")
        for name in CONTENDERS:
            ratios: dict[str, list[float]] = defaultdict(list)
            for figures in (each[name] for each in rounds):
                for metric in METRICS:
                    if metric.name in figures["tmpfs"]:
                        found, native = figures[temperature][metric.name], figures["tmpfs"]
                        ratio = found / native[metric.name]
                        ratios[metric.name].append(ratio if metric.rate else 1 / ratio)
            cells = [f"{median(each):.2f}" for each in ratios.values()]
            print("| " + " | ".join([name, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
