"""A separate connection for large input or output of a command.

Small output travels in Monarch's messages, each of which is answered before the next. A connection
is faster, and its buffers make the faster end wait. It carries frames. The end of a stream is a
frame, too, so a connection that ends without it was cut.

On one machine, the client can pass its own descriptors to the command (``lend``). Then only the
kernel's pipe is between the command and the reader or writer.
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
"""The first message of a caller: secret, key of the command, ``GIVE``, ``TAKE`` or ``LEND``, and
the most bytes of a frame."""

GIVE, TAKE, LEND = 0, 1, 2
"""Whether the caller sends input, receives output, or passes descriptors."""

FRAME = struct.Struct("<BI")
"""Header of a frame: number of the stream, or ``END``, and number of bytes."""

STREAMS = "stdin", "stdout", "stderr"
"""Streams by their numbers in ``FRAME``."""

END = 255

MOST = 4 << 20
"""Most bytes of a frame that a caller may allow."""


def send(connection: socket.socket, stream: str, data: bytes | memoryview) -> None:
    """Send a frame.

    Raises:
        OSError: the connection failed.
    """
    connection.sendall(FRAME.pack(STREAMS.index(stream), len(data)))
    sockets.send(connection, memoryview(data))


def end(connection: socket.socket) -> None:
    """Send the frame that ends a stream.

    Raises:
        OSError: the connection failed.
    """
    connection.sendall(FRAME.pack(END, 0))


def receive(connection: socket.socket, limit: int) -> tuple[str, bytes] | None:
    """Receive stream and bytes of the next frame; None at the end.

    Raises:
        ConnectionError: the connection was cut, or sent something other than a frame.
        OSError: the connection failed.
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
    """Connect to the process that runs a command.

    Args:
        ticket: address and secret of the process.
        key: key of the command.
        way: ``GIVE``, ``TAKE`` or ``LEND``.
        limit: most bytes of a frame.

    Raises:
        UnreachableError: the process cannot be reached.
        OSError: the connection failed.
    """
    connection = sockets.connect(ticket.where)
    try:
        connection.sendall(HELLO.pack(ticket.secret, key.encode(), way, limit))
        connection.settimeout(None)  # a command may print nothing for days
    except BaseException:
        connection.close()
        raise
    return connection


def answer(connection: socket.socket, secret: bytes) -> tuple[str, int, int] | None:
    """Receive a caller's key of a command, way and limit; None if its secret is wrong.

    Raises:
        ConnectionError: the caller has closed the connection.
        OSError: the connection failed, or the caller sent nothing in time.
    """
    said, key, way, limit = HELLO.unpack(_exactly(connection, HELLO.size))
    if not hmac.compare_digest(said, secret):
        return None
    return key.decode("ascii", "replace"), way, min(limit, MOST)


def lend(connection: socket.socket, streams: Mapping[str, int]) -> None:
    """Pass descriptors to a process of this machine, and wait until it has them.

    Args:
        connection: a connection made with ``LEND``.
        streams: the descriptors, by stream.

    Raises:
        ConnectionError: the connection was cut.
        OSError: the connection failed, or there was no answer in time.
    """
    names = bytes(STREAMS.index(stream) for stream in streams)
    connection.settimeout(sockets.CONNECT_TIMEOUT)
    socket.send_fds(connection, [names], list(streams.values()))
    _exactly(connection, 1)


def borrow(connection: socket.socket) -> dict[str, int]:
    """Receive descriptors from a caller, by stream; this process must close them.

    Raises:
        ConnectionError: the connection was cut, or sent something else.
        OSError: the connection failed.
    """
    names, descriptors, *_ = socket.recv_fds(connection, len(STREAMS), len(STREAMS))
    known = [STREAMS[number] for number in names if number < len(STREAMS)]
    if not known or len(known) != len(descriptors) or len(set(known)) < len(names):
        for each in descriptors:
            os.close(each)
        raise ConnectionError("it sends something else")
    return dict(zip(known, descriptors, strict=True))


def borrowed(connection: socket.socket) -> None:
    """Confirm that the descriptors have arrived, and wait until the caller closes the connection.

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
