"""The part of a command's run that happens on its host: an actor that starts, watches, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from wheelmount.config import Settings
from wheelmount.errors import HostError, OvertimeError
from wheelmount.hosts import collection, conduit, process, runtime, sockets, worker
from wheelmount.hosts.actor import Actor, concurrent_endpoint
from wheelmount.hosts.sockets import Entrance, Ticket

log = logging.getLogger("wheelmount")

CHUNK = 2 << 20
"""Bytes of a stream that travel in one message; Monarch's messages should stay below 16 MiB."""


GRACE = 3.0
"""Seconds between asking a command to end and ending it."""

REPORT_WAIT = 5.0
"""Seconds that a question for more output waits for some: few questions, also from 1,000 hosts."""

LEASE = 60.0
"""Seconds that a command runs on of which its client does not say that it still wants it."""

POLL_INTERVAL = 0.02
"""Seconds between looks at whether there is more output."""

PAUSE = 0.2
"""Seconds between looks at whether all that is to end has ended, at most."""

MARK = "WHEELMOUNT_RUN"
"""Variable by which processes of a command are recognized."""


@dataclass(frozen=True, slots=True)
class Command:
    """What a host is to do.

    Attributes:
        argv: program and arguments; a first item of ``python`` is the host's own Python, the one
            that runs wheelmount.
        script: text of a script, run with ``argv`` as its arguments instead.
        interpreter: the program that runs the script.
        note: what the program is to read from a private file, whose path is the last argument;
            every user of the host can read the arguments themselves.
        environment: variables to set.
        cwd: where; default the host's temporary directory, for ``python`` the root.
        timeout: seconds after which it is ended with all that it started; None for no bound. Its
            exit code is that of ``OvertimeError`` then, and the reason the last line of its
            standard error.
        collect: what it leaves that is to be brought back when it has ended: a path, see
            ``collection``; None for nothing.
    """

    argv: tuple[str, ...] = ()
    script: bytes | None = None
    interpreter: tuple[str, ...] = ("bash",)
    note: bytes | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    timeout: float | None = None
    collect: str | None = None


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
    """One command, and the pipes that it writes to and reads from.

    Pipes, so that it waits with its next output until the client has room for it.
    """

    def __init__(
        self,
        command: Command,
        directory: Path,
        environment: Mapping[str, str],
        fed: bool,
        lent: Mapping[str, int],
    ) -> None:
        directory.mkdir()
        self._directory = directory
        self._started = self.asked = time.monotonic()
        self._seconds: float | None = None
        self._outputs: dict[str, int] = {}
        self._input = -1
        self._connections: set[socket.socket] = set()
        self._condition = threading.Condition()
        self._ending = False
        self._overtime: threading.Event | None = None
        self._reason = b""
        self._mark = secrets.token_hex(16)
        argv, cwd = list(command.argv), command.cwd
        if command.script is not None:
            script = directory / "script"
            script.write_bytes(command.script)
            argv = [*command.interpreter, str(script), *argv]
        elif argv[0] == "python":
            argv[0] = sys.executable
            cwd = cwd or "/"  # Python would import modules of the working directory
        self.place = cwd or tempfile.gettempdir(), str(directory / "output")
        if command.collect is not None:
            (directory / "output").mkdir(mode=0o700)
            environment = {**environment, collection.VARIABLE: self.place[1]}
        if command.note is not None:
            note = directory / "note"
            note.write_bytes(command.note)
            argv.append(str(note))
        theirs = {}
        try:
            for stream in ("stdout", "stderr"):
                if stream not in lent:
                    self._outputs[stream], theirs[stream] = conduit.pipe()
            if fed:
                theirs["stdin"], self._input = conduit.pipe()
            for ours in (*self._outputs.values(), *([self._input] if fed else ())):
                os.set_blocking(ours, False)
            given = {**theirs, **lent}
            self._process = subprocess.Popen(
                argv,
                stdin=given.get("stdin", subprocess.DEVNULL),
                stdout=given["stdout"],
                stderr=given["stderr"],
                cwd=self.place[0],
                env={**environment, **command.environment, MARK: self._mark},
                start_new_session=True,
            )
        except OSError as error:
            self._close()
            if cwd is not None and error.filename == cwd:
                raise HostError(
                    f"cannot run in {cwd}: {error.strerror}", hint="name a directory of the host"
                ) from None
            raise HostError(
                f"cannot run {argv[0]}: {error.strerror}", hint="is it installed on the host?"
            ) from None
        finally:
            for descriptor in theirs.values():
                os.close(descriptor)
        self._timer = threading.Timer(command.timeout or 0, self._expire, [command.timeout])
        self._timer.daemon = True
        if command.timeout is not None:
            self._timer.start()

    def _expire(self, timeout: float) -> None:
        """End it, as its time has run out."""
        if self._process.poll() is not None:
            return
        ended = self._overtime = threading.Event()
        self._reason = f"error: the command was ended: it took longer than {timeout:g} s\n".encode()
        try:
            self._kill()
        finally:
            ended.set()

    def _code(self) -> int | None:
        """Its exit code, as soon as it has ended, and all of it where its time has run out."""
        code = self._process.poll()
        if code is None or self._overtime is None:
            return 128 - code if code is not None and code < 0 else code
        return OvertimeError.exit_code if self._overtime.is_set() else None

    async def report(self, limit: int) -> Report:
        deadline = time.monotonic() + REPORT_WAIT
        while True:
            self.asked = time.monotonic()
            code = self._code()
            if code is not None and self._seconds is None:
                self._seconds = time.monotonic() - self._started
            stdout, stderr = self._more("stdout", limit), self._more("stderr", limit)
            more = bool(stdout or stderr)
            if more or code is not None or time.monotonic() > deadline:
                if more or code is None:
                    return Report(stdout, stderr, None, time.monotonic() - self._started)
                return Report(stdout, stderr, code, self._seconds or 0)
            await _ready([each for each in self._outputs.values() if each >= 0])

    def _more(self, stream: str, limit: int) -> bytes:
        found, size = [], 0
        while self._outputs.get(stream, -1) >= 0 and size < limit:
            try:
                piece = os.read(self._outputs[stream], limit - size)
            except BlockingIOError:
                break
            if not piece:
                os.close(self._outputs[stream])
                self._outputs[stream] = -1
            found.append(piece)
            size += len(piece)
        if stream == "stderr" and not size and self._code() is not None:
            found, self._reason = [self._reason], b""
        return found[0] if len(found) == 1 else b"".join(found)

    async def feed(self, data: bytes) -> bool:
        rest = memoryview(data)
        while self._input >= 0:
            try:
                rest = rest[os.write(self._input, rest) :] if rest else rest
            except BlockingIOError:
                if self._process.poll() is not None:  # who has its input now wants none
                    return False
                await _ready(writing=[self._input])
                continue
            except OSError:  # it does not want any
                data, rest = b"", rest[:0]
            if not rest:
                if not data:
                    self._refuse()
                return bool(data)
        return False

    def give(self, connection: socket.socket, limit: int) -> None:
        """Send output until the command has ended and no more is there; on a thread."""
        with self._using(connection), conduit.Splicer(connection, limit) as splicer:
            while not self._ending:
                ended = self._code() is not None
                more = False
                for stream, output in self._outputs.items():
                    if output >= 0 and splicer.send(output, stream):
                        more = True
                    elif data := self._more(stream, limit):
                        conduit.send(connection, stream, data)
                        more = True
                if ended and not more:
                    conduit.end(connection)
                    return
                if not more:
                    _wait([each for each in self._outputs.values() if each >= 0], select.POLLIN)

    def take(self, connection: socket.socket, limit: int) -> None:
        """Pass input on that comes by a connection, until the command wants none; on a thread."""
        incoming = conduit.Incoming(connection, limit)
        with self._using(connection):
            while incoming.next():
                while incoming.rest and not self._ending and self._input >= 0:
                    try:
                        incoming.move(self._input)
                    except BlockingIOError:
                        if self._process.poll() is not None:  # who has its input now wants none
                            return
                        _wait([self._input], select.POLLOUT)
                    except BrokenPipeError:  # it does not want any
                        self._refuse()
                if incoming.rest:
                    return
            self._refuse()

    def _refuse(self) -> None:
        if self._input >= 0:
            os.close(self._input)
            self._input = -1

    def wants_input(self) -> bool:
        return self._input >= 0 and self._process.poll() is None

    @contextlib.contextmanager
    def _using(self, connection: socket.socket) -> Iterator[None]:
        with self._condition:
            if self._ending:
                raise ConnectionError("the command has ended")
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._condition:
                self._connections.discard(connection)
                self._condition.notify_all()

    def end(self) -> None:
        self._timer.cancel()
        if self._process.poll() is None:
            self._kill()
        if self._overtime is not None:
            self._overtime.wait()
        self._close()

    def _kill(self) -> None:
        """End the command and all its descendants, also those that left its session."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            told: set[psutil.Process] = set()
            deadline = time.monotonic() + GRACE
            pause = POLL_INTERVAL
            while time.monotonic() < deadline:
                family = set(self._family())
                for each in family - told:
                    with contextlib.suppress(psutil.Error):
                        each.send_signal(number)
                told |= family
                if not family and self._process.poll() is not None:
                    return
                time.sleep(pause)
                pause = min(2 * pause, PAUSE)

    def _family(self) -> Iterator[psutil.Process]:
        """What it started and runs; but servers of mounts, which each see to their own end."""
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if each.status() == psutil.STATUS_ZOMBIE:
                    continue
                mine = os.getsid(each.pid) == self._process.pid or _marked(each, self._mark)
                if mine and worker.SERVER not in each.cmdline():
                    yield each

    def _close(self) -> None:
        with self._condition:  # the threads of connections use what is closed then
            self._ending = True
            for connection in self._connections:
                sockets.hang_up(connection)
            self._condition.wait_for(lambda: not self._connections)
        for descriptor in self._outputs.values():
            if descriptor >= 0:
                # What the command left running may write on, as to a file that is gone.
                threading.Thread(target=_drain, args=(descriptor,), daemon=True).start()
        self._outputs = dict.fromkeys(self._outputs, -1)
        self._refuse()
        shutil.rmtree(self._directory, ignore_errors=True)


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.environ().get(MARK) == mark)
    except psutil.AccessDenied:  # another user's
        return False


def _drain(descriptor: int) -> None:
    os.set_blocking(descriptor, True)
    try:
        while os.read(descriptor, conduit.PIPE):
            pass
    finally:
        os.close(descriptor)


def _wait(descriptors: Sequence[int], events: int) -> None:
    """The same on a thread: wait for one of them, for a moment at most."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, events)
    poll.poll(POLL_INTERVAL * 1000)


