"""Runs commands on a host: an actor that starts, watches and ends them for a client."""

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

from wheelmount import entry
from wheelmount.config import Settings
from wheelmount.errors import FILE, HostError, OvertimeError, WheelmountError, handed_over
from wheelmount.hosts import capabilities, collection, conduit, process, runtime, sockets, worker
from wheelmount.hosts.actor import Actor, concurrent_endpoint
from wheelmount.hosts.sockets import Entrance, Ticket

log = logging.getLogger("wheelmount")

CHUNK = 2 << 20
"""Bytes of a stream that travel in one message; Monarch's messages should stay below 16 MiB."""

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL when a command is ended."""

REPORT_WAIT = 5.0
"""Seconds that a request for output waits for some, which keeps requests to 1,000 hosts few."""

REPORT_BURST = 20
"""Number of reports of little output that a command has at once before they are spaced."""

LITTLE = 16 << 10
"""Bytes of output from which on a report delays none after it."""

LEASE = 60.0
"""Seconds that a command continues without a request for output, or a renewal, by its client."""

POLL_INTERVAL = 0.02
"""Seconds between checks for more output."""

END_INTERVAL = 0.01
"""Seconds between checks for a command's end while a report is delayed."""

MAX_CHECK_INTERVAL = 0.2
"""Longest interval, in seconds, between checks that a command's processes have ended."""

COMMAND_LINE = "-m", "wheelmount.cli.main"
"""Arguments of a Python that runs wheelmount's command line, which has all rights of the host: it
says what the host can do, and unmounts what is dead."""

NAMED = 255
"""Characters of a program's path that an error names."""

