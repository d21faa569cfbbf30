"""Runs commands on many hosts at once: the client's part. ``command_actor`` is the hosts' part."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import secrets
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import RawIOBase
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, runtime_checkable

from wheelmount.errors import CommandError, HostError, TransferError, WaitError, WheelmountError
from wheelmount.hosts import conduit, handshake, runtime, sockets
from wheelmount.hosts.collection import Collection
from wheelmount.hosts.command_actor import (
    CHUNK,
    LEASE,
    REPORT_WAIT,
    Command,
    CommandActor,
    Report,
)
from wheelmount.hosts.host import FIRST_PART, Host, Roster
from wheelmount.hosts.runtime import LOST_COST, LOST_INTERVAL

log = logging.getLogger("wheelmount")

TAIL = 64 << 10
"""Bytes that a result keeps of the end of a stream that was passed on live."""

EXCERPT = 200
"""Maximum number of characters of a command's output in a one-line summary."""

IN_FLIGHT = 8 << 20
"""Maximum bytes of each stream that are in flight from all hosts together."""

CONNECTION_THRESHOLD = 64 << 10
"""Bytes in one message from which on a stream gets a connection of its own."""

FRAME = 512 << 10
"""Maximum bytes of output in one frame of such a connection."""

REPORT_INTERVAL = 0.05
"""Seconds between reports of a command that goes on writing little at a time. A report takes about
2 ms of processors, half of them of the client: a report for each write of a suite of tests took
more than the suite."""

REPORT_COST = 0.002
"""Seconds by which each running command lengthens this interval, so that this process keeps up."""

MAX_CONNECTIONS = 4096
"""Maximum number of such connections at a time; each has a thread that waits for its data."""

Output = Callable[[str, str, bytes], None]
"""Receives output as it arrives: host, ``stdout`` or ``stderr``, bytes. A call may block;
the commands then wait before they write more output."""


@runtime_checkable
class Listener(Protocol):
    """An ``Output`` that also receives the list of hosts and the end of each host's output."""

    def begin(self, hosts: Sequence[str]) -> None:
        """Receive the names of all hosts, in order, before any output."""

    def end(self, host: str, *, lost: bool) -> None:
        """Receive the end of a host's output: its command ended, or the host was lost."""

    def __call__(self, host: str, stream: str, data: bytes) -> None:
        """Receive output, as ``Output`` does."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a command on one host.

    Attributes:
        code: exit code; 128 plus the signal's number if a signal ended the command.
        stdout: bytes of standard output; only the last ``TAIL`` if output was passed on live.
        stderr: bytes of standard error, likewise.
        seconds: duration of the command.
        lacking: the error that kept files of the command from being collected; None if all were
            collected, or none were to be.
    """

    code: int
    stdout: bytes
    stderr: bytes
    seconds: float
    lacking: WheelmountError | None = None

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")

    def __repr__(self) -> str:
        return f"<exit code {self.code} after {self.seconds:.1f} s: {_excerpt(self)}>"


class Results(dict[str, Result | WheelmountError]):
    """The result of a command by host, or the error if it did not run or its host was lost.

    Attributes:
        shortfall: an error outside the commands, such as files that did not arrive; None if there
            was no such error.
    """

    shortfall: WheelmountError | None = None

    @property
    def texts(self) -> dict[str, str]:
        """Standard output as text by host, of hosts on which the command ran."""
        return {name: each.text for name, each in self.items() if isinstance(each, Result)}

    def raise_for_status(self) -> None:
        """Raise an error unless the command ended with exit code 0 on every host, with all files.

        Raises:
            CommandError: the command ended with another exit code on some hosts; the message names
                them and has the end of standard error.
            WheelmountError: the command could not be run, or files did not arrive or were not
                collected.
        """
        for result in self.values():
            if isinstance(result, WheelmountError):
                raise result
        failed = {name: r for name, r in self.items() if isinstance(r, Result) and r.code}
        if failed:
            name, first = next(iter(failed.items()))
            others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            raise CommandError(f"exit code {first.code} on {name}{others}: {_excerpt(first)}")
        lacking = (r.lacking for r in self.values() if isinstance(r, Result))
        if error := next(filter(None, [*lacking, self.shortfall]), None):
            raise error

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {result!r}" for name, result in self.items())


