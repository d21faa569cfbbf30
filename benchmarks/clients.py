"""What each further host costs the client: ``python -m benchmarks.clients``.

The client is wheelmount's own. The hosts are stood in for, as so many have no room on one machine:

- Each is reached over a connection of its own, but these lead to ``WORKERS`` workers.
- The agents of many hosts share a process. What the client takes to start a process is measured by
  itself.
- An agent is one but for the mount: it keeps the files in a directory, and no process serves them
  (``benchmarks.bare_agent``).

All of them share this machine's processors, so the seconds that a step takes say nothing of a
cluster. The client's processor time and memory do. What it takes to ask whether hosts run grows
with time, so it is measured by itself as well, and left out of the steps. A straight line through
the figures of all numbers of hosts is drawn on to ``PROJECTED`` hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import linear_regression, median
from typing import Any
from unittest import mock

import psutil

from benchmarks.many import FOLDER
from wheelmount import config, remotemount
from wheelmount.config import Settings
from wheelmount.hosts import runtime
from wheelmount.hosts.host import Host, answers
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client.agents import Agents

WORKERS = 2

PROCESSES = 8
"""That the agents share."""

PROJECTED = 1024

REST = 6.0
"""Seconds in which nothing happens."""

PATIENCE = 600.0
"""Seconds for the start of all processes."""

NEVER = 36_000.0
"""Seconds until Monarch asks whether hosts run, where that is not to count."""

PATIENT = "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE", "HYPERACTOR_HOST_SPAWN_READY_TIMEOUT"
"""Switches of Monarch for that time."""

START, ASK = "start a process", "ask whether it runs"
STEPS = "reach", "open", "deliver", "status", "refresh nothing", "refresh one file", "close"


class SharedProcess:
    """As much of a host's process as agents need; ends its own actors only.

    Args:
        process: the process, a Monarch ``ProcMesh``.
    """

    def __init__(self, process: Any) -> None:
        self._process = process
        self._actors: list[Any] = []

    def spawn(self, *arguments: Any) -> Any:
        """Start an actor."""
        self._actors.append(self._process.spawn(*arguments))
        return self._actors[-1]

    def stop(self) -> Any:
        """End the agent; the others live as long as the process."""
        return self._actors[-1].stop()


class SharedHost:
    """As much of a mesh of one host as a mount needs.

    Args:
        process: the process that stands for the one that the mount starts there.
    """

    def __init__(self, process: Any) -> None:
        self._process = process

    def spawn_procs(self, *_arguments: Any, **_named: Any) -> SharedProcess:
        """Return the process."""
        return SharedProcess(self._process)


class Meter:
    """Measures steps of this process.

    Attributes:
        found: seconds, seconds of processors, and resident MiB at the end, of each time by step.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[float, float, float]]] = {}

    def take(self, name: str, step: Callable[[], object]) -> None:
        """Measure one step."""
        began, used = time.perf_counter(), time.process_time()
        step()
        used, took = time.process_time() - used, time.perf_counter() - began
        resident = psutil.Process().memory_info().rss / (1 << 20)
        self.found.setdefault(name, []).append((took, used, resident))

    def medians(self) -> dict[str, list[float]]:
        """Seconds, seconds of processors, and MiB, of each step."""
        return {
            name: [median(column) for column in zip(*each, strict=True)]
            for name, each in self.found.items()
        }


def asking(count: int) -> float:
    """Measure seconds of a processor to ask one host whether all that a mount started there runs.

    Args:
        count: of hosts, each with an agent in a process of its own.
    """
    with LocalHosts(1, config.load(), namespaces=False) as workers:
        runtime.ask_every(1)
        hosts = [Host(f"host{n}", runtime.attach(workers.addresses[0])) for n in range(count)]
        runtime.raise_first(answers(hosts, PATIENCE))
        agents = Agents("asked", replace(config.load(), start_timeout=PATIENCE))
        agents.spawn(hosts)
        agents.greet()
        runtime.raise_first(agents.call(lambda agent: agent.view.call_one()))
        used = time.process_time()
        time.sleep(REST)
        return (time.process_time() - used) / REST / count


