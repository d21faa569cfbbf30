"""What commands read and write flows as fast as the slower end takes it, and no faster."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from tests.conftest import Cli
from wheelmount.config import Settings
from wheelmount.errors import HostError, UnreachableError
from wheelmount.hosts import conduit, runtime, sockets
from wheelmount.hosts.address import SECURE, Address
from wheelmount.hosts.command_actor import Command, _Run
from wheelmount.hosts.commands import Commands, Result
from wheelmount.hosts.credentials import Authority
from wheelmount.hosts.local import LocalHosts
from wheelmount.hosts.sockets import Entrance, Ticket

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "wheelmount.cli.main"]


def _copying(settings: Settings, command: Command, data: bytes) -> tuple[str, Result]:
    """Hash of what a command gives back of what it is given, by way of a pipe."""
    reading, writing = os.pipe()

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), open(writing, "wb") as file:
            file.write(data)

    threading.Thread(target=write, daemon=True).start()
    digest = hashlib.sha256()
    with (
        open(reading, "rb", buffering=0) as stdin,
        LocalHosts(1, settings) as hosts,
        Commands(list(hosts), 30) as commands,
    ):
        result = commands.run({"host0": command}, lambda _h, _s, piece: digest.update(piece), stdin)
    found = result["host0"]
    assert isinstance(found, Result), found
    return digest.hexdigest(), found


def test_what_goes_in_comes_out(settings: Settings) -> None:
    data = os.urandom(50_000_000)
    digest, result = _copying(settings, Command(("cat",)), data)
    assert (result.code, digest) == (0, hashlib.sha256(data).hexdigest())


@pytest.fixture
def secured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends in this process, by TLS on loopback."""
    address = Address(SECURE, "127.0.0.1", 0)
    identity = Authority.make().issue(address.names())
    monkeypatch.setattr(runtime, "address", lambda: address)
    monkeypatch.setattr(runtime, "identity", lambda: identity)


def test_frames_go_by_tls(secured: None) -> None:
    data, found = os.urandom(3_000_000), []
    done = threading.Event()

    def serve(connection: socket.socket, let_in: Callable[[], None]) -> None:
        found.append(conduit.answer(connection, entrance.ticket.secret))
        let_in()
        connection.settimeout(None)
        conduit.send(connection, "stdout", data)
        conduit.end(connection)
        done.wait(60)

    entrance = Entrance(serve)
    try:
        with conduit.call(entrance.ticket, "0123456789abcdef", conduit.TAKE, 1 << 22) as connection:
            assert conduit.receive(connection, 1 << 22) == ("stdout", data)
            assert conduit.receive(connection, 1 << 22) is None
        assert found == [("0123456789abcdef", conduit.TAKE, 1 << 22)]
    finally:
        done.set()
        entrance.close()


