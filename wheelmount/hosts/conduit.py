"""A command's input or output over a connection of its own, for much of it.

Little of it travels in Monarch's messages, each of which is answered before the next; this is as
fast as the connection, whose buffers make the faster end wait. What comes is in frames, and the end
of a stream is a frame too: a connection that ends before was cut.

On one machine a command need not have its streams passed on at all: the client hands it its own
(``lend``), and the kernel's pipe is all that is between the command and the reader or writer.
"""

from __future__ import annotations

import hmac
import os
import socket
import ssl
import struct
from collections.abc import Mapping

from wheelmount.hosts import sockets
from wheelmount.hosts.sockets import Ticket

HELLO = struct.Struct("<16s16sBI")
"""What a caller says first: secret, key of the command, ``GIVE``, ``TAKE`` or ``LEND``, and bytes
of a frame at most."""

GIVE, TAKE, LEND = 0, 1, 2
"""Whether the caller sends input, receives output, or hands descriptors over."""

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
    if isinstance(connection, ssl.SSLSocket):
        return STREAMS[number], bytes(_exactly(connection, size))
    data = connection.recv(size, socket.MSG_WAITALL)
    while len(data) < size:  # a signal came
        if not (more := connection.recv(size - len(data), socket.MSG_WAITALL)):
            raise ConnectionError("it was cut")
        data += more
    return STREAMS[number], data


def call(ticket: Ticket, key: str, way: int, limit: int) -> socket.socket:
    """Connect to where a command runs.

    Args:
        ticket: of the process that runs it.
        key: of the command.
        way: ``GIVE``, ``TAKE`` or ``LEND``.
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


def lend(connection: socket.socket, streams: Mapping[str, int]) -> None:
    """Hand descriptors over, to a process of this machine; wait until it has them.

    Args:
        connection: a call by ``LEND``.
        streams: the descriptors, by stream.

    Raises:
        ConnectionError: it was cut.
        OSError: it failed, or there was no answer in time.
    """
    names = bytes(STREAMS.index(stream) for stream in streams)
    connection.settimeout(sockets.CONNECT_TIMEOUT)
    socket.send_fds(connection, [names], list(streams.values()))
    _exactly(connection, 1)


def borrow(connection: socket.socket) -> dict[str, int]:
    """Take descriptors that a caller hands over, by stream. They are to be closed.

    Raises:
        ConnectionError: it was cut, or something else came.
        OSError: it failed.
    """
    names, descriptors, *_ = socket.recv_fds(connection, len(STREAMS), len(STREAMS))
    known = [STREAMS[number] for number in names if number < len(STREAMS)]
    if not known or len(known) != len(descriptors) or len(set(known)) < len(names):
        for each in descriptors:
            os.close(each)
        raise ConnectionError("it sends something else")
    return dict(zip(known, descriptors, strict=True))


def borrowed(connection: socket.socket) -> None:
    """Say that the descriptors are here, and wait until the caller hangs up.

    Raises:
        OSError: the connection failed.
    """
    connection.sendall(b"\1")
    connection.settimeout(None)
    connection.recv(1)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    if not sockets.receive(connection, memoryview(data)):
        raise ConnectionError("it was cut")
    return data
