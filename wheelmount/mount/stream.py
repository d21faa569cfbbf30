"""Blocks over sockets, as both ends know it: where, in which words, by which certificates.

Where there is no RDMA device, Monarch's ``RDMABuffer`` travels in its messages, at a third of the
speed of a socket (``benchmarks.rdma``). So there blocks are asked for and come over connections of
their own (``Inlet``, ``Outlet``); where they are to be had, and by which secret, is told through
Monarch.

A process is reached where Monarch is: at its address on the network, with its certificate, or where
it has none, at a socket of this machine that hangs up on other users.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import ssl
import struct
import time
from dataclasses import dataclass, replace

from wheelmount.errors import UnreachableError
from wheelmount.hosts import engine, gate
from wheelmount.hosts.address import SECURE, Address
from wheelmount.mount.traffic import LOCAL, TCP, TLS

REQUEST = struct.Struct("<16sI??")
"""What is asked for: secret, block, whether to compress it, whether a reader waits for it."""

REPLY = struct.Struct("<BI")
"""What follows (``REFUSED``, ``GIVEN``, ``WAIT``), and bytes of its head (msgpack)."""

REFUSED, GIVEN, WAIT = 0, 1, 2
"""A message and a hint; seconds that the other end waited for the block, and the fields of a
``Staged``, before that many bytes of it; nothing yet: the other end itself waits for the block, and
another reply will follow."""

STEP = 4096
"""Bytes that must come within a time-out; a whole block may take as long as its link needs."""

PULSE = 0.25
"""Part of a time-out after which the other end hears ``WAIT``, and again."""

PATIENCE = 40
"""Time-outs that ``WAIT`` is said for; then whatever the block is waited for counts as stuck."""

CONNECT_TIMEOUT = 5.0
"""Seconds until a way that swallows what is sent counts as closed; there is another."""

BACKLOG = 128
"""Connections that wait to be accepted."""

Where = Address | str
"""A place on the network, or the name of an abstract Unix socket (unix(7)), without its zero."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one must know to get blocks.

    Attributes:
        where: an ``Outlet`` listens.
        secret: of that outlet, 16 bytes.
    """

    where: Where
    secret: bytes


def listen() -> tuple[Where, socket.socket]:
    """A socket where this process is reached, to be accepted from.

    Raises:
        OSError: it cannot listen there.
    """
    address = engine.address()
    if address is not None:
        listening = socket.create_server((address.host, 0), backlog=BACKLOG)
        return replace(address, port=listening.getsockname()[1]), listening
    name = f"wheelmount-{secrets.token_hex(16)}"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(_abstract(name))
    listening.listen(BACKLOG)
    return name, listening


def connect(where: Where) -> socket.socket:
    """A connection to who listens there.

    Raises:
        UnreachableError: nobody does, or another user.
    """
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(where, str):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.settimeout(CONNECT_TIMEOUT)
                connection.connect(_abstract(where))
                if not gate.own(connection):  # a name is anybody's once its owner is gone
                    raise UnreachableError(f"{name(where)} is somebody else's")
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
    """Let small messages go at once, and notice who is gone without a word."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def trust(protocol: ssl._SSLMethod) -> ssl.SSLContext:
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


def receive(connection: socket.socket, view: memoryview) -> bool:
    """Fill memory; False if the other end hung up before.

    Args:
        connection: with its time-out, if it has one: for each step of ``STEP`` bytes.
        view: the memory.

    Raises:
        TimeoutError: no step came in time.
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
        if timeout is not None and deadline is not None:
            now = time.monotonic()
            if done - step >= STEP:
                step, deadline = done, now + timeout
            elif now > deadline:
                raise TimeoutError("it came too slowly")
    return True


def send(connection: socket.socket, view: memoryview) -> None:
    """Send bytes, each call within the connection's time-out; ``sendall`` counts it for all.

    Raises:
        OSError: the connection failed, or nothing was taken in time.
    """
    done = 0
    while done < len(view):
        done += connection.send(view[done:])


def hang_up(connection: socket.socket) -> None:
    """Wake whoever waits for a connection, on either end; it is still to be closed."""
    with contextlib.suppress(OSError):
        # Not SSLSocket's: that has other threads go on without decrypting.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def name(where: Where) -> str:
    """A place, for people."""
    return "another process of this machine" if isinstance(where, str) else str(where)


def way(where: Where) -> str:
    """How bytes come from a place, as ``Traffic`` counts them."""
    if isinstance(where, str):
        return LOCAL
    return TLS if where.scheme == SECURE else TCP


def _abstract(name: str) -> str:
    return f"\0{name}"
