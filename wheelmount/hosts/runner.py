"""The part of a command's run that happens on its host: an actor that starts, watches, ends it."""

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from wheelmount.errors import HostError
from wheelmount.hosts import engine, process, worker
from wheelmount.hosts.actor import Actor, concurrent_endpoint

CHUNK = 4 << 20
"""Bytes of output that travel in one message; Monarch's messages should stay below 16 MiB."""

GRACE = 3.0
"""Seconds between asking a command to end and ending it."""

PATIENCE = 5.0
"""Seconds that a question for more output waits for some: few questions, also from 1,000 hosts."""

LEASE = 60.0
"""Seconds that a command runs on when nobody asks for its output: its client is gone."""

GLANCE = 0.02
"""Seconds between looks at whether there is more output."""


@dataclass(frozen=True, slots=True)
class Command:
    """What a host is to do.

    Attributes:
        argv: program and arguments; a first item of ``python`` is the host's own Python, the one
            that runs wheelmount.
        script: text of a bash script, run with ``argv`` as its arguments instead.
        note: what the program is to read from a private file, whose path is the last argument;
            every user of the host can read the arguments themselves.
        environment: variables to set.
        cwd: where; default the host's temporary directory, for ``python`` the root.
    """

    argv: tuple[str, ...] = ()
    script: bytes | None = None
    note: bytes | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """More of a command's output.

    Attributes:
        stdout: from where the last report ended.
        stderr: likewise.
        code: exit code if it has ended and this is the end of its output, else None; 128 and the
            signal's number where a signal ended it.
        seconds: since its start, or how long it took.
    """

    stdout: bytes
    stderr: bytes
    code: int | None
    seconds: float


class _Run:
    """One command, and the files that its output goes to."""

    def __init__(
        self, command: Command, directory: Path, environment: Mapping[str, str], fed: bool
    ) -> None:
        directory.mkdir()
        self._directory = directory
        self._offsets = {"stdout": 0, "stderr": 0}
        self._started = self.asked = time.monotonic()
        self._seconds: float | None = None
        argv, cwd = list(command.argv), command.cwd
        if command.script is not None:
            script = directory / "script"
            script.write_bytes(command.script)
            argv = ["bash", str(script), *argv]
        elif argv[0] == "python":
            argv[0] = sys.executable
            cwd = cwd or "/"  # Python imports what lies in the working directory
        if command.note is not None:
            note = directory / "note"
            note.write_bytes(command.note)
            argv.append(str(note))
        with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as err:
            try:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE if fed else subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    cwd=cwd or tempfile.gettempdir(),
                    env={**environment, **command.environment},
                    start_new_session=True,
                )
            except OSError as error:
                shutil.rmtree(directory, ignore_errors=True)
                raise HostError(
                    f"cannot run {argv[0]}: {error.strerror}", hint="is it installed on the host?"
                ) from None

    async def report(self) -> Report:
        deadline = time.monotonic() + PATIENCE
        while True:
            self.asked = time.monotonic()
            code = self._process.poll()
            if code is not None and self._seconds is None:
                self._seconds = time.monotonic() - self._started
            stdout, stderr = self._more("stdout"), self._more("stderr")
            more = bool(stdout or stderr)
            if more or code is not None or time.monotonic() > deadline:
                if more or code is None:
                    return Report(stdout, stderr, None, time.monotonic() - self._started)
                number = 128 - code if code < 0 else code
                return Report(stdout, stderr, number, self._seconds or 0)
            await asyncio.sleep(GLANCE)

    def _more(self, stream: str) -> bytes:
        with (self._directory / stream).open("rb") as file:
            file.seek(self._offsets[stream])
            piece = file.read(CHUNK // 2)
        self._offsets[stream] += len(piece)
        return piece

    def feed(self, data: bytes) -> bool:
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return False
        try:
            pipe.write(data)
            pipe.flush()
            if not data:
                pipe.close()
        except OSError:  # it does not want any
            with contextlib.suppress(OSError):
                pipe.close()
            return False
        return True

    def end(self) -> None:
        if self._process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE)
                    break
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class Runner(Actor):  # type: ignore[misc]
    """Runs commands on its host."""

    def __init__(self, host: str, rank: int) -> None:
        process.settle()
        self._environment = {
            name: value
            for name, value in process.environment().items()
            if name not in engine.SWITCHES and not name.startswith(("HYPERACTOR_", "BOOTSTRAP_"))
        }
        self._environment |= {"WHEELMOUNT_HOST": host, "WHEELMOUNT_RANK": str(rank)}
        mark = os.environ.get(worker.MARK)  # what is in its directory goes with the host
        place = None if mark is None else str(Path(mark).parent)
        self._directory = Path(tempfile.mkdtemp(prefix="run-", dir=place))
        self._runs: dict[str, _Run] = {}
        self._watch: asyncio.Task[None] | None = None

    @concurrent_endpoint
    async def start(self, key: str, command: Command, fed: bool) -> None:
        """Start a command, to be known by ``key``. It ends when nobody asks for its output.

        Args:
            key: chosen by the client.
            command: what to do.
            fed: whether ``feed`` is to follow; else it gets no input.
        """
        self._runs[key] = await asyncio.to_thread(
            _Run, command, self._directory / key, self._environment, fed
        )
        if self._watch is None:
            self._watch = asyncio.create_task(self._end_abandoned())

    @concurrent_endpoint
    async def report(self, key: str) -> Report:
        """More of its output; waits for some, for a while."""
        return await self._runs[key].report()

    @concurrent_endpoint
    async def feed(self, key: str, data: bytes) -> bool:
        """Give it input, empty for the end of it; gives whether it takes more."""
        return await asyncio.to_thread(self._runs[key].feed, data)

    @concurrent_endpoint
    async def end(self, key: str) -> None:
        """End a command if it runs, and forget its output."""
        if (run := self._runs.pop(key, None)) is not None:
            await asyncio.to_thread(run.end)

    @concurrent_endpoint
    async def quit(self) -> None:
        """End this process, soon; for a client that did not start it."""
        engine.quit_soon()

    @concurrent_endpoint
    async def close(self) -> None:
        """End all commands; none may be started any more."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(asyncio.to_thread(run.end) for run in self._runs.values()))
        self._runs.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _end_abandoned(self) -> None:
        while True:
            await asyncio.sleep(LEASE / 10)
            for key, run in list(self._runs.items()):
                if time.monotonic() - run.asked > LEASE:
                    del self._runs[key]
                    await asyncio.to_thread(run.end)