async def _ready(reading: Sequence[int] = (), writing: Sequence[int] = ()) -> None:
    """Wait until there is something to do at pipes, for a moment at most."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()
    for descriptor in reading:
        loop.add_reader(descriptor, woken.set)
    for descriptor in writing:
        loop.add_writer(descriptor, woken.set)
    try:
        await asyncio.wait_for(woken.wait(), POLL_INTERVAL)
    except asyncio.TimeoutError:
        pass
    finally:
        for descriptor in reading:
            loop.remove_reader(descriptor)
        for descriptor in writing:
            loop.remove_writer(descriptor)


class CommandActor(Actor):  # type: ignore[misc]
    """Runs commands on its host."""

    def __init__(self, host: str, rank: int, lease: float) -> None:
        process.settle()
        runtime.find_address()
        own = {"WHEELMOUNT_HOST": host, "WHEELMOUNT_RANK": str(rank)}
        self._environment = {**process.environment(), **own}
        mark = os.environ.get(worker.MARK)  # what is in its directory goes with the host
        place = None if mark is None else str(Path(mark).parent)
        self._directory = Path(tempfile.mkdtemp(prefix="run-", dir=place))
        self._lease = lease
        self._runs: dict[str, _Run] = {}
        self._lent: dict[str, dict[str, int]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._entrance: Entrance | None = None

    @concurrent_endpoint
    async def private(self, runtime_dir: str) -> str:
        """The user's own directory on this host in one where all may have theirs."""
        return str(Settings(runtime_dir=runtime_dir).private_runtime())

    @concurrent_endpoint
    async def start(self, key: str, command: Command, fed: bool) -> tuple[str, str]:
        """Start a command, to be known by ``key``. It ends when its output is not requested any
        more.

        Args:
            key: chosen by the client.
            command: the command to run.
            fed: whether ``feed`` is to follow; else it gets no input.

        Returns:
            Where it starts, and its directory for what is to be brought back.
        """
        self._runs[key] = run = await asyncio.to_thread(self._start, key, command, fed)
        if self._watch is None:
            self._watch = asyncio.create_task(self._end_abandoned())
        return run.place

    def _start(self, key: str, command: Command, fed: bool) -> _Run:
        lent = self._lent.pop(key, {})
        try:
            return _Run(command, self._directory / key, self._environment, fed, lent)
        finally:
            for descriptor in lent.values():
                os.close(descriptor)

    @concurrent_endpoint
    async def report(self, key: str, limit: int) -> Report:
        """More of its output, of each stream ``limit`` bytes at most; waits for some, a while."""
        return await self._run(key).report(limit)

    @concurrent_endpoint
    async def renew(self, key: str) -> None:
        """Say that its client still wants it, even if it does not ask for output."""
        self._run(key).asked = time.monotonic()

    @concurrent_endpoint
    async def feed(self, key: str, data: bytes) -> bool:
        """Send input, empty for its end; return whether the command takes more."""
        return await self._run(key).feed(data)

    @concurrent_endpoint
    async def wants_input(self, key: str) -> bool:
        """Return whether a command may still read its input."""
        return self._run(key).wants_input()

    @concurrent_endpoint
    async def reach(self) -> Ticket | None:
        """Where much input and output is passed on; None if this process cannot listen."""
        if self._entrance is None:
            try:
                self._entrance = Entrance(self._answer)
            except OSError as error:
                log.warning("output goes through Monarch's messages: %s", error)
                return None
        return self._entrance.ticket

    def _answer(self, connection: socket.socket, let_in: Callable[[], None]) -> None:
        if self._entrance is None:
            return
        wanted = conduit.answer(connection, self._entrance.ticket.secret)
        if wanted is None:
            log.warning("security: refused who does not know the secret of a command's output")
            return
        let_in()
        key, way, limit = wanted
        if way == conduit.LEND:
            self._lent[key] = conduit.borrow(connection)
            try:
                conduit.borrowed(connection)
            finally:  # also if it hung up before it had the command started
                for descriptor in self._lent.pop(key, {}).values():
                    os.close(descriptor)
            return
        connection.settimeout(None)  # a slow reader makes the command wait
        if (run := self._runs.get(key)) is not None:
            (run.give if way == conduit.TAKE else run.take)(connection, limit)

    @concurrent_endpoint
    async def end(self, key: str) -> None:
        """End a command if it runs, and forget its output."""
        if (run := self._runs.pop(key, None)) is not None:
            await asyncio.to_thread(run.end)

    @concurrent_endpoint
    async def quit(self) -> None:
        """End this process, soon; for a client that did not start it."""
        runtime.quit_soon()

    @concurrent_endpoint
    async def close(self) -> None:
        """End all commands; none may be started any more."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(asyncio.to_thread(run.end) for run in self._runs.values()))
        self._runs.clear()
        if self._entrance is not None:
            self._entrance.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self, key: str) -> _Run:
        if key not in self._runs:
            raise HostError(
                f"the command was ended: its client had not been heard of for {self._lease:g} s",
                hint="the client must go on, and reach its hosts, while commands run",
            )
        return self._runs[key]

    async def _end_abandoned(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 10)
            for key, run in list(self._runs.items()):
                if time.monotonic() - run.asked > self._lease:
                    del self._runs[key]
                    await asyncio.to_thread(run.end)
