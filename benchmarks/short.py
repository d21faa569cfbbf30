"""What the shortest commands cost: ``python -m benchmarks.short``, from the checkout.

In turns: Monarch alone (hosts of this machine, one actor on each, one call, shutdown), ``wheelmount
run`` of a script of one line on hosts of its own, and the same in a session. Each is measured to
its first line and to its end, with the processor's seconds of the client and of all its processes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

RUN = [sys.executable, "-m", "wheelmount.cli.main"]
MONARCH = [sys.executable, "-m", "benchmarks.short", "--floor"]
SCRIPT = b"echo here\n"

SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER (prctl(2)): what a killed process leaves becomes a child of this one."""


class Times(NamedTuple):
    """Seconds of one command: to the first line, to the end, and of the processor.

    The client's own processor time is without its hosts; ``all`` is of all processes that have
    ended with the command.
    """

    first: float
    end: float
    client: float
    all: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.short")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--floor", type=int, help="be Monarch's part, with this number of hosts")
    given = parser.parse_args()
    if given.floor:
        _floor(given.floor)
        return
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all modules
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as place:
        os.environ["WHEELMOUNT_RUNTIME_DIR"] = f"{place}/runtime"
        source = Path(place) / "source"
        source.mkdir()
        (source / "file").write_text("content\n")
        run = [*RUN, "run", "--quiet", "--live"]
        contenders: dict[str, list[str]] = {}
        for count in (1, 2):
            name, hosts = f"local:{count}", f"--hosts=local:{count}"
            contenders[f"Monarch, {name}"] = [*MONARCH, str(count)]
            contenders[f"run, {name}"] = [*run, hosts, str(source), "-"]
        contenders["run, session of local:2"] = [*run, str(source), "-"]
        found: dict[str, list[Times]] = {name: [] for name in contenders}
        for _ in range(given.rounds + 1):  # the first makes bytecode, and is left out
            for name, command in contenders.items():
                session = "session" in name
                if session:
                    subprocess.run([*RUN, "up", "--quiet", "--hosts", "local:2"], check=True)
                    _timed(command, ends=False)  # mounts
                found[name].append(_timed(command, ends=not session))
                if session:
                    subprocess.run([*RUN, "down", "--quiet"], check=True)
                    _await_all()
        print("| | first line | end | client's processor | all processors | end, Monarch = 1 |")
        print("|---|---|---|---|---|---|")
        for name, rounds in found.items():
            floor = found[f"Monarch, local:{'1' if name.endswith('1') else '2'}"]
            ratio = median(a.end / b.end for a, b in zip(rounds[1:], floor[1:], strict=True))
            columns = [f"{median(column):.2f}" for column in zip(*rounds[1:], strict=True)]
            print(f"| {' | '.join([name, *columns, f'{ratio:.2f}'])} |")


def _timed(command: Sequence[str], *, ends: bool) -> Times:
    """Run a command; ``ends``: all that it starts ends with it."""
    before = _children()
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise SystemExit("there are no pipes")
        process.stdin.write(SCRIPT)
        process.stdin.close()
        line = process.stdout.readline()
        first = time.perf_counter() - started
        process.stdout.read()
        client = _seconds(process.pid)
        _, status, _ = os.wait4(process.pid, 0)
        end = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not line:
        raise SystemExit(f"{command} ended with code {process.returncode}")
    if ends:
        _await_all()
    return Times(first, end, client, _children() - before)


def _seconds(pid: int) -> float:
    """Return the processor's seconds of a process that has closed its output, not of others."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie, whose times are final
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _await_all() -> None:
    """Wait for everything that a command left to its end."""
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _floor(count: int) -> None:
    """Start hosts as Monarch alone does, call one actor on each, and shut down."""
    from monarch.actor import Actor, endpoint, shutdown_context
    from monarch.job import ProcessJob

    class Greeter(Actor):  # type: ignore[misc]
        @endpoint  # type: ignore[misc]
        async def greet(self) -> str:
            return "here"

    hosts = ProcessJob({"hosts": count}).state(cached_path=None).hosts
    greeter = hosts.spawn_procs({"procs": 1}).spawn("greeter", Greeter)
    for _, answer in greeter.greet.call().get().items():
        print(answer, flush=True)
    hosts.shutdown().get()
    shutdown_context().get()


if __name__ == "__main__":
    main()
