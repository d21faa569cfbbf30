"""Blocks over sockets: from a ring in one process into memory of another.

Where there is no RDMA device, Monarch's ``RDMABuffer`` travels in its messages, at a third of the
speed of a socket (``benchmarks.rdma``). So there bytes go over connections of their own, and only
bytes: what is staged, where and until when is agreed upon through Monarch, and whoever connects
must name the secret that came with that.

A process is reached where Monarch is: at its address on the network, with its certificate, or where
it has none, at a socket of this machine that hangs up on other users.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from wheelmount.errors import TransferError, UnreachableError
from wheelmount.hosts import engine, gate
from wheelmount.hosts.address import SECURE, Address

log = logging.getLogger("wheelmount")

REQUEST = struct.Struct("<16sIQ")
"""What is asked for: secret, slot, bytes."""

CONNECT_TIMEOUT = 5.0
"""Seconds until a way that swallows what is sent counts as closed; there is another."""

READERS = 64
"""Blocks that one host reads at the same time, at most; others wait for these."""

BACKLOG = 128
"""Connections that wait to be accepted."""

Result = TypeVar("Result")
Where = Address | str
"""A place on the network, or the name of an abstract Unix socket (unix(7)), without its zero."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one must know to read a staged block.

    Attributes:
        where: an ``Outlet`` listens.
        secret: of that outlet, 16 bytes.
        slot: of its memory.
        size: bytes.
    """

    where: Where
    secret: bytes
    slot: int
    size: int


class Outlet:
    """Memory that others may read, as long as it is not closed.

    Args:
        slots: pieces of memory.
        timeout: seconds that a piece may take to be sent.

    Raises:
        OSError: this process cannot listen where it is reached.
    """

    def __init__(self, slots: Sequence[memoryview], timeout: float) -> None:
        self._slots = slots
        self._timeout = timeout
        self._secret = secrets.token_bytes(16)
        self._open: set[socket.socket] = set()
        self._closed = False
        self._turn = threading.Lock()
        self._where: Where
        address = engine.address()
        self._context = None
        if address is None:
            name = f"wheelmount-{secrets.token_hex(16)}"
            self._listening = socket.socket(socket.AF_UNIX)
            self._listening.bind(f"\0{name}")
            self._listening.listen(BACKLOG)
            self._where = name
        else:
            if address.scheme == SECURE:
                self._context = _context(ssl.PROTOCOL_TLS_SERVER)
            self._listening = socket.create_server((address.host, 0), backlog=BACKLOG)
            self._where = replace(address, port=self._listening.getsockname()[1])
        threading.Thread(target=self._accept, name="wheelmount-outlet", daemon=True).start()

    def ticket(self, slot: int, size: int) -> Ticket:
        """Let others read the first ``size`` bytes of a slot."""
        return Ticket(self._where, self._secret, slot, size)

    def close(self) -> None:
        """Hang up on all, and let nobody connect."""
        with self._turn:
            self._closed = True
            for each in [self._listening, *self._open]:
                _hang_up(each)

    def _accept(self) -> None:
        with self._listening:
            while not self._closed:
                try:
                    connection, _ = self._listening.accept()
                except OSError:
                    if not self._closed:  # of who is gone already, or no descriptor is free
                        time.sleep(0.1)
                    continue
                threading.Thread(
                    target=self._serve, args=(connection,), name="wheelmount-outlet", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            if not gate.own(connection):
                return
            connection.settimeout(CONNECT_TIMEOUT)  # until it is known who calls
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
                stack.enter_context(connection)
            with self._turn:
                if self._closed:
                    return
                self._open.add(connection)
            try:
                self._answer(connection)
            finally:
                with self._turn:
                    self._open.discard(connection)

    def _answer(self, connection: socket.socket) -> None:
        request = memoryview(bytearray(REQUEST.size))
        known = False
        while _receive(connection, request):
            secret, slot, size = REQUEST.unpack(request)
            if not hmac.compare_digest(secret, self._secret) or slot >= len(self._slots):
                log.warning("security: refused who does not know the secret of a stream")
                return
            if not known:
                known = True
                _prepare(connection)
            connection.settimeout(self._timeout)
            connection.sendall(self._slots[slot][:size])
            connection.settimeout(None)  # the next block may be wanted much later


def outlet(slots: Sequence[memoryview], timeout: float) -> Outlet | None:
    """An outlet, if this process can have one; see there."""
    try:
        return Outlet(slots, timeout)
    except OSError as error:
        log.warning("bytes go through Monarch's messages: %s", error)
        return None


class Inlet:
    """Reads from outlets, over connections that are kept for the next block.

    Args:
        timeout: seconds that a piece of memory may take.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._idle: defaultdict[Where, list[socket.socket]] = defaultdict(list)
        self._threads = ThreadPoolExecutor(READERS, "wheelmount-inlet")
        self._closed = False

    async def read(self, ticket: Ticket, view: memoryview, then: Callable[[], Result]) -> Result:
        """Read what a ticket is for, and go on with it on the same thread.

        Args:
            ticket: of an outlet.
            view: ``ticket.size`` bytes. If this fails, some may be changed, now or a little later.
            then: called with nothing once all is there; what it returns is returned.

        Raises:
            UnreachableError: nobody could be connected to.
            TransferError: not all came.
        """
        loop = asyncio.get_running_loop()
        idle = self._idle[ticket.where]
        if idle:
            connection = idle.pop()
        else:
            connecting = self._threads.submit(_connect, ticket.where)
            try:
                connection = await asyncio.wrap_future(connecting, loop=loop)
            except asyncio.CancelledError:
                connecting.add_done_callback(_close_made)
                raise
        work = self._threads.submit(self._read, connection, ticket, view, then)
        try:
            result = await asyncio.wrap_future(work, loop=loop)
        except BaseException:
            _hang_up(connection)  # wakes the thread where it still reads
            work.add_done_callback(lambda _work: connection.close())
            raise
        if self._closed:
            connection.close()
        else:
            idle.append(connection)
        return result

    def _read(
        self,
        connection: socket.socket,
        ticket: Ticket,
        view: memoryview,
        then: Callable[[], Result],
    ) -> Result:
        deadline = time.monotonic() + self._timeout
        try:
            connection.settimeout(self._timeout)
            connection.sendall(REQUEST.pack(ticket.secret, ticket.slot, ticket.size))
            whole = _receive(connection, view, deadline)
        except OSError as error:
            raise TransferError(f"{_name(ticket.where)}: {error.strerror or error}") from None
        if not whole:
            raise TransferError(f"{_name(ticket.where)} hung up")
        return then()

    def close(self) -> None:
        """Let go of connections that nobody reads from; the others follow."""
        self._closed = True
        for idle in self._idle.values():
            while idle:
                idle.pop().close()


