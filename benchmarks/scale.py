"""What a delivery to many hosts takes, simulated: ``python -m benchmarks.scale PART``.

``check`` delivers to real hosts of a test-bed (``tests/testbed``), over links so slow that two
cores are enough for all, and compares the time with what the simulation says beforehand. ``tell``
simulates large clusters, ``plot`` draws what it found. The simulation runs wheelmount's own
receivers, relays, rings and trees (``tests.simulation.delivery``), with what the work of processors
costs by ``benchmarks.costs``; nothing is fitted. ``check`` needs root.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.delivery import make
from benchmarks.trees import MIB
from tests.simulation.delivery import Cluster, Job, Outcome, deliver
from tests.simulation.network import Costs
from tests.testbed import LOGIN, Lab
from tests.testbed.network import BURST
from tests.testbed.service import start_workers, workers_spec
from wheelmount.config import Settings

MBIT, GBIT = 1e6 / 8, 1e9 / 8
"""Bytes a second."""

CORES = 16
"""Of each machine of a cluster, for a delivery."""

BLOCKS = 64
"""Of a large delivery, that are simulated."""

PATH = "/mnt/tree"

CLIENT = """
import json, os, sys, time
from wheelmount import config, remotemount
from wheelmount.errors import WheelmountError
from wheelmount.hosts.spec import parse
spec, source, path, late, slow = sys.argv[1:]
hosts = parse(spec).make(config.load(), namespaces=False)
hosts.start()
added = {f"host{n}": float(seconds) for n, seconds in json.loads(late).items()}
mount = remotemount([host for host in hosts if host.name not in added], source, path)
mount.open()
opened = time.monotonic()
print(json.dumps({"opened": opened}), flush=True)
joined = {}
for host in hosts:
    if host.name in added:
        time.sleep(max(0.0, opened + added[host.name] - time.monotonic()))
        mount.add(host)
        joined[host.name] = time.monotonic() - opened
def whole():
    return [n for n, s in mount.status().items() if isinstance(s, dict) and s["held"] == s["size"]]
others = 0.0
if slow := json.loads(slow):
    while len(set(whole()) - set(slow)) < len(mount.hosts) - len(slow):
        time.sleep(0.25)
    others = time.monotonic() - opened
said = ""
try:
    mount.wait()
except WheelmountError as error:
    said = error.message