MARK = "WHEELMOUNT_RUN"
"""Environment variable whose value marks all processes of one command."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command for a host.

    Attributes:
        argv: program and arguments; a first item of ``python`` is the host's own Python, the one
            that runs wheelmount.
        script: text of a script to run with ``argv`` as its arguments; None to run ``argv``.
        interpreter: program and arguments that run the script.
        private_file: contents of a file that only this user can read, for input that must not be
            in the arguments, which every user of the host can read. The file's path is appended
            to the arguments.
        environment: variables to set.
        cwd: working directory; default the host's temporary directory, for ``python`` the root.
        runtime_dir: the client's setting, if ``cwd`` may be in one of its mounts; see ``entry``.
        timeout: seconds after which the command and its descendants are ended; None for no bound.
            The exit code is that of ``OvertimeError`` then, and the last line of standard error
            is the reason.
        collect: path of the files to collect when the command has ended, see ``collection``; None
            for no files.
    """

    argv: tuple[str, ...] = ()
    script: bytes | None = None
    interpreter: tuple[str, ...] = ("bash",)
    private_file: bytes | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    runtime_dir: str | None = None
    timeout: float | None = None
    collect: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The next part of a command's output.

    Attributes:
        stdout: standard output since the last report.
        stderr: standard error since the last report.
        code: exit code if the command has ended and all output was reported, else None; 128 plus
            the signal's number if a signal ended the command.
        seconds: duration of the command; until now if it still runs.
        error: the error by which a program of wheelmount ended.
    """

    stdout: bytes
    stderr: bytes
    code: int | None
    seconds: float
    error: WheelmountError | None = None


class _Run:
    """A running command and the pipes of its streams.

    A full pipe makes the command wait until the client has read earlier output.
    """

    def __init__(
        self,
        command: Command,
        directory: Path,
        environment: Mapping[str, str],
        has_input: bool,
        lent: Mapping[str, int],
    ) -> None:
        directory.mkdir()
        self._directory = directory
        self._started = self.requested_at = time.monotonic()
        self._seconds: float | None = None
        self._scheduled = 0.0  # when the next report of little output would be due, evenly spaced
        self._outputs: dict[str, int] = {}
        self._left: dict[str, int] | None = None  # bytes to be read, once the command has ended
        self._input = -1
        self._connections: set[socket.socket] = set()
        self._condition = threading.Condition()
        self._ending = False
        self._timed_out: threading.Event | None = None
        self._reason = b""
        self._mark = secrets.token_hex(16)
        self._error = directory / "error"
        try:
            self._process = self._start(command, environment, has_input, lent)
        except BaseException:
            self._close()
            raise
        self._timer = threading.Timer(command.timeout or 0, self._expire, [command.timeout])
        self._timer.daemon = True
        if command.timeout is not None:
            self._timer.start()

    def _start(
        self,
        command: Command,
        environment: Mapping[str, str],
        has_input: bool,
        lent: Mapping[str, int],
    ) -> subprocess.Popen[bytes]:
        argv, cwd = list(command.argv), command.cwd
        if command.script is not None:
            script = self._directory / "script"
            script.write_bytes(command.script)
            argv = [*command.interpreter, str(script), *argv]
        elif argv[0] == "python":
            argv[0] = sys.executable
            if argv[1:2] == ["-m"] and argv[2].startswith("wheelmount."):
                environment = {**environment, FILE: str(self._error)}
            cwd = cwd or "/"  # Python would import modules of the working directory
        self.cwd = cwd or tempfile.gettempdir()
        self.output = str(self._directory / "output")
        if command.collect is not None:
            Path(self.output).mkdir(mode=0o700)
            environment = {**environment, collection.VARIABLE: self.output}
        if command.private_file is not None:
            private_file = self._directory / "private"
            private_file.write_bytes(command.private_file)
            argv.append(str(private_file))
        child_ends = {}
        try:
            for stream in ("stdout", "stderr"):
                if stream not in lent:
                    self._outputs[stream], child_ends[stream] = conduit.pipe()
            if has_input:
                child_ends["stdin"], self._input = conduit.pipe()
            for own_end in (*self._outputs.values(), *([self._input] if has_input else ())):
                os.set_blocking(own_end, False)
            streams = {**child_ends, **lent}
            own = tuple(argv[1:3]) == COMMAND_LINE
            with contextlib.ExitStack() as start:
                if command.runtime_dir is not None:
                    start.enter_context(entry.starting(Settings(runtime_dir=command.runtime_dir)))
                if not own:
                    start.enter_context(capabilities.lowered())
                return subprocess.Popen(
                    argv,
                    stdin=streams.get("stdin", subprocess.DEVNULL),
                    stdout=streams["stdout"],
                    stderr=streams["stderr"],
                    cwd=self.cwd,
                    env={**environment, **command.environment, MARK: self._mark},
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:  # ValueError: a word cannot be an argument
            reason = error.strerror if isinstance(error, OSError) else error
            if cwd is not None and isinstance(error, OSError) and error.filename == cwd:
                raise HostError(
                    f"cannot run in {cwd}: {reason}",
                    hint="choose a directory that exists on the host",
                ) from None
            raise HostError(
                f"cannot run {argv[0][:NAMED]}: {reason}", hint="is it installed on the host?"
            ) from None
        finally:
            for descriptor in child_ends.values():
                os.close(descriptor)

    def _expire(self, timeout: float) -> None:
        """End the command because it exceeded its timeout."""
        if self._process.poll() is not None:
            return
        ended = self._timed_out = threading.Event()
        reason = f"error: the command was ended: it took longer than {timeout:g} s"
        try:
            self._kill()
            if self._process.poll() is None:
                reason += ", was killed and has not ended; its disk or network file system may hang"
        finally:
            self._reason = f"{reason}\n".encode()
            ended.set()

    def _exit_code(self) -> int | None:
        """Return the exit code; None while the command runs.

        After a time-out, None until all descendants have ended, too, or do not end although they
        were killed. From its end on, only what it had written is read: processes that it left
        running may write without end.
        """
        code, killed = self._process.poll(), self._timed_out
        if (code is None) if killed is None else not killed.is_set():
            return None
        if self._left is None:
            outputs = self._outputs.items()
            self._left = {stream: conduit.held(output) for stream, output in outputs if output >= 0}
        if code is None or killed is not None:
            return OvertimeError.exit_code
        return 128 - code if code < 0 else code

    def _most(self, stream: str, limit: int) -> int:
        """Return how many bytes of a stream may be read now, up to a limit."""
        return limit if self._left is None else min(limit, self._left.get(stream, 0))

    def _took(self, stream: str, size: int) -> None:
        if self._left is not None and stream in self._left:
            self._left[stream] -= size

    async def report(self, limit: int, interval: float) -> Report:
        now = time.monotonic()
        deadline = now + REPORT_WAIT
        # The interval may have become shorter since the last reports were scheduled.
        due = min(self._scheduled - REPORT_BURST * interval, now + interval)
        while time.monotonic() < due and self._exit_code() is None:
            await asyncio.sleep(END_INTERVAL)
        while True:
            self.requested_at = time.monotonic()
            code = self._exit_code()
            if code is not None and self._seconds is None:
                self._seconds = time.monotonic() - self._started
            stdout, stderr = self._read_output("stdout", limit), self._read_output("stderr", limit)
            more = bool(stdout or stderr)
            if more or code is not None or time.monotonic() > deadline:
                if len(stdout) + len(stderr) < LITTLE:
                    self._scheduled = max(self._scheduled, self.requested_at) + interval
                if more or code is None:
                    return Report(stdout, stderr, None, time.monotonic() - self._started)
                error = handed_over(self._error) if code else None
                return Report(stdout, stderr, code, self._seconds or 0, error)
            await _ready([each for each in self._outputs.values() if each >= 0])

    def _read_output(self, stream: str, limit: int) -> bytes:
        found, size, limit = [], 0, self._most(stream, limit)
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
        self._took(stream, size)
        if stream == "stderr" and not size and self._exit_code() is not None:
            found, self._reason = [self._reason], b""
        return found[0] if len(found) == 1 else b"".join(found)

    async def feed(self, data: bytes) -> bool:
        rest = memoryview(data)
        while self._input >= 0:
            try:
                rest = rest[os.write(self._input, rest) :] if rest else rest
            except BlockingIOError:
                if self._process.poll() is not None:  # processes that it left do not read
                    return False
                await _ready(writing=[self._input])
                continue
            except OSError:  # the command has closed its input
                data, rest = b"", rest[:0]
            if not rest:
                if not data:
                    self._close_input()
                return bool(data)
        return False

    def give(self, connection: socket.socket, limit: int) -> None:
        """Send output over a connection until the command has ended and all is sent; blocks."""
        with self._using(connection), conduit.Splicer(connection, limit) as splicer:
            while not self._ending:
                ended = self._exit_code() is not None
                more = False
                for stream, output in self._outputs.items():
                    most = self._most(stream, limit)
                    if output >= 0 and most and (sent := splicer.send(output, stream, most)):
                        self._took(stream, sent)
                        more = True
                    elif data := self._read_output(stream, limit):
                        conduit.send(connection, stream, data)
                        more = True
                if ended and not more:
                    conduit.end(connection)
                    return
                if not more:
                    _wait([each for each in self._outputs.values() if each >= 0], select.POLLIN)

    def take(self, connection: socket.socket, limit: int) -> None:
        """Pass input from a connection to the command until either closes; blocks."""
        incoming = conduit.Incoming(connection, limit)
        with self._using(connection):
            while incoming.next():
                while incoming.rest and not self._ending and self._input >= 0:
                    try:
                        incoming.move(self._input)
                    except BlockingIOError:
                        if self._process.poll() is not None:  # processes that it left do not read
                            return
                        _wait([self._input], select.POLLOUT)
                    except BrokenPipeError:  # the command has closed its input
                        self._close_input()
                if incoming.rest:
                    return
            self._close_input()

    def _close_input(self) -> None:
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
        if self._timed_out is not None:  # it was killed, or is being killed
            self._timed_out.wait()
        elif self._process.poll() is None:
            self._kill()
        self._close()

    def _kill(self) -> None:
        """End the command and all its descendants, also those that left its session (setsid(2)).

        Gives up where a process does not end: it may wait for a disk that hangs.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            signalled: set[psutil.Process] = set()
            deadline = time.monotonic() + GRACE
            interval = POLL_INTERVAL
            while time.monotonic() < deadline:
                descendants = set(self._descendants())
                for each in descendants - signalled:
                    with contextlib.suppress(psutil.Error):
                        each.send_signal(number)
                signalled |= descendants
                if not descendants and self._process.poll() is not None:
                    return
                time.sleep(interval)
                interval = min(2 * interval, MAX_CHECK_INTERVAL)

    def _descendants(self) -> Iterator[psutil.Process]:
        """Yield the command's live processes, except servers of mounts, which end by themselves."""
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if each.status() == psutil.STATUS_ZOMBIE:
                    continue
                started = os.getsid(each.pid) == self._process.pid or _marked(each, self._mark)
                if started and process.SERVER not in each.cmdline():
                    yield each

    def _close(self) -> None:
        with self._condition:  # threads of connections use the descriptors until they have ended
            self._ending = True
            for connection in self._connections:
                sockets.hang_up(connection)
            self._condition.wait_for(lambda: not self._connections)
        for descriptor in self._outputs.values():
            if descriptor >= 0 and conduit.closed(descriptor):
                os.close(descriptor)
            elif descriptor >= 0:
                # Processes that the command left running may still write; nobody reads that output.
                threading.Thread(target=_drain, args=(descriptor,), daemon=True).start()
        self._outputs = dict.fromkeys(self._outputs, -1)
        self._close_input()
        shutil.rmtree(self._directory, ignore_errors=True)


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.environ().get(MARK) == mark)
    except psutil.AccessDenied:  # another user's process
        return False


