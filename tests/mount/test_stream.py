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

import pytest

from tests.conftest import NOBODY
from wheelmount.errors import TransferError, UnreachableError
from wheelmount.hosts import engine
from wheelmount.hosts.address import OPEN, SECURE, Address
from wheelmount.hosts.credentials import Authority
from wheelmount.mount import stream
from wheelmount.mount.stream import REQUEST, Inlet, Outlet, Ticket

SIZE = 3 << 20
HERE = "127.0.0.1"


@pytest.fixture(params=["machine", OPEN, SECURE])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Address | None:
    """Where this process is reached, by a socket of this machine or over its network."""
    return _reached(None if request.param == "machine" else request.param, monkeypatch)


def _reached(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> Address | None:
    address = None if scheme is None else Address(scheme, HERE, 0)
    identity = Authority.make().issue([HERE])
    monkeypatch.setattr(engine, "address", lambda: address)
    monkeypatch.setattr(engine, "identity", lambda: identity)
    return address


@contextlib.contextmanager
def _opened(slots: int = 2) -> Iterator[tuple[Outlet, list[bytes]]]:
    memory = [os.urandom(SIZE) for _ in range(slots)]
    before = threading.active_count()
    outlet = Outlet([memoryview(slot) for slot in memory], timeout=10)
    try:
        yield outlet, memory
    finally:
        outlet.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before, "threads were left"


def _run(work: Callable[[Inlet], Coroutine[Any, Any, None]], timeout: float = 10) -> None:
    inlet = Inlet(timeout)

    async def main() -> None:
        try:
            await work(inlet)
        finally:
            inlet.close()

    asyncio.run(main())
    inlet._threads.shutdown()


async def _read(inlet: Inlet, ticket: Ticket) -> bytes:
    view = memoryview(bytearray(ticket.size))
    return await inlet.read(ticket, view, lambda: bytes(view))


def test_memory_is_read_over_few_connections(address: Address | None) -> None:
    with _opened() as (outlet, memory):

        async def work(inlet: Inlet) -> None:
            for _ in range(3):
                wanted = [outlet.ticket(0, SIZE), outlet.ticket(1, 1000)]
                got = await asyncio.gather(*(_read(inlet, ticket) for ticket in wanted))
                assert got == [memory[0], memory[1][:1000]]
            (idle,) = inlet._idle.values()
            assert 1 <= len(idle) <= 2

        _run(work)
    assert isinstance(outlet.ticket(0, 1).where, str) is (address is None)


def test_who_does_not_know_the_secret_gets_nothing(
    address: Address | None, caplog: pytest.LogCaptureFixture
) -> None:
    with _opened() as (outlet, memory):
        right = outlet.ticket(0, SIZE)

        async def work(inlet: Inlet) -> None:
            for wrong in (replace(right, secret=bytes(16)), replace(right, slot=2)):
                with pytest.raises(TransferError, match="hung up"):
                    await _read(inlet, wrong)
            assert await _read(inlet, right) == memory[0]

        _run(work)
    assert "refused who does not know the secret" in caplog.text


def test_a_process_without_a_certificate_of_ours_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _reached(SECURE, monkeypatch)
    with _opened() as (outlet, _):
        ticket = outlet.ticket(0, SIZE)
        assert isinstance(ticket.where, Address)
        with socket.create_connection((ticket.where.host, ticket.where.port), 10) as stranger:
            stranger.sendall(REQUEST.pack(ticket.secret, 0, SIZE))
            with contextlib.suppress(ConnectionResetError):
                answer = stranger.recv(100)
                assert answer[:1] in (b"", b"\x15"), "nothing but the alert of TLS, if that"
        _reached(SECURE, monkeypatch)  # with a certificate of another authority

        async def work(inlet: Inlet) -> None:
            with pytest.raises(UnreachableError, match="certificate verify failed"):
                await _read(inlet, ticket)

        _run(work)


def test_another_user_of_the_machine_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _reached(None, monkeypatch)
    with _opened() as (outlet, _):
        ticket = outlet.ticket(0, 5)
        program = (
            "import os, socket; os.setgroups([]); os.setgid({0}); os.setuid({0})\n"
            "caller = socket.socket(socket.AF_UNIX); caller.settimeout(10)\n"
            "caller.connect(chr(0) + {1!r})\n"
            "try: caller.sendall({2!r}); print(caller.recv(5))\n"
            "except OSError: print(b'')\n"
        )
        request = REQUEST.pack(ticket.secret, 0, 5)
        for user, expected in ((NOBODY, b""), (0, bytes(outlet._slots[0][:5]))):
            text = program.format(user, ticket.where, request)
            command = [sys.executable, "-I", "-S", "-c", text]
            done = subprocess.run(command, capture_output=True, timeout=60, check=True)
            assert done.stdout.strip() == repr(expected).encode()


def test_who_is_gone_cannot_be_reached(address: Address | None) -> None:
    with _opened() as (outlet, _):
        ticket = outlet.ticket(0, SIZE)

        async def kept(inlet: Inlet) -> None:
            await _read(inlet, ticket)
            outlet.close()
            with pytest.raises(TransferError):
                await _read(inlet, ticket)  # over the connection that it had

        _run(kept)

    async def new(inlet: Inlet) -> None:
        with pytest.raises(UnreachableError):
            await _read(inlet, ticket)

    _run(new)


@pytest.fixture
def silent() -> Iterator[tuple[Ticket, socket.socket]]:
    """Who accepts and says nothing."""
    with socket.create_server((HERE, 0)) as server:
        where = Address(OPEN, HERE, server.getsockname()[1])
        yield Ticket(where, bytes(16), 0, SIZE), server


def test_a_wait_is_bounded(silent: tuple[Ticket, socket.socket]) -> None:
    async def work(inlet: Inlet) -> None:
        with pytest.raises(TransferError, match="timed out"):
            await _read(inlet, silent[0])

    _run(work, timeout=0.2)


def test_who_drips_is_given_up_too(silent: tuple[Ticket, socket.socket]) -> None:
    ticket, server = silent

    def drip() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            while True:
                connection.sendall(b"x")
                time.sleep(0.02)

    thread = threading.Thread(target=drip)
    thread.start()

    async def work(inlet: Inlet) -> None:
        with pytest.raises(TransferError, match="took too long"):
            await _read(inlet, ticket)

    _run(work, timeout=0.3)
    thread.join()


def test_a_read_that_is_cancelled_leaves_nothing(silent: tuple[Ticket, socket.socket]) -> None:
    ticket, server = silent

    async def work(inlet: Inlet) -> None:
        reading = asyncio.ensure_future(_read(inlet, ticket))
        connection, _ = await asyncio.to_thread(server.accept)
        with connection:
            assert await asyncio.to_thread(connection.recv, REQUEST.size, socket.MSG_WAITALL)
            reading.cancel()
            assert await asyncio.to_thread(connection.recv, 1) == b""
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not inlet._idle[ticket.where]

    _run(work)


def test_who_cannot_listen_gives_in_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "address", lambda: Address(OPEN, "192.0.2.1", 0))  # nobody's
    assert stream.outlet([], 10) is None
    assert "bytes go through Monarch" in caplog.text
