"""How much processes grow by calls of Monarch, and by refreshes: ``python -m benchmarks.growth``.

Looked at is the memory that is a process's own (``RssAnon``, proc(5)). First a program that does
nothing but call one actor in one other process, by Monarch alone; then a client that refreshes a
mount of one small file, and the other processes of the mount.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

STEPS = 5
"""Times that memory is printed, after as many calls or refreshes each."""

KINDS = {"bootstrap_main": "agent", "serve.server": "server", "serve.supervisor": "supervisor"}
"""Processes of a mount, by a word of their command lines."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.growth")
    parser.add_argument("--calls", type=int, default=10000, help="(%(default)s)")
    parser.add_argument("--refreshes", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--alone", choices=["calls", "refreshes"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone == "calls":
        asyncio.run(_call(given.calls // STEPS))
    elif given.alone == "refreshes":
        _refresh(given.refreshes // STEPS)
    else:
        for alone in "calls", "refreshes":  # in a process of its own
            words = [f"--calls={given.calls}", f"--refreshes={given.refreshes}"]
            command = [sys.executable, "-m", "benchmarks.growth", f"--alone={alone}", *words]
            subprocess.run(command, check=True)


def own(process: psutil.Process) -> int:
    """Memory of a process that it shares with no file and no other process, KiB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split(None, 1)[0])


def _print(what: str, count: int, before: dict[int, int]) -> None:
    """Print the memory of this process and its children, and what they grew by since ``before``."""
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        memory, line = own(process), " ".join(process.cmdline())
        kind = next((kind for word, kind in KINDS.items() if word in line), "other")
        grown = memory - before.setdefault(process.pid, memory)
        name = "client" if process == here else kind
        print(f"{count:6} {what}  {name:10} {memory / 1024:6.1f} MiB", end="")
        print(f"  {grown / max(1, count):6.2f} KiB each", flush=True)


async def _call(step: int) -> None:
    from monarch.actor import Actor, endpoint, shutdown_context, this_host

    class Silent(Actor):
        @endpoint
        async def call(self) -> None: ...

    silent = this_host().spawn_procs(per_host={"processes": 1}).spawn("silent", Silent)
    for _ in range(500):
        await silent.call.call_one()
    before: dict[int, int] = {}
    for number in range(STEPS + 1):
        _print("calls", number * step, before)
        for _ in range(step if number < STEPS else 0):
            await silent.call.call_one()
    await shutdown_context()


def _refresh(step: int) -> None:
    from wheelmount import remotemount
    from wheelmount.hosts import runtime
    from wheelmount.hosts.local import LocalHosts

    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as place:
        source = Path(place) / "source"
        source.mkdir()
        with (
            LocalHosts(1, namespaces=False) as hosts,
            remotemount(hosts, source, f"{place}/{{host}}") as mount,
        ):
            mount.wait()
            before: dict[int, int] = {}
            for number in range(-1, STEPS + 1):
                if number >= 0:
                    _print("refreshes", number * step, before)
                for which in range((step if number >= 0 else 100) if number < STEPS else 0):
                    (source / "file").write_text(f"{number} {which}")
                    mount.refresh()
    runtime.stop()


if __name__ == "__main__":
    main()
