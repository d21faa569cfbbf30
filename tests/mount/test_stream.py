"""Blocks over sockets, between processes of one user and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from tests.conftest import NOBODY
from wheelmount.errors import StoreError, TransferError, UnreachableError
from wheelmount.hosts import doorway, runtime, sockets
from wheelmount.hosts.address import OPEN, SECURE, Address
from wheelmount.hosts.credentials import Authority
from wheelmount.hosts.sockets import STEP, Ticket
from wheelmount.mount.transfer import stream
from wheelmount.mount.transfer.ring import Staged
from wheelmount.mount.transfer.stream import (
    GIVEN,
    REPLY,
    REQUEST,
    BlockClient,
    BlockServer,
    block_server,
)

SIZE = 3 << 20
HERE = "127.0.0.1"


@pytest.fixture(params=["machine", OPEN, SECURE])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Address | None:
    """Where this process is reached, by a socket of this machine or over its network."""
    return _reached(None if request.param == "machine" else request.param, monkeypatch)


def _reached(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> Address | None:
    address = None if scheme is None else Address(scheme, HERE, 0)
    identity = Authority.make().issue([HERE])
    monkeypatch.setattr(runtime, "address", lambda: address)
    monkeypatch.setattr(runtime, "identity", lambda: identity)
    return address


def _head(length: int, size: int) -> bytes:
    head: bytes = msgpack.packb((0.0, 0, length, size, b"digest", ()))
    return REPLY.pack(GIVEN, len(head)) + head


class Lending:
    """Two blocks, of which the second is short."""

    def __init__(self) -> None:
        self.blocks = [os.urandom(SIZE), os.urandom(1000)]

    @contextlib.contextmanager
    def lend(self, block: int, packed: bool, urgent: bool) -> Iterator[tuple[Staged, memoryview]]:
        del urgent
        if block >= len(self.blocks):
            raise StoreError(f"there is no block {block}", hint="ask for another")
        data = self.blocks[block]
        yield Staged(0, len(data), len(data), b"digest", (7, 9) if packed else ()), memoryview(data)


@contextlib.contextmanager
def _opened() -> Iterator[tuple[BlockServer, list[bytes]]]:
    lender = Lending()
    before = threading.active_count()
    server = BlockServer(lender, timeout=10)
    try:
        yield server, lender.blocks
    finally:
        server.close()
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before, "threads were left"


def _run(work: Callable[[BlockClient], Coroutine[Any, Any, None]], timeout: float = 10) -> None:
    client = BlockClient(timeout)

    async def main() -> None:
        try:
            await work(client)
        finally:
            client.close()

    asyncio.run(main())
    client._threads.shutdown()


async def _read(client: BlockClient, ticket: Ticket, block: int = 0, packed: bool = False) -> bytes:
    memory = memoryview(bytearray(SIZE))
    changed = (7, 9) if packed else ()

    def then(staged: Staged) -> bytes:
        assert (staged.digest, staged.changed) == (b"digest", changed)
        assert staged.length == staged.size
        return bytes(memory[: staged.size])

    found, pace = await client.read(ticket, block, packed, False, memory, then)
    assert min(pace) >= 0
    return found


def test_blocks_come_over_few_connections(address: Address | None) -> None:
    with _opened() as (server, blocks):

        async def work(client: BlockClient) -> None:
            for packed in (False, True, False):
                wanted = (_read(client, server.ticket, block, packed) for block in (0, 1))
                assert await asyncio.gather(*wanted) == blocks
            (idle,) = client._idle.values()
            assert 1 <= len(idle) <= 2

        _run(work)
    assert isinstance(server.ticket.where, str) is (address is None)


def test_what_cannot_be_given_is_said(address: Address | None) -> None:
    with _opened() as (server, blocks):

        async def work(client: BlockClient) -> None:
            with pytest.raises(TransferError, match="there is no block 2") as failure:
                await _read(client, server.ticket, 2)
            assert failure.value.hint == "ask for another"
            assert await _read(client, server.ticket) == blocks[0]

        _run(work)


def test_who_does_not_know_the_secret_gets_nothing(
    address: Address | None, caplog: pytest.LogCaptureFixture
) -> None:
    with _opened() as (server, blocks):

        async def work(client: BlockClient) -> None:
            with pytest.raises(TransferError, match="hung up"):
                await _read(client, replace(server.ticket, secret=bytes(16)))
            assert await _read(client, server.ticket) == blocks[0]

        _run(work)
    assert "refused who does not know the secret" in caplog.text


def test_a_process_without_a_certificate_of_ours_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _reached(SECURE, monkeypatch)
    with _opened() as (server, _):
        ticket = server.ticket
        assert isinstance(ticket.where, Address)
        with socket.create_connection((ticket.where.host, ticket.where.port), 10) as stranger:
            stranger.sendall(REQUEST.pack(ticket.secret, 0, False, False))
            with contextlib.suppress(ConnectionResetError):
                answer = stranger.recv(100)
                assert answer[:1] in (b"", b"\x15"), "nothing but the alert of TLS, if that"
        _reached(SECURE, monkeypatch)  # with a certificate of another authority

        async def work(client: BlockClient) -> None:
            with pytest.raises(UnreachableError, match="certificate verify failed"):
                await _read(client, ticket)

        _run(work)


def test_another_user_of_the_machine_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _reached(None, monkeypatch)
    with _opened() as (server, _):
        ticket = server.ticket
        program = (
            "import os, socket; os.setgroups([]); os.setgid({0}); os.setuid({0})\n"
            "caller = socket.socket(socket.AF_UNIX); caller.settimeout(10)\n"
            "caller.connect(chr(0) + {1!r})\n"
            "try: caller.sendall({2!r}); print(len(caller.recv(1)))\n"
            "except OSError: print(0)\n"
        )
        request = REQUEST.pack(ticket.secret, 0, False, False)
        for user, expected in ((NOBODY, b"0"), (0, b"1")):
            text = program.format(user, ticket.where, request)
            command = [sys.executable, "-I", "-S", "-c", text]
            done = subprocess.run(command, capture_output=True, timeout=60, check=True)
            assert done.stdout.strip() == expected


def test_a_socket_of_another_user_is_not_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may have taken the name of an server that is gone."""
    program = (
        "import os, socket; os.setgroups([]); os.setgid({0}); os.setuid({0})\n"
        "server = socket.socket(socket.AF_UNIX); server.bind(chr(0) + {1!r}); server.listen()\n"
        "print('ready', flush=True); connection, _ = server.accept(); print(connection.recv(1))\n"
    )
    _reached(None, monkeypatch)
    name = f"wheelmount-test-{os.getpid()}"
    command = [sys.executable, "-I", "-S", "-c", program.format(NOBODY, name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"

        async def work(client: BlockClient) -> None:
            with pytest.raises(UnreachableError, match="belongs to another user"):
                await _read(client, Ticket(name, bytes(16)))

        _run(work)
        assert other.stdout.read() == b"b''\n", "nor is it told the secret"


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize("address", [OPEN, SECURE], indirect=True)
def test_strangers_take_no_more_than_a_few_connections(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 5
    monkeypatch.setattr(doorway, "MOST", most)
    with _opened() as (server, blocks), contextlib.ExitStack() as stack:
        assert isinstance(server.ticket.where, Address)
        place = server.ticket.where.host, server.ticket.where.port

        async def work(client: BlockClient) -> None:
            assert await _read(client, server.ticket) == blocks[0]
            before = threading.active_count()
            silent = [stack.enter_context(socket.create_connection(place)) for _ in range(30)]
            for each in silent:
                each.settimeout(0)
            deadline = time.monotonic() + sockets.CONNECT_TIMEOUT / 2  # before they are given up
            while sum(map(_is_open, silent)) > most and time.monotonic() < deadline:
                time.sleep(0.05)
            assert 0 < sum(map(_is_open, silent)) <= most
            assert await _read(client, server.ticket) == blocks[0], "by the connection it had"
            assert threading.active_count() <= before + most + 1  # and who watches them
            fresh = BlockClient(10)
            assert await _read(fresh, server.ticket) == blocks[0], "and by a new one"
            fresh.close()

        _run(work)


def test_who_drips_a_greeting_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorway, "PROOF_TIMEOUT", 0.5)
    monkeypatch.setattr(doorway, "POLL_INTERVAL", 0.1)
    monkeypatch.setattr(doorway.Doorway.sweep, "__defaults__", (0.5,))
    _reached(SECURE, monkeypatch)
    with _opened() as (server, _):
        assert isinstance(server.ticket.where, Address)
        place = server.ticket.where.host, server.ticket.where.port
        with socket.create_connection(place) as dripping:
            deadline = time.monotonic() + 2 * sockets.CONNECT_TIMEOUT
            dripping.sendall(b"\x16\x03\x01\x04\x00")
            with pytest.raises(OSError):
                while time.monotonic() < deadline:
                    dripping.sendall(b"\0")
                    time.sleep(0.2)


def test_who_is_gone_cannot_be_reached(address: Address | None) -> None:
    with _opened() as (server, _):
        ticket = server.ticket

        async def kept(client: BlockClient) -> None:
            await _read(client, ticket)
            server.close()
            with pytest.raises(TransferError) as failure:
                await _read(client, ticket)  # over the connection that it had, and over none
            assert not isinstance(failure.value, UnreachableError), "it was reached once"

        _run(kept)

    async def new(client: BlockClient) -> None:
        with pytest.raises(UnreachableError):
            await _read(client, ticket)

    _run(new)


@pytest.fixture
def silent() -> Iterator[tuple[Ticket, socket.socket]]:
    """Who accepts and says nothing."""
    with socket.create_server((HERE, 0)) as server:
        where = Address(OPEN, HERE, server.getsockname()[1])
        yield Ticket(where, bytes(16)), server


def test_a_wait_is_bounded(silent: tuple[Ticket, socket.socket]) -> None:
    async def work(client: BlockClient) -> None:
        with pytest.raises(TimeoutError, match="timed out"):
            await _read(client, silent[0])

    _run(work, timeout=0.2)


class Late(Lending):
    """Takes a while to have a block."""

    @contextlib.contextmanager
    def lend(self, block: int, packed: bool, urgent: bool) -> Iterator[tuple[Staged, memoryview]]:
        time.sleep(1.5)
        with super().lend(block, packed, urgent) as lent:
            yield lent


@pytest.mark.slow
def test_who_waits_itself_says_so(address: Address | None) -> None:
    lender = Late()
    late = BlockServer(lender, timeout=0.3)

    async def work(client: BlockClient) -> None:
        for _ in range(2):
            assert await _read(client, late.ticket) == lender.blocks[0]
        assert client.received > 2 * (SIZE + REPLY.size), "its words count as bytes"

    try:
        _run(work, timeout=0.8)
    finally:
        late.close()


@pytest.mark.slow
def test_a_block_may_take_longer_than_a_timeout_as_long_as_it_comes(
    silent: tuple[Ticket, socket.socket],
) -> None:
    ticket, server = silent
    data = os.urandom(20 * STEP)

    def slow() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(_head(len(data), len(data)))
            for begin in range(0, len(data), STEP):
                connection.sendall(data[begin : begin + STEP])
                time.sleep(0.1)

    thread = threading.Thread(target=slow)
    thread.start()

    async def work(client: BlockClient) -> None:
        reading = asyncio.ensure_future(_read(client, ticket))
        while not client.received and not reading.done():
            await asyncio.sleep(0.01)
        assert 0 < client.received < len(data), "bytes count before all have arrived"
        assert await reading == data
        assert client.received == len(data) + REPLY.size

    _run(work, timeout=1)
    thread.join()


@pytest.mark.slow
def test_who_takes_a_block_slowly_gets_all_of_it(address: Address | None) -> None:
    """A link that needs longer for a block than the time-out of who gives it."""
    lender = Lending()
    server = BlockServer(lender, timeout=0.8)
    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(sockets.connect(server.ticket.where))
            connection.settimeout(10)
            connection.sendall(REQUEST.pack(server.ticket.secret, 0, False, False))
            reply = bytearray(REPLY.size)
            assert sockets.receive(connection, memoryview(reply))
            kind, size = REPLY.unpack(reply)
            assert kind == GIVEN
            assert sockets.receive(connection, memoryview(bytearray(size)))
            found = bytearray()
            while len(found) < SIZE:
                piece = bytearray(min(SIZE // 12, SIZE - len(found)))
                assert sockets.receive(connection, memoryview(piece))
                found += piece
                time.sleep(0.1)
            assert found == lender.blocks[0]
    finally:
        server.close()


@contextlib.contextmanager
def _begun(ticket: Ticket, *, urgent: bool) -> Iterator[socket.socket]:
    """A connection over which a block comes, of which nothing was taken yet."""
    with sockets.connect(ticket.where) as connection:
        connection.settimeout(60)
        connection.sendall(REQUEST.pack(ticket.secret, 0, False, urgent))
        reply = bytearray(REPLY.size)
        assert sockets.receive(connection, memoryview(reply))
        _, size = REPLY.unpack(reply)
        assert sockets.receive(connection, memoryview(bytearray(size)))
        yield connection


def _take(connection: socket.socket, size: int) -> int:
    """Take bytes until so many came, or none for a moment; return how many came."""
    taken = 0
    with contextlib.suppress(TimeoutError):
        while taken < size:
            taken += len(connection.recv(1 << 16))
    return taken


def test_a_block_that_a_reader_waits_for_is_sent_first(
    address: Address | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "GIVE_WAY", 60)
    monkeypatch.setattr(stream, "HASTE", 60)
    sending = stream._precedence.sending

    def noted_late(connection: socket.socket, size: int, *, urgent: bool) -> Any:
        if urgent:
            time.sleep(0.3)  # as on a busy machine
        return sending(connection, size, urgent=urgent)

    monkeypatch.setattr(stream._precedence, "sending", noted_late)
    server = BlockServer(Lending(), timeout=60)
    try:
        with _begun(server.ticket, urgent=False) as usual:
            with _begun(server.ticket, urgent=True) as wanted:
                usual.settimeout(0.5)
                first = _take(usual, SIZE)
                assert first < SIZE
                assert _take(wanted, SIZE) == SIZE
            usual.settimeout(60)
            assert _take(usual, SIZE - first) == SIZE - first
    finally:
        server.close()


@pytest.mark.slow
def test_a_reader_whose_link_is_slow_delays_others_for_a_moment_only(
    address: Address | None,
) -> None:
    server = BlockServer(Lending(), timeout=60)
    try:
        with (
            _begun(server.ticket, urgent=True),
            _begun(server.ticket, urgent=False) as usual,
        ):
            assert _take(usual, SIZE) == SIZE
    finally:
        server.close()


@contextlib.contextmanager
def _connected(host: str, room: int = 1 << 20) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection to a host, and the host's end, which takes ``room`` bytes ahead."""
    with socket.create_server((HERE, 0)) as listener, socket.socket() as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        end.bind((host, 0))
        end.connect(listener.getsockname())
        with listener.accept()[0] as connection:
            yield connection, end


def test_blocks_to_hosts_that_are_as_slow_give_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "GIVE_WAY", 60)
    monkeypatch.setattr(stream, "HASTE", 60)
    precedence = stream._Precedence()
    hosts = "127.0.0.2", "127.0.0.3", "127.0.0.4"
    precedence._paces = dict(zip(hosts, (1e-6, 0.5e-6, 0.1e-6), strict=True))
    with contextlib.ExitStack() as opened:
        wanted, alike, fast = (opened.enter_context(_connected(host))[0] for host in hosts)
        with (
            precedence.sending(alike, 1 << 20, urgent=False) as pause_alike,
            precedence.sending(fast, 1 << 20, urgent=False) as pause_fast,
        ):
            waits = threading.Thread(target=pause_alike, daemon=True)
            with precedence.sending(wanted, 1 << 20, urgent=True):
                began = time.monotonic()
                assert pause_fast() == 50_000, "bytes that its link carries in 5 ms"
                assert time.monotonic() - began < 30, "its link is another one"
                waits.start()
                waits.join(0.5)
                assert waits.is_alive()
            waits.join(30)
            assert not waits.is_alive()
            monkeypatch.setattr(stream, "HASTE", 0)
            with precedence.sending(wanted, 1 << 20, urgent=True):
                began = time.monotonic()
                assert pause_alike() == stream.LEAST_PART
                assert time.monotonic() - began < 30, "the other may be lost"
    assert precedence._paces["127.0.0.3"] == 0.5e-6, "what was interrupted tells no pace"


def test_a_block_that_a_reader_waits_for_goes_first_until_it_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "GIVE_WAY", 60)
    monkeypatch.setattr(stream, "HASTE", 60)
    precedence = stream._Precedence()
    precedence._paces = {HERE: 1e-6}
    with _connected(HERE, room=1) as (wanted, reader), _connected(HERE) as (other, _):

        def send() -> None:
            with precedence.sending(wanted, len(data), urgent=True):
                wanted.sendall(data)
                sent.set()

        data, sent = bytes(stream.LEAST_PART), threading.Event()
        threading.Thread(target=send, daemon=True).start()
        assert sent.wait(30)
        with precedence.sending(other, 1 << 20, urgent=False) as pause:
            waits = threading.Thread(target=pause, daemon=True)
            waits.start()
            waits.join(0.5)
            assert waits.is_alive(), "the kernel has it still"
            reader.settimeout(30)
            assert _take(reader, len(data)) == len(data)
            waits.join(30)
            assert not waits.is_alive()


def test_few_parts_are_sent_beside_a_block_that_a_reader_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "GIVE_WAY", 0.05)
    monkeypatch.setattr(stream, "HASTE", 60)
    precedence = stream._Precedence()
    with _connected(HERE) as (connection, _), _connected(HERE) as (wanted, _):

        def parts() -> None:
            with precedence.sending(connection, 1 << 20, urgent=False) as pause:
                for _ in range(4):
                    pause()

        others = [threading.Thread(target=parts, daemon=True) for _ in range(3)]
        began = time.monotonic()
        with precedence.sending(wanted, 1 << 20, urgent=True):
            for each in others:
                each.start()
            for each in others:
                each.join(30)
                assert not each.is_alive()
        assert time.monotonic() - began > 0.5, "twelve parts of three blocks, one every 0.05 s"


def test_who_drips_is_given_up_too(silent: tuple[Ticket, socket.socket]) -> None:
    ticket, server = silent

    def drip() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(REPLY.pack(GIVEN, 1000))
            while True:
                connection.sendall(b"x")
                time.sleep(0.02)

    thread = threading.Thread(target=drip)
    thread.start()

    async def work(client: BlockClient) -> None:
        with pytest.raises(TimeoutError, match="too slowly"):
            await _read(client, ticket)

    _run(work, timeout=0.3)
    thread.join()


@pytest.mark.parametrize(
    "said",
    [
        REPLY.pack(GIVEN, 1 << 31),
        REPLY.pack(GIVEN, 5) + b"never",
        REPLY.pack(GIVEN, 3) + msgpack.packb((0, 1)),
        *(_head(length, size) for length, size in ((SIZE + 1, 1), (1, 2), (1, -1))),
    ],
)
def test_nonsense_is_no_block(silent: tuple[Ticket, socket.socket], said: bytes) -> None:
    ticket, server = silent

    async def work(client: BlockClient) -> None:
        reading = asyncio.ensure_future(_read(client, ticket))
        connection, _ = await asyncio.to_thread(server.accept)
        with connection:
            connection.sendall(said)
            with pytest.raises(TransferError, match="no block"):
                await reading

    _run(work)


def test_a_read_that_is_cancelled_leaves_nothing(silent: tuple[Ticket, socket.socket]) -> None:
    ticket, server = silent

    async def work(client: BlockClient) -> None:
        reading = asyncio.ensure_future(_read(client, ticket))
        connection, _ = await asyncio.to_thread(server.accept)
        with connection:
            assert await asyncio.to_thread(connection.recv, REQUEST.size, socket.MSG_WAITALL)
            reading.cancel()
            assert await asyncio.to_thread(connection.recv, 1) == b""
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not client._idle[ticket.where]

    _run(work)


def test_a_thread_that_cannot_start_costs_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    refused: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "wheelmount-server" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    _reached(None, monkeypatch)
    with _opened() as (server, blocks):
        monkeypatch.setattr(threading.Thread, "start", refuse)

        async def work(client: BlockClient) -> None:
            with pytest.raises(TransferError, match=r"hung up|reset|pipe"):
                await _read(client, server.ticket)
            assert await _read(client, server.ticket) == blocks[0]

        _run(work)
    assert refused


def test_who_cannot_listen_gives_in_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "address", lambda: Address(OPEN, "192.0.2.1", 0))  # nobody's
    assert block_server(Lending(), 10) is None
    assert "bytes go through Monarch" in caplog.text