def _excerpt(result: Result) -> str:
    """Return the last line of a command's output, or of standard error if the command failed."""
    output = (result.stderr if result.code else result.stdout) or result.stdout or result.stderr
    lines = output.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return repr(last if len(last) <= EXCERPT else f"{last[:EXCERPT]}…")


class Commands:
    """Runs commands on hosts. A context manager; its exit ends commands that still run.

    Args:
        hosts: the hosts.
        timeout: seconds within which a host must answer; commands may take longer.
        actors: command actors by host, if another process started them; they keep running after
            the exit.
        lease: seconds that a command continues without a renewal by this process.
        killed: whether the hosts are killed after the exit, which then does not stop the actors'
            processes.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        timeout: float,
        actors: Mapping[str, Any] | None = None,
        *,
        lease: float = LEASE,
        killed: bool = False,
    ) -> None:
        self._timeout, self._lease, self._killed = timeout, lease, killed
        self._hosts = hosts
        self._procs: dict[str, Any] = {}
        self._greetings: dict[str, Any] = {}
        self._replaced: list[Any] = []  # processes that did not answer
        self._answered = 0  # processes that did
        self._roster = Roster(hosts)
        self._silent: set[str] = set()  # hosts that did not answer
        self.actors: dict[str, Any] = dict(actors or {})
        self._running: set[tuple[str, str]] = set()
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, "wheelmount-conduit")

    def __enter__(self) -> Commands:
        if not self.actors:
            for rank in range(len(self._hosts)):
                self._spawn(rank)
        return self

    def _spawn(self, rank: int) -> None:
        host = self._hosts[rank]
        # A separate process, so that one that receives a mount's bytes never waits for commands.
        procs = host.mesh.spawn_procs({"procs": 1}, name=f"{runtime.NAME}run")
        self._procs[host.name] = procs
        self._greetings[host.name] = handshake.begin(procs)
        self.actors[host.name] = procs.spawn(
            f"{runtime.NAME}commands", CommandActor, host.name, rank, self._lease
        )

    def __exit__(self, *_exc: object) -> None:
        self._threads.shutdown(wait=False)
        silent = self._roster.dead | self._silent  # these get messages, and no time to answer
        ends = {(name, key): self.actors[name].end.call_one(key) for name, key in self._running}
        awaited = {run: end for run, end in ends.items() if run[0] not in silent}
        runtime.gather(awaited, self._timeout, lost=self._lost_runs)
        if not self._killed:
            runtime.stop_meshes(*self._replaced)
        if self._procs:
            closes = {name: self.actors[name].close.call_one() for name in self._procs}
            closes = {name: close for name, close in closes.items() if name not in silent}
            closed = runtime.gather(closes, self._timeout, lost=self._roster.lost)
            # A lost host has no processes to stop.
            here = [name for name, end in closed.items() if not isinstance(end, WheelmountError)]
            if not self._killed:
                runtime.stop_meshes(*(self._procs[name] for name in here))

    def keep(self) -> None:
        """Keep the command actors on their hosts after the exit of this context."""
        self._procs = {}

    def private(self, runtime_dir: str) -> dict[str, str]:
        """Return the user's private runtime directory by host; its path may differ between hosts.

        Args:
            runtime_dir: the setting ``runtime_dir``.

        Raises:
            HostError, WaitError: a host is lost, or does not answer.
        """
        calls = {name: each.private.call_one(runtime_dir) for name, each in self.actors.items()}
        return runtime.raise_first(runtime.gather(calls, self._timeout, lost=self._roster.lost))

    def run(
        self,
        commands: Mapping[str, Command],
        output: Output | None = None,
        stdin: RawIOBase | None = None,
        collect: Collection | None = None,
        hosts: Mapping[str, str] | None = None,
        lent: Mapping[str, int] | None = None,
    ) -> Results:
        """Run commands on hosts, all at once, and wait for them.

        Args:
            commands: the commands by host, or by other names; see ``hosts``.
            output: receives output as it arrives, from one thread; without it, the results hold all
                output.
            stdin: input of a single command; several commands get no input. An unbuffered file,
                because Python cannot end while a thread waits in a buffered one.
            collect: destination of the files that the commands' ``collect`` selects.
            hosts: host of each command, by the names in ``commands``; default the names themselves.
            lent: by stream (``stdin``, ``stdout``, ``stderr``), a descriptor of this process that a
                single command on this machine uses as that stream. ``output`` and the result
                receive nothing of such a stream, and processes that the command leaves running
                keep it open.
        """
        lent = (lent or {}) if len(commands) == 1 else {}
        stdin = stdin if len(commands) == 1 else None
        hosts = hosts or {name: name for name in commands}
        results = Results()
        greetings: dict[str, asyncio.Task[None]] = {}
        listener = output if isinstance(output, Listener) else None
        if listener is not None:
            listener.begin(list(commands))

        async def one(
            name: str, command: Command, thread: _OutputThread | None, limit: int
        ) -> None:
            try:
                await greetings[hosts[name]]
                results[name] = await self._run(
                    name, hosts[name], command, thread, stdin, limit, collect, lent
                )
            except WheelmountError as error:
                results[name] = error
                host = hosts[name]  # which may have answered that something else took too long
                answered = not greetings[host].exception() and all(
                    host != each for each, _ in self._running
                )
                if isinstance(error, WaitError) and not answered:
                    self._silent.add(host)
            else:
                self._silent.discard(hosts[name])
            if thread is not None and listener is not None:
                lost = isinstance(results[name], WheelmountError)
                await thread(lambda: listener.end(name, lost=lost))

        async def everything() -> None:
            thread = None if output is None else _OutputThread(output)
            limit = max(TAIL, min(CHUNK, IN_FLIGHT // max(len(commands), 1)))
            for host in {hosts[name] for name in commands}:
                greetings[host] = asyncio.create_task(self._greet(host))
            try:
                await asyncio.gather(*(one(*item, thread, limit) for item in commands.items()))
            finally:
                if thread is not None:
                    thread.close()

        runtime.complete(everything())
        return Results({name: results[name] for name in commands})

    async def _greet(self, host: str) -> None:
        """Check, before a host's first command, that the host has this version of wheelmount."""
        if (greeting := self._greetings.pop(host, None)) is None:
            return
        try:
            theirs = await self._greeted(host, greeting, self._timeout * FIRST_PART)
        except WaitError:  # a message was lost; see ``Hosts._await_answers``
            log.warning(
                "%s: the process that runs commands does not answer; starting another", host
            )
            self._replaced.append(self._procs[host])
            self._spawn([each.name for each in self._hosts].index(host))
            again = self._greetings.pop(host)
            theirs = await self._greeted(host, again, self._timeout * (1 - FIRST_PART))
        handshake.compare(host, theirs)

    async def _greeted(self, host: str, greeting: Any, timeout: float) -> handshake.Versions:
        """Wait for the first answer of a process, as long as other hosts' processes answer.

        Those of many hosts of one machine start one after the other, and one that is started in
        place of another takes time from the rest.

        Args:
            host: its name.
            greeting: future of the answer.
            timeout: seconds in which this host or another one has to answer.
        """
        answer = asyncio.ensure_future(runtime.answer(greeting, None))
        try:
            before, left = self._answered, timeout
            look = LOST_INTERVAL + LOST_COST * len(self._hosts)
            while not (await asyncio.wait({answer}, timeout=min(left, look)))[0]:
                if (error := await self._death(host)) is not None:
                    raise error
                left -= look
                if self._answered != before:
                    before, left = self._answered, timeout
                if left <= 0 and not answer.done():
                    raise runtime.silence(timeout)
            self._answered += 1
            theirs: handshake.Versions = answer.result()
            return theirs
        finally:
            answer.cancel()

    async def _death(self, host: str) -> HostError | None:
        """Return an error if a host has died."""
        return (await self._roster.lost([host])).get(host)

    async def _lost_runs(self, runs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], HostError]:
        """Return errors of those of the runs, each a host's name and a key, whose host has died."""
        runs = list(runs)
        lost = await self._roster.lost({host for host, _ in runs})
        return {run: lost[run[0]] for run in runs if run[0] in lost}

    async def _answer(self, host: str, call: Any, timeout: float | None, due: float = 0.0) -> Any:
        """Wait for one call to a host, as ``runtime.answer`` does, and end if the host has died."""
        return await runtime.answer(call, timeout, partial(self._death, host), due)

    async def _run(
        self,
        name: str,
        host: str,
        command: Command,
        thread: _OutputThread | None,
        stdin: RawIOBase | None,
        limit: int,
        collect: Collection | None = None,
        lent: Mapping[str, int] | None = None,
    ) -> Result:
        actor, key = self.actors[host], secrets.token_hex(8)
        self._running.add((host, key))
        loan = await self._lend(host, key, lent) if lent else None
        if loan is not None and lent and "stdin" in lent:
            stdin = None
        with loan or contextlib.nullcontext():
            start = actor.start.call_one(key, command, stdin is not None)
            directories = await self._answer(host, start, self._timeout)
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = _Running(host, actor, key, failure)
        tasks = [asyncio.create_task(self._renew(running))]
        if stdin is not None:
            tasks.append(asyncio.create_task(self._feed(running, _Reader(stdin))))
        streams = {"stdout": bytearray(), "stderr": bytearray()}
        bound = self._timeout + REPORT_WAIT
        reached = False
        lacking = None

        def keep(stream: str, piece: bytes) -> Callable[[], None] | None:
            """Keep output for the result; return the call that passes it on, or None."""
            if thread is None:
                streams[stream] += piece
                return None
            streams[stream] += piece[-TAIL:]
            del streams[stream][:-TAIL]
            return partial(thread.output, name, stream, piece) if piece else None

        try:
            while True:
                most = limit if reached else min(limit, CONNECTION_THRESHOLD)
                interval = max(REPORT_INTERVAL, REPORT_COST * len(self._running))
                reported = actor.report.call_one(key, most, interval)
                report: Report = await self._answer(host, reported, bound, REPORT_WAIT)
                for call in (keep("stdout", report.stdout), keep("stderr", report.stderr)):
                    if call is not None and thread is not None:
                        await thread(call)
                if report.code is not None:
                    break
                if failure.done():
                    failure.result()
                if not reached and max(len(report.stdout), len(report.stderr)) >= most:
                    reached = True
                    frame = min(limit, FRAME)
                    connection = await self._call(running, conduit.TAKE, frame)
                    if connection is not None:
                        await self._take(running, connection, frame, keep, thread)
            if report.error is None and collect is not None and command.collect is not None:
                selection = command.collect, *directories
                lacking = await self._collect(name, host, selection, collect, limit)
        finally:
            for task in tasks:
                task.cancel()
            if not failure.cancel():
                failure.exception()  # was raised above, or the command ended in spite of it
        await self._answer(host, actor.end.call_one(key), self._timeout)
        self._running.discard((host, key))
        if report.error is not None:
            raise report.error
        return Result(
            report.code,
            bytes(streams["stdout"]),
            bytes(streams["stderr"]),
            report.seconds,
            lacking,
        )

    async def _collect(
        self, name: str, host: str, selection: tuple[str, str, str], collect: Collection, limit: int
    ) -> WheelmountError | None:
        """Collect the files that a command left; return the error if some are missing."""
        sender = Command(("python", "-m", "wheelmount.hosts.collection", *selection))
        inbox = collect.open(name)
        thread, code = _OutputThread(inbox), None
        try:
            with contextlib.suppress(TransferError):  # ``inbox.close`` returns the reason
                code = (await self._run(name, host, sender, thread, None, limit)).code
        finally:
            thread.close()
            lacking = await asyncio.to_thread(inbox.close, code)
        return lacking

    async def _lend(self, host: str, key: str, lent: Mapping[str, int]) -> socket.socket | None:
        """Pass this process's descriptors to a command that is about to start.

        Returns:
            A connection to close when the command has started; None if the host cannot be reached
            on this machine.

        Raises:
            HostError: it is unknown whether the host received the descriptors. This process must
                not read them then, because each of two readers would get a part of the input.
        """
        ticket = await self._answer(host, self.actors[host].reach.call_one(), self._timeout)
        if ticket is None or not isinstance(ticket.where, str):
            return None

        def hand_over() -> socket.socket | None:
            try:
                connection = conduit.call(ticket, key, conduit.LEND, 0)
            except (WheelmountError, OSError):
                return None
            try:
                conduit.lend(connection, lent)
            except OSError as error:
                connection.close()
                raise HostError(
                    f"{host} did not receive the streams of a command: {error}"
                ) from None
            except BaseException:
                connection.close()
                raise
            return connection

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, hand_over)

    async def _call(self, running: _Running, direction: int, limit: int) -> socket.socket | None:
        """Connect for a stream of a command; return None if only Monarch's messages get through."""
        ticket = await self._answer(running.host, running.actor.reach.call_one(), self._timeout)
        if ticket is None:
            return None
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._threads, conduit.call, ticket, running.key, direction, limit
            )
        except (WheelmountError, OSError):
            return None

    async def _take(
        self,
        running: _Running,
        connection: socket.socket,
        limit: int,
        keep: Callable[[str, bytes], Callable[[], None] | None],
        thread: _OutputThread | None,
    ) -> None:
        """Pass on a command's output from a connection until the output ends."""
        loop, failure = asyncio.get_running_loop(), running.failure
        output_failed: asyncio.Future[None] = loop.create_future()  # holds the ``Output``'s error
        free, stopped = threading.Semaphore(), threading.Event()

        def receive() -> None:
            # On one thread, because a switch between threads takes as long as 100 KB of output.
            while (frame := conduit.receive(connection, limit)) is not None:
                call = keep(*frame)
                if call is not None and thread is not None:
                    free.acquire()  # waits until the previous piece was passed on
                    if stopped.is_set():
                        return
                    thread.put(call, finished)
            free.acquire()

        def finished(error: Exception | None) -> None:
            if error is not None:
                stopped.set()
                _settle_soon(loop, output_failed, error)
            free.release()

        receiving = loop.run_in_executor(self._threads, receive)
        with _open(connection):
            try:
                any_of: set[asyncio.Future[Any]] = {receiving, output_failed, failure}
                await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
                for each in (output_failed, failure):
                    if each.done() and not receiving.done():
                        each.result()
                try:
                    receiving.result()
                except OSError:
                    # This call raises the reason if the host is lost or has ended the command.
                    report = running.actor.report.call_one(running.key, 1, 0)
                    bound = self._timeout + REPORT_WAIT
                    await self._answer(running.host, report, bound, REPORT_WAIT)
                    raise HostError(
                        "the connection that carried a command's output was cut",
                        hint="check the network, and run the command again",
                    ) from None
                if output_failed.done():
                    output_failed.result()
            finally:
                stopped.set()
                free.release()
                sockets.hang_up(connection)
                await asyncio.wait({receiving})
                receiving.exception()
                if not output_failed.cancel():
                    output_failed.exception()

    async def _renew(self, running: _Running) -> None:
        try:
            while True:
                await asyncio.sleep(self._lease / 6)
                await runtime.answer(running.actor.renew.call_one(running.key), self._timeout)
        except WheelmountError as error:
            _settle(running.failure, error)

    async def _feed(self, running: _Running, reader: _Reader) -> None:
        """Send input to a command as fast as the command reads it."""
        actor, key, loop = running.actor, running.key, asyncio.get_running_loop()
        with contextlib.suppress(WheelmountError):  # the command has ended
            while len(data := await reader.read()) < CONNECTION_THRESHOLD:
                if not await runtime.answer(actor.feed.call_one(key, data), None) or not data:
                    return
            connection = await self._call(running, conduit.GIVE, CHUNK * 2)
            while connection is None:
                if not await runtime.answer(actor.feed.call_one(key, data), None) or not data:
                    return
                data = await reader.read()
            reader.stop()
            with _open(connection):
                try:
                    while data:
                        await loop.run_in_executor(
                            self._threads, conduit.send, connection, "stdin", data
                        )
                        data = await reader.read()
                    await reader.pump(connection)
                    return
                except OSError:
                    if not await runtime.answer(actor.wants_input.call_one(key), self._timeout):
                        return
            error = HostError(
                "the connection that carried a command's input was cut",
                hint="check the network, and run the command again",
            )
            _settle(running.failure, error)