def test_input_goes_by_tls(secured: None) -> None:
    data = os.urandom(3_000_000)
    ends: list[str] = []
    reading, into = os.pipe()

    def serve(connection: socket.socket, let_in: Callable[[], None]) -> None:
        conduit.answer(connection, entrance.ticket.secret)
        let_in()
        connection.settimeout(None)
        incoming = conduit.Incoming(connection, 1 << 22)
        while incoming.next():
            while incoming.rest:
                incoming.move(into)
        ends.append("end")
        os.close(into)

    entrance = Entrance(serve)
    source, writing = os.pipe()
    threading.Thread(target=_write, args=(writing, data), daemon=True).start()
    try:
        with conduit.call(entrance.ticket, "0123456789abcdef", conduit.GIVE, 1 << 22) as connection:
            pumping = threading.Thread(target=conduit.pump, args=(source, connection, 1 << 20))
            pumping.start()
            with open(reading, "rb") as file:
                assert file.read() == data
            pumping.join(60)
        assert ends == ["end"]
    finally:
        os.close(source)
        entrance.close()


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How connections of commands were meant."""
    called: list[int] = []
    call = conduit.call

    def counted(ticket: Ticket, key: str, way: int, limit: int) -> socket.socket:
        called.append(way)
        return call(ticket, key, way, limit)

    monkeypatch.setattr(conduit, "call", counted)
    return called


def test_much_goes_by_a_connection(settings: Settings, ways: list[int]) -> None:
    data = os.urandom(50_000_000)
    digest, result = _copying(settings, Command(("cat",)), data)
    assert (result.code, digest) == (0, hashlib.sha256(data).hexdigest())
    assert sorted(ways) == [conduit.GIVE, conduit.TAKE]


class _Pipes:
    """What goes into a command and comes out of it, by pipes of this process."""

    def __init__(self, data: bytes) -> None:
        self.their_in, self._in = os.pipe()
        self._out, self.their_out = os.pipe()
        self._data, self._digest = data, hashlib.sha256()
        self._threads = [threading.Thread(target=work) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        with contextlib.suppress(BrokenPipeError), open(self._in, "wb") as file:
            file.write(self._data)

    def _read(self) -> None:
        with open(self._out, "rb", buffering=0) as file:
            while piece := file.read(1 << 20):
                self._digest.update(piece)

    def close(self) -> str:
        """Hash of what came out, once no process can write any more."""
        for each in (self.their_in, self.their_out):
            os.close(each)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "some process holds the other end"
        return self._digest.hexdigest()


def test_a_command_has_the_streams_of_its_client(settings: Settings, ways: list[int]) -> None:
    data = os.urandom(50_000_000)
    pipes = _Pipes(data)
    lent = {"stdin": pipes.their_in, "stdout": pipes.their_out}
    told: list[tuple[str, bytes]] = []
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        script = Command(script=b"cat; echo bad >&2; exit 3")
        result = commands.run(
            {"host0": script}, lambda _h, stream, piece: told.append((stream, piece)), lent=lent
        )["host0"]
    assert isinstance(result, Result), result
    assert (result.code, result.stderr, told) == (3, b"bad\n", [("stderr", b"bad\n")])
    assert pipes.close() == hashlib.sha256(data).hexdigest()
    assert ways == [conduit.LEND]


def test_streams_that_are_not_used_are_given_back(settings: Settings) -> None:
    """Where the command does not start, and where its client thinks better of it."""
    pipes = _Pipes(bytes(5_000_000))
    lent = {"stdin": pipes.their_in, "stdout": pipes.their_out}
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        failed = commands.run({"host0": Command(("/nowhere/none",))}, lent=lent)["host0"]
        assert isinstance(failed, HostError)

        async def lend() -> None:
            loan = await commands._lend("host0", "0123456789abcdef", lent)
            assert loan is not None
            loan.close()

        runtime.complete(lend())
        pipes.close()


def test_streams_that_a_command_may_have_are_not_passed_on_as_well(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that read one input would each have a part of it. The late answer is made up."""
    lend = conduit.lend

    def without_answer(connection: socket.socket, streams: Mapping[str, int]) -> None:
        lend(connection, streams)
        raise TimeoutError("timed out")

    monkeypatch.setattr(conduit, "lend", without_answer)
    reader, writer = os.pipe()
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        result = commands.run({"host0": Command(("cat",))}, lent={"stdin": reader})["host0"]
        assert isinstance(result, HostError), result
        os.write(writer, b"whole")
        assert os.read(reader, 10) == b"whole"
    os.close(reader)
    os.close(writer)


def test_streams_of_several_are_passed_on(settings: Settings, ways: list[int]) -> None:
    lent = {"stdin": 0, "stdout": 1}
    with LocalHosts(2, settings) as hosts, Commands(list(hosts), 30) as commands:
        both = dict.fromkeys(("host0", "host1"), Command(("echo", "said")))
        results = commands.run(both, lent=lent)
    assert results.texts == {"host0": "said\n", "host1": "said\n"}, results
    assert conduit.LEND not in ways