ended = time.monotonic()
print(json.dumps({"ended": ended, "joined": joined, "sent": mount.sent, "whole": whole(),
                  "others": others, "said": said}), flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Trial:
    """One delivery on a test-bed, to be compared with a simulated one.

    Attributes:
        name: of what is special about it.
        hosts: how many.
        size: MiB.
        rate: of each link, Mbit/s.
        slow: rates of other links, Mbit/s, by number of the host.
        killed: seconds after which a host is lost, by its number.
        late: seconds after which a host is added, by its number.
    """

    name: str
    hosts: int
    size: int
    rate: float
    slow: Mapping[int, float] = field(default_factory=dict)
    killed: Mapping[int, float] = field(default_factory=dict)
    late: Mapping[int, float] = field(default_factory=dict)

    def predicted(self, costs: Costs, joined: Mapping[str, float]) -> Outcome:
        """Simulate it.

        Args:
            costs: of the work of a processor.
            joined: seconds after which added hosts had begun, by name. That takes as long as a
                host's start, which is not simulated.
        """
        burst = float(BURST.removesuffix("kb")) * 1024
        cluster = Cluster(
            self.hosts, self.rate * MBIT, 100e-6, len(os.sched_getaffinity(0)), True, burst=burst,
            slow={number: rate * MBIT for number, rate in self.slow.items()},
        )  # fmt: skip
        late = {number: joined[f"host{number}"] for number in self.late}
        job = Job(self.size * MIB, killed=self.killed, late=late)
        return deliver(cluster, job, costs, chunks=16)


def measured(trial: Trial) -> dict[str, Any]:
    """Deliver on a test-bed; what its client said, with the seconds it took."""
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as place:
        source = make(Path(place) / "file", "file", trial.size * MIB)
        with Lab(trial.hosts, f"{trial.rate}mbit", [source.parent]) as lab:
            start_workers(lab)
            for number, rate in trial.slow.items():
                lab.shape(f"{rate}mbit", f"host{number}")
            late = json.dumps(trial.late)
            slow = json.dumps([f"host{number}" for number in trial.slow])
            command = [sys.executable, "-c", CLIENT, workers_spec(lab), source, PATH, late, slow]
            environment = {**os.environ, "WHEELMOUNT_START_TIMEOUT": "600"}
            client = lab.popen(LOGIN, command, env=environment, stdout=subprocess.PIPE, bufsize=0)
            try:
                lines = iter(client.stdout or ())
                opened = json.loads(next(lines))["opened"]
                for number, seconds in sorted(trial.killed.items(), key=lambda item: item[1]):
                    time.sleep(max(0.0, opened + seconds - time.monotonic()))
                    lab.kill(f"host{number}")
                found: dict[str, Any] = json.loads(next(lines))
            finally:
                client.kill()
                client.wait()
    expected = trial.hosts - len(trial.killed)
    if len(found["whole"]) < expected:
        raise SystemExit(f"{trial.name}: {found['said']}")
    return found | {"seconds": found["ended"] - opened}


def trials(hosts: list[int], size: int, rate: float) -> list[Trial]:
    """Deliveries to some numbers of hosts, and three with faults to eight."""
    alike = [Trial("", count, size, rate) for count in hosts]
    wire = size * MIB / (rate * MBIT)
    return [
        *alike,
        Trial("three killed", 8, size, rate, killed={1: wire / 4, 4: wire / 3, 6: wire / 2}),
        Trial("one at a tenth", 8, size, rate, slow={2: rate / 10}),
        Trial("one joins late", 8, size, rate, late={7: wire / 2}),
    ]


def check(given: argparse.Namespace, costs: Costs) -> None:
    """Print what deliveries take, and what the simulation says."""
    hosts = [int(count) for count in given.hosts.split(",") if count]
    found = []
    print(
        "hosts                    MiB  Mbit/s  measured  simulated  error  client sent", flush=True
    )
    for trial in trials(hosts, given.size, given.rate):
        if given.only is not None and trial.name != given.only:
            continue
        real = measured(trial)
        paper = trial.predicted(costs, real["joined"])
        error = paper.seconds / real["seconds"] - 1
        found.append(
            {"trial": asdict(trial), "measured": real["seconds"], "simulated": paper.seconds}
        )
        print(
            f"{trial.hosts:5} {trial.name:15} {trial.size:7} {trial.rate:7g} {real['seconds']:7.1f}"
            f" {paper.seconds:8.1f} s {error:+6.1%} {real['sent'] / trial.size / MIB:5.2f}"
            f" ({paper.egress / trial.size / MIB:.2f})",
            flush=True,
        )
        if trial.slow:
            fast = max(end for number, end in paper.hosts.items() if number not in trial.slow)
            print(f"      all others {real['others']:30.1f} {fast:8.1f} s", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


@dataclass(frozen=True)
class Case:
    """A large cluster, and what it is sent.

    Attributes:
        hosts: how many.
        gbit: of each link, Gbit/s.
        oversubscription: of racks of ``RACK`` hosts; 1: one switch for all.
        known: whether wheelmount knows the racks.
        gigabytes: that are sent.
        files: number of files.
    """

    hosts: int
    gbit: float
    oversubscription: float
    known: bool
    gigabytes: float
    files: int

    def simulated(self, costs: Costs, most: int = BLOCKS, **settings: Any) -> Outcome:
        """Simulate it, with some settings that are not the usual ones."""
        cluster = Cluster(
            self.hosts, self.gbit * GBIT, cores=CORES,
            rack=RACK if self.oversubscription > 1 else 0, known=self.known,
            oversubscription=self.oversubscription,
        )  # fmt: skip
        job = Job(self.gigabytes * 1e9, self.files, settings=Settings(**settings))
        return deliver(cluster, job, costs, most=most)


LARGE, MANY = (100.0, 1), (2.0, 100_000)
"""Gigabytes, and files."""

RACK = 32

COLORS = {10: "tab:blue", 100: "tab:orange", 400: "tab:green"}
"""Of rates, in the plot."""

SECONDS = 2, 5, 10, 20, 50, 100, 200, 500
"""That the plot names."""


TREES = {"large": LARGE, "many": MANY}

SWITCHES = {"one": (1, False), "unknown": (4, False), "known": (4, True)}
"""Oversubscription of racks, and whether they are known."""


def cases(given: argparse.Namespace) -> list[Case]:
    """All that are simulated."""
    return [
        Case(int(count), float(rate), *SWITCHES[switches], *TREES[tree])
        for tree in given.trees.split(",")
        for count in given.hosts.split(",")
        for rate in given.gbit.split(",")
        for switches in given.switches.split(",")
    ]


def tell(given: argparse.Namespace, costs: Costs) -> None:
    """Print what large clusters take."""
    print(" hosts  Gbit/s   switches   GB   files   seconds   wire  sent  crossed  client s  calls")
    found = []
    for case in cases(given):
        outcome = case.simulated(costs, given.blocks)
        size = case.gigabytes * 1e9
        found.append(
            {"case": asdict(case), **{k: v for k, v in vars(outcome).items() if k != "hosts"}}
        )
        switches = "one" if case.oversubscription == 1 else f"{case.oversubscription:g}:1"
        switches += " known" * case.known
        print(
            f"{case.hosts:6} {case.gbit:7g} {switches:>10} {case.gigabytes:5g} {case.files:7}"
            f" {outcome.seconds:8.1f} {size / case.gbit / GBIT:7.1f} {outcome.egress / size:5.2f}"
            f" {outcome.crossed / size / max(1, case.hosts / RACK):7.1f} {outcome.processor:8.1f}"
            f" {outcome.calls:8}",
            flush=True,
        )
        if given.json:
            given.json.write_text(json.dumps(found, indent=1))


def plot(given: argparse.Namespace) -> None:
    """Draw what ``tell`` found."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    found = [each for file in given.json for each in json.loads(file.read_text())]
    counts = sorted({each["case"]["hosts"] for each in found})
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 5), sharex=True, sharey=True)
    for axis, (gigabytes, files) in zip(axes, (LARGE, MANY), strict=True):
        for rate in (10, 100, 400):
            for over, known, line in ((1, False, "-"), (4, False, ":"), (4, True, "--")):
                wanted = {"gigabytes": gigabytes, "gbit": rate, "oversubscription": over}
                wanted["known"] = known
                points = [
                    (each["case"]["hosts"], each["seconds"])
                    for each in found
                    if wanted.items() <= each["case"].items()
                ]
                name = f"{rate} Gbit/s" + (f", racks {over}:1" if over > 1 else "")
                name += ", known" * known
                if points:
                    where = zip(*sorted(points), strict=True)
                    axis.plot(*where, line, marker="o", color=COLORS[rate], label=name)
        axis.set_title(f"{gigabytes:g} GB in {files:,} file{'s' * (files > 1)}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("hosts")
        axis.set_xticks(counts, [f"{count:,}" for count in counts])
        axis.set_yticks(SECONDS, [str(seconds) for seconds in SECONDS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.savefig(given.plot)


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser("python -m benchmarks.scale")
    parts = parser.add_subparsers(dest="part", required=True)
    real = parts.add_parser("check", help="compare with deliveries on test-beds")
    real.add_argument("--hosts", default="2,4,8,16,32,64", help="numbers (%(default)s)")
    real.add_argument("--size", type=int, default=32, help="MiB of the file (%(default)s)")
    real.add_argument("--rate", type=float, default=10, help="Mbit/s of a link (%(default)s)")
    real.add_argument("--only", help="one fault (three killed, …); empty: none")
    paper = parts.add_parser("tell", help="simulate large clusters")
    paper.add_argument("--hosts", default="64,1024,10000", help="numbers (%(default)s)")
    paper.add_argument("--gbit", default="10,100,400", help="of links, Gbit/s (%(default)s)")
    paper.add_argument("--trees", default=",".join(TREES), help="of bytes (%(default)s)")
    paper.add_argument("--switches", default=",".join(SWITCHES), help="and racks (%(default)s)")
    paper.add_argument("--blocks", type=int, default=BLOCKS, help="simulated (%(default)s)")
    for each in (real, paper):
        each.add_argument("--costs", type=Path, help="of benchmarks.costs; default: measured now")
        each.add_argument("--json", type=Path, help="write what is found")
    drawn = parts.add_parser("plot", help="draw what tell found")
    drawn.add_argument("json", type=Path, nargs="+", help="of tell")
    drawn.add_argument("plot", type=Path, help="to draw (.svg, .png)")
    given = parser.parse_args()
    if given.part == "plot":
        plot(given)
        return
    if given.costs:
        costs = Costs(**json.loads(given.costs.read_text()))
    else:
        from benchmarks.costs import measure

        costs = measure(rounds=3)
    (check if given.part == "check" else tell)(given, costs)
    sys.stdout.flush()
    os._exit(0)  # what Monarch has left to say is of no interest


if __name__ == "__main__":
    main()
