"""Connections between wheelmount's processes, separate from Monarch's: listeners and callers.

A process sends its address and secret through Monarch (``Ticket``). It listens at Monarch's address
on the network, with Monarch's certificate; without a certificate, at a socket of this machine that
rejects other users.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import secrets
import socket
import ssl
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from wheelmount.errors import UnreachableError
from wheelmount.hosts import runtime, socketguard
from wheelmount.hosts.address import SECURE, Address
from wheelmount.hosts.doorway import Doorway

STEP = 4096
"""Bytes that must arrive within a time-out; a whole block may take as long as its link needs."""

CONNECT_TIMEOUT = 5.0
"""Seconds after which a connection attempt without an answer has failed."""

BACKLOG = 128
"""Maximum number of connections that wait to be accepted."""

UNSENT = 128 << 10
"""Maximum unsent bytes of a connection in the kernel: urgent bytes cannot overtake those that the
kernel already has."""

Where = Address | str
"""A network address, or the name of an abstract Unix socket (unix(7)) without the leading zero."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The address and secret that a caller needs to reach a process.

    Attributes:
        where: the address at which an ``Entrance`` listens.
        secret: the listener's secret, 16 bytes.
    """

    where: Where
    secret: bytes


def listen() -> tuple[Where, socket.socket]:
    """Listen at this process's address; return the address and the listening socket.

    Raises:
        OSError: the process cannot listen there.
    """
    address = runtime.address()
    if address is not None:
        (family, _, _, _, place), *_ = socket.getaddrinfo(address.host, 0, type=socket.SOCK_STREAM)
        listening = socket.create_server(place, family=family, backlog=BACKLOG)
        return replace(address, port=listening.getsockname()[1]), listening
    name = f"wheelmount-{secrets.token_hex(16)}"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(_abstract(name))
    listening.listen(BACKLOG)
    return name, listening


def connect(where: Where) -> socket.socket:
    """Connect to an address.

    Raises:
        UnreachableError: nothing listens there, or the listener is another user's.
    """
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(where, str):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.settimeout(CONNECT_TIMEOUT)
                connection.connect(_abstract(where))
                # Any user may take a name after its owner ended.
                if not socketguard.own(connection):
                    raise UnreachableError(f"{name(where)} belongs to another user")
            else:
                place = where.host, where.port
                connection = stack.enter_context(socket.create_connection(place, CONNECT_TIMEOUT))
                if where.scheme == SECURE:
                    context = trust(ssl.PROTOCOL_TLS_CLIENT)
                    connection = context.wrap_socket(connection, server_hostname=where.host)
                    stack.enter_context(connection)
                prepare(connection)
        except OSError as error:
            raise UnreachableError(f"{name(where)}: {error.strerror or error}") from None
        stack.pop_all()
    return connection


def prepare(connection: socket.socket) -> None:
    """Set options: small messages are sent at once, lost peers noticed, few bytes left unsent."""
    if connection.family != socket.AF_UNIX:
        limit_unsent(connection, UNSENT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def limit_unsent(connection: socket.socket, size: int) -> None:
    """Make a connection accept bytes only while fewer than ``size`` earlier bytes are unsent."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)


def unacknowledged(connection: socket.socket) -> int:
    """Return the number of sent bytes that the peer has not acknowledged."""
    count = array.array("i", [0])
    fcntl.ioctl(connection, termios.TIOCOUTQ, count)
    return count[0]