def test_messages_are_left_where_nothing_can_be_reached(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_given: object) -> socket.socket:
        raise UnreachableError("swallowed")

    monkeypatch.setattr(conduit, "call", unreachable)
    data = os.urandom(20_000_000)
    digest, result = _copying(settings, Command(("cat",)), data)
    assert (result.code, digest) == (0, hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("direction", [conduit.GIVE, conduit.TAKE])
def test_a_connection_that_is_cut_is_an_error(
    direction: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither the end of the output nor that of the input."""
    call = conduit.call

    def cut(ticket: Ticket, key: str, wanted: int, limit: int) -> socket.socket:
        connection = call(ticket, key, wanted, limit)
        if wanted == direction:
            sockets.hang_up(connection)
        return connection

    monkeypatch.setattr(conduit, "call", cut)
    with pytest.raises(AssertionError, match="connection that carried a command's"):
        _copying(settings, Command(("cat",)), bytes(50_000_000))


def test_input_may_be_short_of_bytes_for_a_while(settings: Settings) -> None:
    """Much, little, nothing, much again; from a descriptor that does not block."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    data = [os.urandom(size) for size in (100, 3_000_000, 1, 70_000, 5_000_000, 10)]

    def write() -> None:
        for piece in data:
            with open(writing, "wb", closefd=False) as file:
                file.write(piece)
            time.sleep(0.2)  # not to be sent together, as a rule
        os.close(writing)

    digest = hashlib.sha256()
    threading.Thread(target=write, daemon=True).start()
    with (
        open(reading, "rb", buffering=0) as stdin,
        LocalHosts(1, settings) as hosts,
        Commands(list(hosts), 30) as commands,
    ):
        command = {"host0": Command(("cat",))}
        commands.run(command, lambda _h, _s, piece: digest.update(piece), stdin).raise_for_status()
    assert digest.hexdigest() == hashlib.sha256(b"".join(data)).hexdigest()


class _Memory(io.RawIOBase):
    """A file with no descriptor."""

    def __init__(self, data: bytes) -> None:
        self._rest = data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        piece, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)


def test_input_may_be_of_any_kind(settings: Settings, workplace: Path) -> None:
    data = (b"x" * 99 + b"\n") * 20_000
    (workplace / "input").write_bytes(data)
    terminal, far = pty.openpty()
    tty.setraw(far)
    sending, receiving = socket.socketpair()
    for writing in (os.dup(terminal), sending.detach()):
        threading.Thread(target=_write, args=(writing, data), daemon=True).start()
    count = Command(("sh", "-c", f"head -c {len(data)} | sha256sum"))
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        for opened in (workplace / "input", far, receiving.detach(), None):
            with _Memory(data) if opened is None else open(opened, "rb", buffering=0) as stdin:
                result = commands.run({"host0": count}, stdin=stdin)["host0"]
            assert isinstance(result, Result), result
            assert result.text.split()[0] == hashlib.sha256(data).hexdigest(), opened
    os.close(terminal)


def _write(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(data)


def test_a_command_need_not_read(settings: Settings) -> None:
    _, result = _copying(settings, Command(("sh", "-c", "sleep 0.5; exit 3")), bytes(5_000_000))
    assert result.code == 3


def test_a_reader_that_pauses_is_waited_for_by_who_writes(
    settings: Settings, workplace: Path
) -> None:
    """Longer than a command runs on without a word of its client."""
    mark = workplace / "written"
    script = (
        "for n in $(seq 64); do head -c 1048576 /dev/zero; echo $n >" + str(mark) + "; done; exit 5"
    )
    taken: list[int] = []

    def pause(_host: str, _stream: str, piece: bytes) -> None:
        if not taken:
            time.sleep(4)
            assert int(mark.read_text()) < 32, "it waits"
        taken.append(len(piece))

    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30, lease=1) as commands:
        results = commands.run({"host0": Command(script=script.encode())}, pause)
    result = results["host0"]
    assert isinstance(result, Result), result
    assert (result.code, sum(taken)) == (5, 64 << 20)


def test_an_output_that_fails_is_not_taken_for_a_cut_connection(settings: Settings) -> None:
    def fail(_host: str, _stream: str, _piece: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space is left")

    for size in (1_000, 50_000_000):  # by messages, by a connection
        command = Command(("head", "-c", str(size), "/dev/zero"))
        with (
            LocalHosts(2, settings) as hosts,
            Commands(list(hosts), 30) as commands,
            pytest.raises(OSError, match="no space is left"),
        ):
            commands.run(dict.fromkeys(("host0", "host1"), command), fail)


def test_a_command_that_nobody_wants_any_more_ends(settings: Settings) -> None:
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30, lease=1) as commands:
        commands._lease = 1000  # it does not say so any more

        def block(_host: str, _stream: str, _piece: bytes) -> None:
            for state in (True, False):  # it is there, and then it is not
                deadline = time.monotonic() + 60
                while _sleeping("43.21") != state and time.monotonic() < deadline:
                    time.sleep(0.1)

        command = Command(script=b"yes | head -c 1000; sleep 43.21")
        error = commands.run({"host0": command}, block)["host0"]
        assert isinstance(error, HostError)
        assert "had not been heard of" in error.message


def _sleeping(mark: str) -> bool:
    lines = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    return ["sleep", mark] in lines


def test_little_output_is_collected_for_a_moment(settings: Settings, workplace: Path) -> None:
    """A suite of tests writes each dot by itself: a report for each takes as long as the suite."""
    script = """
import time
for number in range(2000):
    print(number, flush=True)
    time.sleep(0.001)
"""
    pieces: list[bytes] = []

    def run(*argv: str) -> Result:
        def keep(_host: str, _stream: str, data: bytes) -> None:
            pieces.append(data)
            for line in data.splitlines():
                (workplace / "work" / line.decode()).touch()

        pieces.clear()
        result = commands.run({"host0": Command(argv)}, keep)["host0"]
        assert isinstance(result, Result), result
        return result

    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        # The first pieces come at once: each line here is written when the one before has come.
        seen = f"until [ -e {workplace}/work/$n ]; do sleep 0.01; done"
        run("sh", "-c", f"for n in a b c d e; do echo $n; {seen}; done")
        assert pieces == [b"a\n", b"b\n", b"c\n", b"d\n", b"e\n"]
        result = run(sys.executable, "-c", script)
        assert b"".join(pieces) == b"".join(b"%d\n" % number for number in range(2000))
        assert len(pieces) < 30 + result.seconds / 0.05


def test_a_command_that_does_not_end_although_it_was_killed_ends_its_time_out(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a network file system hangs."""
    kills: list[_Run] = []
    command = Command(("sleep", "100"), timeout=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(_Run, "_kill", lambda run: kills.append(run))
        patch.setattr(subprocess.Popen, "poll", lambda _: None)
        run = _Run(command, workplace / "work" / "run", {}, True, {})

        async def read() -> tuple[bytes, int]:
            errors = b""
            while True:
                report = await run.report(1 << 20, 0)
                errors += report.stderr
                if report.code is not None:
                    return errors, report.code

        try:
            errors, code = asyncio.run(asyncio.wait_for(read(), 30))
            run.end()
        finally:
            os.kill(run._process.pid, signal.SIGKILL)
    run._process.wait()
    assert code == 124
    assert errors.startswith(b"error: the command was ended: it took longer than 0.1 s, was killed")
    assert kills == [run], "the client does not wait for it again"
    assert not run._directory.exists()


def test_a_shorter_interval_counts_at_once(workplace: Path) -> None:
    """As when most of a thousand commands have ended."""

    async def report() -> float:
        chatty = Command(("sh", "-c", "while echo x; do sleep 0.01; done"))
        run = _Run(chatty, workplace / "work" / "run", {}, False, {})
        try:
            run._scheduled = time.monotonic() + 40
            began = time.monotonic()
            await run.report(1000, 0.05)
            return time.monotonic() - began
        finally:
            run.end()

    assert asyncio.run(report()) < 20


PAUSE = 0.01
"""Seconds in which a client asks for more, and a writer fills the pipe."""

LEAVES_A_WRITER = Command(("sh", "-c", "yes & sleep 0.3; echo mine >&2; exit 3"))


def test_reports_end_with_the_command_though_it_leaves_a_writer(workplace: Path) -> None:
    run = _Run(LEAVES_A_WRITER, workplace / "work" / "run", {}, False, {})

    async def read() -> tuple[bytes, int | None]:
        late, errors = 0, b""
        while late < 4 * conduit.PIPE:
            await asyncio.sleep(PAUSE)
            ended = run._process.poll() is not None
            report = await run.report(1 << 20, 0)
            errors += report.stderr
            late += len(report.stdout) if ended else 0
            if report.code is not None:
                return errors, report.code
        return errors, None

    try:
        assert asyncio.run(read()) == (b"mine\n", 3)
    finally:
        _end_with_descendants(run)


def test_a_connection_ends_with_the_command_though_it_leaves_a_writer(workplace: Path) -> None:
    run = _Run(LEAVES_A_WRITER, workplace / "work" / "run", {}, False, {})
    ours, theirs = socket.socketpair()

    def give() -> None:
        with contextlib.suppress(OSError):  # the test has failed
            run.give(theirs, 1 << 20)

    thread = threading.Thread(target=give)
    thread.start()
    try:
        late, errors = 0, b""
        while (frame := conduit.receive(ours, 1 << 20)) is not None:
            time.sleep(PAUSE)
            late += len(frame[1]) if run._process.poll() is not None else 0
            errors += frame[1] if frame[0] == "stderr" else b""
            assert late < 64 * conduit.PIPE  # which are more than sockets hold
        assert errors == b"mine\n"
    finally:
        ours.close()
        thread.join()
        theirs.close()
        _end_with_descendants(run)


def _end_with_descendants(run: _Run) -> None:
    run._kill()
    run.end()


def test_in_order_begins_with_the_first_line(cli: Cli, source: Path, workplace: Path) -> None:
    go = workplace / "go"
    script = workplace / "script"
    script.write_text(
        'echo "begin $WHEELMOUNT_RANK"; echo bad >&2\n'
        f"while [ $WHEELMOUNT_RANK = 0 -a ! -e {go} ]; do sleep 0.05; done; printf end"
    )
    command = [*COMMAND, "run", "-q", "--hosts", "local:2", str(source), str(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as client:  # type: ignore[call-overload]
        assert client.stdout.readline() == b"== host0 ==\n"
        assert client.stdout.readline() == b"begin 0\n"
        go.touch()
        out, errors = client.communicate(timeout=60)
    assert out == b"end\n== host1 ==\nbegin 1\nend\n"
    assert errors == b"== host0 stderr ==\nbad\n== host1 stderr ==\nbad\n"
    alone = cli("run", "-q", "--hosts", "local:1", source, script)
    assert (alone.stdout, alone.stderr) == ("begin 0\nend", "bad\n"), "nothing is added"


def test_much_output_takes_little_memory(source: Path, workplace: Path) -> None:
    script = workplace / "script"
    script.write_text("head -c 134217728 /dev/zero")
    command = [*COMMAND, "run", "-q", "--hosts", "local:3", str(source), str(script)]
    measure = "import os, resource, subprocess, sys; " + (
        "code = subprocess.run(sys.argv[1:]).returncode; "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr); "
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", measure, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    # Of all processes that it waited for; hosts have less.
    assert int(done.stderr.splitlines()[-1]) < 200 << 10


MANY = """
import sys
from wheelmount.config import Settings
from wheelmount.hosts import runtime
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Commands
from wheelmount.hosts.local import LocalHosts

runtime.own_process()
settings, taken = Settings(runtime_dir=sys.argv[1]), 0

def take(_name, _stream, piece):
    global taken
    taken += len(piece)

names = {f"host{n % 2}:{n}": f"host{n % 2}" for n in range(64)}
command = Command(("head", "-c", str(16 << 20), "/dev/zero"))
with LocalHosts(2, settings) as hosts, Commands(list(hosts), 60) as commands:
    commands.run(dict.fromkeys(names, command), take, hosts=names).raise_for_status()
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(taken, peak)
"""


def test_output_of_sixty_four_takes_little_memory(settings: Settings) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY, settings.runtime_dir],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    taken, peak = map(int, done.stdout.split())
    assert taken == 64 * 16 << 20
    assert peak < 200 << 10, "in KiB, of which Monarch takes more than half"
