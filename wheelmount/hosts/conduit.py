"""A command's input or output over a connection of its own, for much of it.

Little of it travels in Monarch's messages, each of which is answered before the next; this is as
fast as the connection, whose buffers make the faster end wait. What comes is in frames, and the end
of a stream is a frame too: a connection that ends before was cut.
"""

from __future__ import annotations

import hmac
import socket
import struct

from wheelmount.hosts import sockets
from wheelmount.hosts.sockets import Ticket

HELLO = struct.Struct("<16s16sBI")
"""What a caller says first: secret, key of the command, ``GIVE`` or ``TAKE``, and bytes of a frame
at most."""

GIVE, TAKE = 0, 1
"""Whether the caller sends input or receives output."""

FRAME = struct.Struct("<BI")
"""Before the bytes of a frame: of which stream they are, or ``END``, and how many."""

STREAMS = "stdin", "stdout", "stderr"
"""By their numbers in ``FRAME``."""

END = 255

MOST = 4 << 20
"""Bytes that a caller may allow a frame to have."""


def send(connection: socket.socket, stream: str, data: bytes | memoryview) -> None:
    """Send a frame.

    Raises:
        OSError: the connection failed.
    """
    connection.sendall(FRAME.pack(STREAMS.index(stream), len(data)))
    sockets.send(connection, memoryview(data))


def end(connection: socket.socket) -> None:
    """Send the frame behind which nothing follows.

    Raises:
        OSError: the connection failed.
    """
    connection.sendall(FRAME.pack(END, 0))


def receive(connection: socket.socket, limit: int) -> tuple[str, bytes] | None:
    """The stream and the bytes of the next frame; None at the end.

    Raises:
        ConnectionError: the connection was cut, or something else came.
        OSError: it failed.
    """
    number, size = FRAME.unpack(_exactly(connection, FRAME.size))
    if number == END:
        return None
    if number >= len(STREAMS) or size > limit:
        raise ConnectionError("it sends something else")
    return STREAMS[number], bytes(_exactly(connection, size))


def call(ticket: Ticket, key: str, way: int, limit: int) -> socket.socket:
    """Connect to where a command runs.

    Args:
        ticket: of the process that runs it.
        key: of the command.
        way: ``GIVE`` or ``TAKE``.
        limit: bytes of a frame at most.

    Raises:
        UnreachableError: it cannot be reached.
        OSError: the connection failed.
    """
    connection = sockets.connect(ticket.where)
    try:
        connection.sendall(HELLO.pack(ticket.secret, key.encode(), way, limit))
        connection.settimeout(None)  # a command may say nothing for days
    except BaseException:
        connection.close()
        raise
    return connection


def answer(connection: socket.socket, secret: bytes) -> tuple[str, int, int] | None:
    """What a caller wants: key of a command, way, limit; None if it does not know the secret.

    Raises:
        ConnectionError: it has hung up.
        OSError: the connection failed, or nothing came in time.
    """
    said, key, way, limit = HELLO.unpack(_exactly(connection, HELLO.size))
    if not hmac.compare_digest(said, secret):
        return None
    return key.decode("ascii", "replace"), way, min(limit, MOST)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    if not sockets.receive(connection, memoryview(data)):
        raise ConnectionError("it was cut")
    return data