@contextlib.contextmanager
def _open(connection: socket.socket) -> Iterator[None]:
    """Close a connection at the end, and wake a thread that waits for its data."""
    with connection:
        try:
            yield
        finally:
            sockets.hang_up(connection)


class _Running(NamedTuple):
    """A command that runs: its host, that host's actor, its key there, the error that ends it."""

    host: str
    actor: Any
    key: str
    failure: asyncio.Future[None]


class _OutputThread:
    """Calls an ``Output`` in a thread of its own, because the call may wait for a slow reader."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self._calls: SimpleQueue[
            tuple[Callable[[], None], Callable[[Exception | None], None]] | None
        ] = SimpleQueue()
        _start_daemon(self._work)

    async def __call__(self, call: Callable[[], None]) -> None:
        """Run a call on the thread and wait; raise the error that the call raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self.put(call, partial(_settle_soon, loop, done))
        await done

    def put(self, call: Callable[[], None], finished: Callable[[Exception | None], None]) -> None:
        """Queue a call for the thread, which passes the call's error, or None, to ``finished``."""
        self._calls.put((call, finished))

    def close(self) -> None:
        """End the thread after its current call."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, finished = item
            error = None
            try:
                call()
            except Exception as raised:
                error = raised
            finished(error)


def _settle_soon(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[None], error: Exception | None
) -> None:
    """Complete a future from a thread other than its loop's, as ``_settle`` does."""
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(_settle, future, error)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    """Complete a future: with the error if there is one, else with None."""
    if future.done():  # its waiter was cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class _Reader:
    """Reads input ahead on a thread of its own while the previous piece is sent."""

    def __init__(self, stdin: RawIOBase) -> None:
        self._loop = asyncio.get_running_loop()
        self._stdin = stdin
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):  # a Python object without a descriptor
            self._descriptor = stdin.fileno()
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # no pipe, or over the user's limit for all pipes
                fcntl.fcntl(self._descriptor, fcntl.F_SETPIPE_SZ, conduit.PIPE)
        self._held = bytearray()
        self._stopped = False
        self._ended = False
        self._left = False  # whether the thread has ended
        self._changed = threading.Condition()
        self._some = asyncio.Event()
        _start_daemon(self._work)

    async def read(self) -> bytes:
        """Wait for input and return it; return no bytes at the end, or once stopped."""
        while True:
            await self._some.wait()
            with self._changed:
                data = bytes(self._held)
                self._held.clear()
                self._changed.notify()
                if data or self._left:
                    return data
                self._some.clear()

    def stop(self) -> None:
        """Stop reading ahead if the input has a descriptor; ``pump`` then sends the rest."""
        with self._changed:
            self._stopped = self._descriptor is not None
            self._changed.notify()

    async def pump(self, connection: socket.socket) -> None:
        """Send the rest of the input over a connection, and then the end.

        Raises:
            OSError: the connection failed.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        # A duplicate, because the caller may close the connection while this thread still sends.
        own = connection if isinstance(connection, ssl.SSLSocket) else connection.dup()

        def work() -> None:
            error = None
            try:
                if self._ended or self._descriptor is None:
                    conduit.end(own)
                else:
                    conduit.pump(self._descriptor, own, conduit.PIPE)
            except Exception as raised:
                error = raised
            if own is not connection:
                own.close()
            _settle_soon(self._loop, done, error)

        _start_daemon(work)
        await done

    def _work(self) -> None:
        while not (self._ended or self._stopped):
            try:
                data = self._stdin.read(CHUNK // 2)
            except (OSError, ValueError):  # ValueError: the file was closed
                data = b""
            if data is None and self._descriptor is not None:  # a non-blocking file has none yet
                ready = select.poll()
                ready.register(self._descriptor, select.POLLIN)
                ready.poll()
                continue
            with self._changed:
                self._held += data or b""
                self._ended = not data
                self._notify()
                self._changed.wait_for(lambda: len(self._held) < CHUNK or self._stopped)
        with self._changed:
            self._left = True
            self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._some.set)


def _start_daemon(work: Callable[[], None]) -> None:
    """Run a function on a daemon thread, because it may wait forever for input or a reader."""
    threading.Thread(target=work, daemon=True).start()


def worst(results: Results) -> int:
    """Return one exit code for all hosts: 0 if all commands ended with 0, else the highest.

    If all ended with 0, return the exit code of the error for files that were not collected, or
    of the shortfall, if there is one.
    """
    ends = results.values()
    code = max(r.exit_code if isinstance(r, WheelmountError) else r.code for r in ends)
    lacking = [r.lacking for r in ends if isinstance(r, Result) and r.lacking is not None]
    code = code or max((each.exit_code for each in lacking), default=0)
    return code or (0 if results.shortfall is None else results.shortfall.exit_code)
