"""Commands on hosts: started, watched and ended by an actor on each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from wheelmount.errors import HostError, WheelmountError
from wheelmount.hosts import engine, worker
from wheelmount.hosts.host import Host

CHUNK = 4 << 20
"""Bytes of output that travel in one message; Monarch's messages should stay below 16 MiB."""

GRACE = 3.0
"""Seconds between asking a command to end and ending it."""


@dataclass(frozen=True, slots=True)
class Command:
    """What a host is to do.

    Attributes:
        argv: program and arguments; a first item of ``python`` is the host's own Python, the one
            that runs wheelmount.
        script: text of a bash script, run with ``argv`` as its arguments instead.
        environment: variables to set.
        cwd: where; default the host's temporary directory.
    """

    argv: tuple[str, ...] = ()
    script: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it.

    Attributes:
        code: exit code; 128 and the signal's number where a signal ended it.
        stdout: what it wrote there.
        stderr: likewise.
        seconds: how long it took.
    """

    code: int
    stdout: bytes
    stderr: bytes
    seconds: float


class Runner(Actor):  # type: ignore[misc]
    """Runs one command at a time on its host."""

    def __init__(self, host: str, rank: int) -> None:
        self._environment = {"WHEELMOUNT_HOST": host, "WHEELMOUNT_RANK": str(rank)}
        socket = os.environ.get(worker.MARK)  # of a local host: what is there goes with it
        place = None if socket is None else str(Path(socket).parent)
        self._directory = Path(tempfile.mkdtemp(prefix="run-", dir=place))
        self._process: subprocess.Popen[bytes] | None = None

    @concurrent_endpoint
    async def run(self, command: Command) -> tuple[int, float]:
        """Run a command; gives its exit code and seconds. Its output is kept for ``output``."""
        return await asyncio.to_thread(self._run, command)

    @concurrent_endpoint
    async def output(self, stream: str, offset: int) -> bytes:
        """The next piece of ``stdout`` or ``stderr``; empty at the end."""
        with (self._directory / stream).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK)

    @concurrent_endpoint
    async def end(self) -> None:
        """End the command that runs, and forget all output."""
        await asyncio.to_thread(self._end)

    def _run(self, command: Command) -> tuple[int, float]:
        argv = list(command.argv)
        if command.script is not None:
            script = self._directory / "script"
            script.write_text(command.script)
            argv = ["bash", str(script), *argv]
        elif argv[0] == "python":
            argv[0] = sys.executable
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in engine.SWITCHES and not name.startswith(("HYPERACTOR_", "BOOTSTRAP_"))
        }
        started = time.monotonic()
        with (
            (self._directory / "stdout").open("wb") as stdout,
            (self._directory / "stderr").open("wb") as stderr,
        ):
            try:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=command.cwd or tempfile.gettempdir(),
                    env={**environment, **self._environment, **command.environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise HostError(
                    f"cannot run {argv[0]}: {error.strerror}", hint="is it installed on the host?"
                ) from None
            code = self._process.wait()
        return (128 - code if code < 0 else code), time.monotonic() - started

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE)
        shutil.rmtree(self._directory, ignore_errors=True)


class Runners:
    """Runs commands on hosts. A context manager; leaving it ends what still runs.

    Args:
        hosts: where.
        timeout: seconds within which a host must answer (not: finish).
    """

    def __init__(self, hosts: Sequence[Host], timeout: float) -> None:
        self._timeout = timeout
        self._hosts = hosts
        self._procs: dict[str, Any] = {}
        self._actors: dict[str, Any] = {}

    def __enter__(self) -> Runners:
        for rank, host in enumerate(self._hosts):
            # A process of its own: one that receives a mount's bytes must never wait for them.
            procs = host.mesh.spawn_procs({"procs": 1}, name="wheelmount_run")
            self._procs[host.name] = procs
            self._actors[host.name] = procs.spawn("runner", Runner, host.name, rank)
        return self

    def __exit__(self, *_exc: object) -> None:
        ends = {name: actor.end.call_one() for name, actor in self._actors.items()}
        for name, end in engine.gather(ends, self._timeout).items():
            if not isinstance(end, WheelmountError):  # a host that is lost has nothing to stop
                engine.stop_mesh(self._procs[name])

    def run(self, commands: Mapping[str, Command]) -> dict[str, Result | WheelmountError]:
        """Run a command on each host, all at once, and wait for them.

        Args:
            commands: by host.

        Returns:
            By host, what came of it, or why it could not be run or its host was lost.
        """
        calls = {name: self._actors[name].run.call_one(c) for name, c in commands.items()}
        ended = engine.gather(calls, None)
        return {name: self._result(name, end) for name, end in ended.items()}

    def _result(self, name: str, end: Any) -> Result | WheelmountError:
        if isinstance(end, WheelmountError):
            return end
        try:
            return Result(
                end[0], self._output(name, "stdout"), self._output(name, "stderr"), end[1]
            )
        except WheelmountError as error:
            return error

    def _output(self, name: str, stream: str) -> bytes:
        output = bytearray()
        while True:
            call = self._actors[name].output.call_one(stream, len(output))
            piece: bytes = engine.one(call, self._timeout)
            if not piece:
                return bytes(output)
            output += piece


def worst(results: Mapping[str, Result | WheelmountError]) -> int:
    """The exit code for all hosts together: 0 if all had 0, else the highest."""
    return max(r.exit_code if isinstance(r, WheelmountError) else r.code for r in results.values())
