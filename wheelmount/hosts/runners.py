"""Commands on many hosts at once, as a client sees them."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from typing import Any

from wheelmount.errors import WheelmountError
from wheelmount.hosts import engine, handshake
from wheelmount.hosts.host import Host
from wheelmount.hosts.runner import PATIENCE, Command, Report, Runner

TAIL = 64 << 10
"""Bytes of a stream's end that a result keeps where the output went elsewhere."""

READ = 64 << 10
"""Bytes of input that are passed on at a time."""

Output = Callable[[str, str, bytes], None]
"""Told of output as it comes: host, ``stdout`` or ``stderr``, bytes."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a command.

    Attributes:
        code: exit code; 128 and the signal's number where a signal ended it.
        stdout: what it wrote there; the end of it where output was passed on as it came.
        stderr: likewise.
        seconds: how long it took.
    """

    code: int
    stdout: bytes
    stderr: bytes
    seconds: float


class Results(dict[str, Result | WheelmountError]):
    """By host, what came of its command, or why it could not be run or its host was lost.

    Attributes:
        shortfall: what could not be done beside the commands, such as files that did not arrive.
    """

    shortfall: WheelmountError | None = None


class Runners:
    """Runs commands on hosts. A context manager; leaving it ends what still runs.

    Args:
        hosts: where.
        timeout: seconds within which a host must answer (not: a command finish).
        actors: the hosts' runners by name, if they are there already; they stay.
    """

    def __init__(
        self, hosts: Sequence[Host], timeout: float, actors: Mapping[str, Any] | None = None
    ) -> None:
        self._timeout = timeout
        self._hosts = hosts
        self._procs: dict[str, Any] = {}
        self._greetings: dict[str, Any] = {}
        self.actors: dict[str, Any] = dict(actors or {})
        self._running: set[tuple[str, str]] = set()

    def __enter__(self) -> Runners:
        if not self.actors:
            for rank, host in enumerate(self._hosts):
                # Of its own: a process that receives a mount's bytes must never wait for them.
                procs = host.mesh.spawn_procs({"procs": 1}, name="wheelmount_run")
                self._procs[host.name] = procs
                self._greetings[host.name] = handshake.begin(procs)
                self.actors[host.name] = procs.spawn("runner", Runner, host.name, rank)
        return self

    def __exit__(self, *_exc: object) -> None:
        ends = {(name, key): self.actors[name].end.call_one(key) for name, key in self._running}
        engine.gather(ends, self._timeout)
        if self._procs:
            closes = {name: self.actors[name].close.call_one() for name in self._procs}
            closed = engine.gather(closes, self._timeout)
            # A host that is lost has nothing to stop.
            here = [name for name, end in closed.items() if not isinstance(end, WheelmountError)]
            engine.stop_meshes(*(self._procs[name] for name in here))

    def keep(self) -> None:
        """Leave the runners on their hosts when this is left."""
        self._procs = {}

    def run(
        self,
        commands: Mapping[str, Command],
        output: Output | None = None,
        stdin: RawIOBase | None = None,
    ) -> Results:
        """Run a command on each host, all at once, and wait for them.

        Args:
            commands: by host.
            output: told of output as it comes, from one thread; else the results hold all of it.
            stdin: passed on if there is one command; several get no input. Not buffered, as
                Python cannot end while a thread waits in a buffer.
        """
        fed = stdin if len(commands) == 1 else None
        results = Results()

        async def one(name: str, command: Command) -> None:
            try:
                results[name] = await self._run(name, command, output, fed)
            except WheelmountError as error:
                results[name] = error

        async def everything() -> None:
            await asyncio.gather(*(one(name, command) for name, command in commands.items()))

        engine.complete(everything())
        return Results({name: results[name] for name in commands})

    async def _run(
        self, name: str, command: Command, output: Output | None, stdin: RawIOBase | None
    ) -> Result:
        if (greeting := self._greetings.pop(name, None)) is not None:
            handshake.compare(name, await engine.answer(greeting, self._timeout))
        actor, key = self.actors[name], secrets.token_hex(8)
        self._running.add((name, key))
        start = actor.start.call_one(key, command, stdin is not None)
        await engine.answer(start, self._timeout)
        if stdin is not None:
            self._feed(actor, key, stdin)
        streams = {"stdout": bytearray(), "stderr": bytearray()}
        bound = self._timeout + PATIENCE
        while True:
            report: Report = await engine.answer(actor.report.call_one(key), bound)
            for stream, piece in (("stdout", report.stdout), ("stderr", report.stderr)):
                streams[stream] += piece
                if output is not None:
                    del streams[stream][:-TAIL]
                    if piece:
                        output(name, stream, piece)
            if report.code is not None:
                break
        await engine.answer(actor.end.call_one(key), self._timeout)
        self._running.discard((name, key))
        return Result(
            report.code, bytes(streams["stdout"]), bytes(streams["stderr"]), report.seconds
        )

    def _feed(self, actor: Any, key: str, stdin: RawIOBase) -> None:
        loop = asyncio.get_running_loop()

        async def give(data: bytes) -> bool:
            taken: bool = await engine.answer(actor.feed.call_one(key, data), None)
            return taken

        def pump() -> None:
            try:
                while True:
                    data = stdin.read(READ) or b""
                    if not asyncio.run_coroutine_threadsafe(give(data), loop).result() or not data:
                        return
            except (OSError, RuntimeError, WheelmountError, asyncio.CancelledError):
                return  # the command or this process has ended

        # A daemon: it may wait for ever for somebody to type.
        threading.Thread(target=pump, daemon=True).start()


def worst(results: Results) -> int:
    """The exit code for all hosts together: 0 if all had 0, else the highest.

    Where all had 0, that of the shortfall.
    """
    ends = results.values()
    code = max(r.exit_code if isinstance(r, WheelmountError) else r.code for r in ends)
    return code or (0 if results.shortfall is None else results.shortfall.exit_code)
