"""How much processes grow by calls of Monarch, and by refreshes: ``python -m benchmarks.growth``.

What counts is the memory that is a process's own (``RssAnon``, proc(5)). First two processes that
only call each other by Monarch, in each round as often as a refresh does; then a client that
refreshes a mount of one small file, and the other processes of the mount.
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
"""Times that memory is printed, after as many rounds or refreshes each."""

KINDS = {"bootstrap_main": "agent", "hosts.process": "agent", "--guard": "worker"}
"""Processes of a mount, by a part of their command lines."""

OWN_CALLS, CALLS, ANSWERED = 2, 3, 5
"""Calls of a refresh: by the client of its own actor and of the agent, and by the agent."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.growth")
    parser.add_argument("--rounds", type=int, default=1000, help="of each (%(default)s)")
    parser.add_argument("--alone", choices=["monarch", "refreshes"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone == "monarch":
        asyncio.run(_call(given.rounds // STEPS))
    elif given.alone == "refreshes":
        _refresh(given.rounds // STEPS)
    else:
        for alone in "monarch", "refreshes":  # in a process of its own
            words = [f"--alone={alone}", f"--rounds={given.rounds}"]
            subprocess.run([sys.executable, "-m", "benchmarks.growth", *words], check=True)


def own(process: psutil.Process) -> int:
    """Memory of a process that it shares with no file and no other process, KiB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split(None, 1)[0])


def _print(what: str, count: int, before: dict[int, int]) -> None:
    """Print the memory of this process and its children, and what they grew by since ``before``."""
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        memory = own(process)
        grown = memory - before.setdefault(process.pid, memory)
        name = "client" if process == here else _kind(process)
        print(f"{count:6} {what}  {name:10} {memory / 1024:6.1f} MiB", end="")
        print(f"  {grown / max(1, count):6.2f} KiB each", flush=True)


def _kind(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    if "serve.server" in line:  # the supervisor starts the server as a copy of itself
        return "supervisor" if process.children() else "server"
    return next((kind for word, kind in KINDS.items() if word in line), "other")


async def _call(step: int) -> None:
    from monarch.actor import Actor, concurrent_endpoint, shutdown_context, this_host, this_proc

    class Partner(Actor):
        @concurrent_endpoint
        async def answer(self, _data: bytes) -> bytes:
            return bytes(100)

        @concurrent_endpoint
        async def ask(self, other: Partner, times: int) -> None:
            for _ in range(times):
                await other.answer.call_one(bytes(100))

    mine = this_proc().spawn("mine", Partner)
    other = this_host().spawn_procs(per_host={"processes": 1}).spawn("other", Partner)

    async def exchange() -> None:
        for _ in range(OWN_CALLS):
            await mine.answer.call_one(bytes(100))
        for _ in range(CALLS - 1):
            await other.answer.call_one(bytes(100))
        await other.ask.call_one(mine, ANSWERED)

    for _ in range(100):
        await exchange()
    before: dict[int, int] = {}
    for number in range(STEPS + 1):
        _print("rounds", number * step, before)
        for _ in range(step if number < STEPS else 0):
            await exchange()
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