def trust(protocol: ssl._SSLMethod) -> ssl.SSLContext:
    """Return a TLS context that presents, and requires, a certificate of the user's own authority.

    Args:
        protocol: the side of this process: ``PROTOCOL_TLS_CLIENT`` or ``PROTOCOL_TLS_SERVER``.
    """
    identity = runtime.identity()
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=identity["HYPERACTOR_TLS_CA"])
    context.verify_mode = ssl.CERT_REQUIRED
    memory = os.memfd_create("wheelmount-certificate")  # ssl needs a file; keep the key off disks
    try:
        text = identity["HYPERACTOR_TLS_CERT"] + identity["HYPERACTOR_TLS_KEY"]
        os.write(memory, text.encode())
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def receive(
    connection: socket.socket, view: memoryview, note: Callable[[int], object] = lambda _: None
) -> bool:
    """Receive until a buffer is full; return False if the peer closed the connection before.

    Args:
        connection: the connection; its time-out, if any, is for each step of ``STEP`` bytes.
        view: the buffer.
        note: called with the number of bytes, whenever some have arrived.

    Raises:
        TimeoutError: a step did not arrive in time.
        OSError: the connection failed.
    """
    timeout = connection.gettimeout()
    step, deadline = 0, None if timeout is None else time.monotonic() + timeout
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if not count:
            return False
        done += count
        note(count)
        if timeout is not None and deadline is not None:
            now = time.monotonic()
            if done - step >= STEP:
                step, deadline = done, now + timeout
            elif now > deadline:
                raise TimeoutError("the data arrived too slowly")
    return True


def send(
    connection: socket.socket, view: memoryview, pause: Callable[[], int] | None = None
) -> None:
    """Send bytes in parts, each within the connection's time-out.

    The time-out of ``sendall`` would be for all parts together.

    Args:
        connection: the connection, with or without a time-out.
        view: the bytes.
        pause: called before each part; returns the part's maximum size in bytes.

    Raises:
        OSError: the connection failed, or the kernel accepted no bytes in time.
    """
    done = 0
    while done < len(view):
        part = UNSENT if pause is None else pause()
        done += connection.send(view[done : done + part])  # with TLS, sends the whole part


def hang_up(connection: socket.socket) -> None:
    """Shut a connection down to wake threads at both ends; the caller must still close it."""
    with contextlib.suppress(OSError):
        # Not SSLSocket.shutdown, after which other threads would read without decrypting.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def name(where: Where) -> str:
    """Return an address as text for messages."""
    return "another process of this machine" if isinstance(where, str) else str(where)


class Entrance:
    """Listens for connections from other processes of the same user.

    Args:
        serve: serves a connection; called for each on a thread of its own, with the connection and
            ``let_in``. ``serve`` must call ``let_in`` once the caller has proved that it knows the
            secret; until then the time-out is ``CONNECT_TIMEOUT``. When ``serve`` returns, or
            raises ``OSError``, the connection is closed.

    Attributes:
        ticket: the address and secret for callers.

    Raises:
        OSError: this process cannot listen at its address.
    """

    def __init__(self, serve: Callable[[socket.socket, Callable[[], None]], None]) -> None:
        self._serve_one = serve
        self._open: set[socket.socket] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._doorway = Doorway()
        where, self._listening = listen()
        self.ticket = Ticket(where, secrets.token_bytes(16))
        self._context = None
        if isinstance(where, Address) and where.scheme == SECURE:
            self._context = trust(ssl.PROTOCOL_TLS_SERVER)
        threading.Thread(target=self._accept, name="wheelmount-server", daemon=True).start()

    def close(self) -> None:
        """Close all connections, and accept no more."""
        self._doorway.close()
        with self._lock:
            self._closed = True
            for each in [self._listening, *self._open]:
                hang_up(each)

    def _accept(self) -> None:
        with self._listening:
            while not self._closed:
                try:
                    self._accept_one()
                except (OSError, RuntimeError):
                    # The caller has hung up already, or no descriptor or thread is free.
                    if not self._closed:
                        time.sleep(0.1)

    def _accept_one(self) -> None:
        connection, _ = self._listening.accept()
        serving = threading.Thread(
            target=self._serve, args=(connection,), name="wheelmount-server", daemon=True
        )
        try:
            serving.start()
        except RuntimeError:
            connection.close()
            raise

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            if not socketguard.own(connection):
                return
            if connection.family != socket.AF_UNIX:
                self._doorway.take(connection)
            connection.settimeout(CONNECT_TIMEOUT)  # until ``serve`` has checked the secret
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
                stack.enter_context(connection)
            with self._lock:
                if self._closed:
                    return
                self._open.add(connection)
            try:
                prepare(connection)
                self._serve_one(connection, lambda: self._doorway.let_in(connection))
            finally:
                with self._lock:
                    self._open.discard(connection)


def _abstract(name: str) -> str:
    return f"\0{name}"