def measure(count: int, files: int, rounds: int, settings: Settings) -> dict[str, list[float]]:
    """Measure all steps with a number of hosts, in this process.

    Args:
        count: of hosts.
        files: in the mounted tree, of 200 bytes each.
        rounds: of the steps that can be repeated.
        settings: of the mount.
    """
    from benchmarks.bare_agent import BareAgent

    runtime.start()
    runtime.ask_every(NEVER)
    meter = Meter()
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as place:
        source = Path(place) / "source"
        for number in range(files):
            path = source / f"{number // FOLDER}" / f"{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(200))
        with LocalHosts(WORKERS, settings, namespaces=False) as workers:
            addresses = workers.addresses
            reached: list[Host] = []

            def reach() -> None:
                for number in range(count):
                    mesh = runtime.attach(addresses[number % WORKERS])
                    reached.append(Host(f"host{number}", mesh))
                runtime.raise_first(answers(reached, PATIENCE))

            meter.take("reach", reach)
            processes: list[Any] = []

            def start() -> None:
                for host in reached[:PROCESSES]:
                    processes.append(host.mesh.spawn_procs({"procs": 1}, name="wheelmount_shared"))
                ready = {number: each.initialized for number, each in enumerate(processes)}
                runtime.raise_first(runtime.gather(ready, PATIENCE))

            meter.take(START, start)
            hosts = [
                Host(host.name, SharedHost(processes[number % len(processes)]))
                for number, host in enumerate(reached)
            ]
            mount = remotemount(hosts, source, f"{place}/{{host}}", settings=settings)
            with mock.patch("wheelmount.mount.host.agent.Agent", BareAgent):
                meter.take("open", mount.open)
            meter.take("deliver", mount.wait)
            for number in range(rounds):
                meter.take("status", lambda: runtime.raise_first(mount.status()))
                meter.take("refresh nothing", mount.refresh)
                (source / "0" / "0").write_text(f"changed {number}")
                meter.take("refresh one file", mount.refresh)
            meter.take("close", mount.close)
    found = meter.medians()
    found[START] = [found[START][0], found[START][1] / len(processes), found[START][2]]
    return found


def main() -> None:
    """Measure each number of hosts in a process of its own, and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.clients")
    parser.add_argument("--hosts", default="16,64,128,256", help="numbers (%(default)s)")
    parser.add_argument("--files", type=int, default=1000, help="of the tree (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write what is found")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone is not None:
        runtime.own_process()
        if given.alone:
            settings = replace(config.load(), start_timeout=PATIENCE, fetch_timeout=PATIENCE)
            found: Any = measure(given.alone, given.files, given.rounds, settings)
        else:
            found = asking(PROCESSES)
        print(json.dumps(found), flush=True)
        os._exit(0)  # what Monarch has left to say is of no interest
    print(f"{given.files:,} files of 200 bytes; the client's seconds, its processor time, and MiB")
    asked = _alone(0, given)
    measured = {}
    for count in map(int, given.hosts.split(",")):
        measured[count] = _alone(count, given)
        _print(count, measured[count])
        if given.json:
            given.json.write_text(json.dumps({ASK: asked, "hosts": measured}, indent=1))
    _project(measured, asked)


def _alone(count: int, given: argparse.Namespace) -> Any:
    words = [f"--alone={count}", f"--files={given.files}", f"--rounds={given.rounds}"]
    command = [sys.executable, "-m", "benchmarks.clients", *words]
    patient = dict.fromkeys(PATIENT, f"{PATIENCE:.0f}s")
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | patient)
    return json.loads(done.stdout)


def _print(count: int, found: dict[str, list[float]]) -> None:
    print(f"{count} hosts")
    for step in STEPS:
        took, used, resident = found[step]
        each = used / count * 1e3
        print(f"  {step:16} {took:7.2f} s  {used:7.3f} s, {each:6.2f} ms a host", end="")
        print(f" {resident:7.0f} MiB")
    print(f"  {START:16} {'':9}  {found[START][1] * 1e3:18.2f} ms each", flush=True)


def _project(measured: dict[int, dict[str, list[float]]], asked: float) -> None:
    """Print what follows for more hosts."""
    start = median(found[START][1] for found in measured.values())
    every = max(1.0, PROJECTED / runtime.AT_ONCE)
    print(f"to ask a host: {asked * 1e3:.2f} ms; of {PROJECTED} hosts, each is asked", end=" ")
    print(f"every {every:.0f} s, which is {asked * PROJECTED / every:.2f} of a processor")
    if len(measured) < 2:
        return
    print(f"not measured, but by a straight line through these, {PROJECTED} hosts")
    for step in STEPS:
        line = linear_regression(list(measured), [each[step][1] for each in measured.values()])
        slope, most = line.slope, line.intercept + line.slope * PROJECTED
        if step == "open":
            slope, most = slope + start, most + start * PROJECTED
        print(f"  {step:16} {most:7.2f} s of a processor, {slope * 1e3:6.2f} ms for each more host")
    line = linear_regression(list(measured), [each["close"][2] for each in measured.values()])
    print(f"  {'memory':16} {line.intercept + line.slope * PROJECTED:7.0f} MiB")


if __name__ == "__main__":
    main()