def _receive(connection: socket.socket, view: memoryview, deadline: float | None = None) -> bool:
    """Fill memory; False if the other end hung up before.

    Raises:
        OSError: the connection failed, or the deadline passed.
    """
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if not count:
            return False
        done += count
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError("it took too long")
    return True


def _connect(where: Where) -> socket.socket:
    try:
        if isinstance(where, str):
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.settimeout(CONNECT_TIMEOUT)
                connection.connect(f"\0{where}")
            except BaseException:
                connection.close()
                raise
        else:
            connection = socket.create_connection((where.host, where.port), CONNECT_TIMEOUT)
            if where.scheme == SECURE:
                context = _context(ssl.PROTOCOL_TLS_CLIENT)
                connection = context.wrap_socket(connection, server_hostname=where.host)
        _prepare(connection)
    except OSError as error:
        raise UnreachableError(f"{_name(where)}: {error.strerror or error}") from None
    return connection


def _prepare(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _close_made(connecting: Future[socket.socket]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Not SSLSocket's: that has other threads go on without decrypting.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _context(protocol: ssl._SSLMethod) -> ssl.SSLContext:
    """For TLS with certificates of the user's own authority, asked for both ways."""
    identity = engine.identity()
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=identity["HYPERACTOR_TLS_CA"])
    context.verify_mode = ssl.CERT_REQUIRED
    memory = os.memfd_create("wheelmount-certificate")  # ssl wants a file, and no disk is to see it
    try:
        text = identity["HYPERACTOR_TLS_CERT"] + identity["HYPERACTOR_TLS_KEY"]
        os.write(memory, text.encode())
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def _name(where: Where) -> str:
    return "another process of this machine" if isinstance(where, str) else str(where)