def _drain(descriptor: int) -> None:
    """Read and discard the output of processes until all have closed the pipe."""
    os.set_blocking(descriptor, True)
    try:
        while os.read(descriptor, conduit.PIPE):
            pass
    finally:
        os.close(descriptor)


def _wait(descriptors: Sequence[int], events: int) -> None:
    """Block until one of the descriptors is ready, for ``POLL_INTERVAL`` at most."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, events)
    poll.poll(POLL_INTERVAL * 1000)


async def _ready(reading: Sequence[int] = (), writing: Sequence[int] = ()) -> None:
    """Wait until one of the descriptors is ready, for ``POLL_INTERVAL`` at most."""
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


class CommandActor(Actor):
    """Runs commands on its host.

    Args:
        host: name of the host, for the commands' environment.
        rank: number of the host, likewise.
        lease: seconds that a command continues without a renewal by its client.
    """

    def __init__(self, host: str, rank: int, lease: float) -> None:
        process.settle()
        runtime.find_address()
        own = {"WHEELMOUNT_HOST": host, "WHEELMOUNT_RANK": str(rank)}
        self._environment = {**process.environment(), **own}
        mark = os.environ.get(worker.MARK)  # its directory is removed with the host
        parent = None if mark is None else str(Path(mark).parent)
        self._directory = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
        self._lease = lease
        self._runs: dict[str, _Run] = {}
        self._lent: dict[str, dict[str, int]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._entrance: Entrance | None = None

    @concurrent_endpoint
    async def private(self, runtime_dir: str) -> str:
        """Return the user's private directory on this host within the setting ``runtime_dir``."""
        return str(Settings(runtime_dir=runtime_dir).private_runtime())

    @concurrent_endpoint
    async def start(self, key: str, command: Command, has_input: bool) -> tuple[str, str]:
        """Start a command, which is ended if the client neither requests output nor renews it.

        Args:
            key: identifies the command in later calls; the client chooses it.
            command: the command to run.
            has_input: whether the client sends input; else the command gets none.

        Returns:
            The working directory, and the directory for files to collect.
        """
        self._runs[key] = run = await asyncio.to_thread(self._start, key, command, has_input)
        if self._watch is None:
            self._watch = asyncio.create_task(self._end_abandoned())
        return run.cwd, run.output

    def _start(self, key: str, command: Command, has_input: bool) -> _Run:
        lent = self._lent.pop(key, {})
        try:
            return _Run(command, self._directory / key, self._environment, has_input, lent)
        finally:
            for descriptor in lent.values():
                os.close(descriptor)

    @concurrent_endpoint
    async def report(self, key: str, limit: int, interval: float) -> Report:
        """Return more output; waits up to ``REPORT_WAIT`` for some, or for the command's end.

        Args:
            key: of the command.
            limit: maximum number of bytes of each stream.
            interval: seconds between reports if the command goes on writing little at a time: its
                output is collected meanwhile.
        """
        return await self._run(key).report(limit, interval)

    @concurrent_endpoint
    async def renew(self, key: str) -> None:
        """Let a command continue although its client requests no output now."""
        self._run(key).requested_at = time.monotonic()

    @concurrent_endpoint
    async def feed(self, key: str, data: bytes) -> bool:
        """Send input to a command, no bytes for its end; return whether the command takes more."""
        return await self._run(key).feed(data)

    @concurrent_endpoint
    async def wants_input(self, key: str) -> bool:
        """Return whether a command may still read its input."""
        return self._run(key).wants_input()

    @concurrent_endpoint
    async def reach(self) -> Ticket | None:
        """Return the ticket for connections with large input and output.

        None if this process cannot listen.
        """
        if self._entrance is None:
            try:
                self._entrance = Entrance(self._answer)
            except OSError as error:
                log.warning(
                    "large output goes through Monarch's messages, which is slower: %s", error
                )
                return None
        return self._entrance.ticket

    def _answer(self, connection: socket.socket, let_in: Callable[[], None]) -> None:
        if self._entrance is None:
            return
        request = conduit.answer(connection, self._entrance.ticket.secret)
        if request is None:
            log.warning("security: refused a caller with a wrong secret for a command's output")
            return
        let_in()
        key, direction, limit = request
        if direction == conduit.LEND:
            self._lent[key] = conduit.borrow(connection)
            try:
                conduit.confirm_borrowed(connection)
            finally:  # also if the client hung up before it started the command
                for descriptor in self._lent.pop(key, {}).values():
                    os.close(descriptor)
            return
        connection.settimeout(None)  # a slow reader makes the command wait
        if (run := self._runs.get(key)) is not None:
            (run.give if direction == conduit.TAKE else run.take)(connection, limit)

    @concurrent_endpoint
    async def end(self, key: str) -> None:
        """End a command if it runs, and discard its output."""
        if (run := self._runs.pop(key, None)) is not None:
            await asyncio.to_thread(run.end)

    @concurrent_endpoint
    async def quit(self) -> None:
        """End this process soon; for a client that did not start the process."""
        runtime.quit_soon()

    @concurrent_endpoint
    async def close(self) -> None:
        """End all commands; no command can be started afterwards."""
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
                hint="keep the client running and connected to its hosts while commands run",
            )
        return self._runs[key]

    async def _end_abandoned(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 10)
            for key, run in list(self._runs.items()):
                if time.monotonic() - run.requested_at > self._lease:
                    del self._runs[key]
                    await asyncio.to_thread(run.end)
