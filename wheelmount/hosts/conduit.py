"""A separate connection for large input or output of a command.

Small output travels in Monarch's messages, each of which is answered before the next. A connection
is faster, and its full buffers make the sender wait for a slow receiver. It carries frames. A
stream ends with a frame of its own, so a connection that ends without that frame was cut. Without
TLS, the kernel moves bytes between pipes and the connection (splice(2)), because each copy in a
process takes as long as the command's own write.

On one machine, the client can pass its own descriptors to the command (``lend``). The command then
reads and writes the client's files and pipes directly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import select
import socket
import ssl
import struct
import sys
import termios
from collections.abc import Mapping

from wheelmount.hosts import sockets
from wheelmount.hosts.sockets import Ticket

HELLO = struct.Struct("<16s16sBI")
"""A caller's first message: the secret, the command's key, the direction, and the maximum bytes of
a frame."""

GIVE, TAKE, LEND = 0, 1, 2
"""Directions: the caller sends input, receives output, or passes descriptors."""

FRAME = struct.Struct("<BI")
"""Header of a frame: number of the stream, or ``END``, and number of bytes."""

STREAMS = "stdin", "stdout", "stderr"
"""Streams by their numbers in ``FRAME``."""

END = 255
"""Number, in a frame's header, that ends a stream."""

MAX_FRAME = 4 << 20
"""Maximum bytes of a frame, whatever a caller allows."""

PIPE = 1 << 20
"""Capacity of a pipe in bytes: large, so that few system calls are needed."""


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
    """Receive the next frame; return its stream and bytes, or None at the end of the stream.

    Raises:
        ConnectionError: the connection was cut, or the peer sent something other than a frame.
        OSError: the connection failed.
    """
    header = _header(connection, limit)
    if header is None:
        return None
    number, size = header
    if isinstance(connection, ssl.SSLSocket):
        return STREAMS[number], bytes(_exactly(connection, size))
    data = connection.recv(size, socket.MSG_WAITALL)
    while len(data) < size:  # a signal interrupted the call
        if not (more := connection.recv(size - len(data), socket.MSG_WAITALL)):
            raise ConnectionError("the connection was cut")
        data += more
    return STREAMS[number], data


def pump(source: int, connection: socket.socket, limit: int) -> None:
    """Send a command's input as it arrives, and then its end.

    Args:
        source: descriptor of the input; an unreadable descriptor counts as ended.
        connection: a connection made with ``GIVE``.
        limit: maximum bytes of a frame.

    Raises:
        OSError: the connection failed.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(connection, select.POLLRDHUP)
    with Splicer(connection, limit) as splicer:
        while True:
            # Polled together, because the end of the connection would not wake a blocking read.
            if connection.fileno() in dict(poll.poll()):
                raise ConnectionError("the connection was cut")
            if splicer.send(source, "stdin"):
                continue
            try:
                data = os.read(source, limit)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                break
            send(connection, "stdin", data)
    end(connection)


class Splicer:
    """Sends a descriptor's bytes as frames without a copy in this process. A context manager.

    Args:
        connection: the connection; with TLS, ``send`` sends nothing.
        limit: maximum bytes of a frame.
    """

    def __init__(self, connection: socket.socket, limit: int) -> None:
        self._connection, self._limit = connection, limit
        self._reading, self._writing = -1, -1
        if not isinstance(connection, ssl.SSLSocket):
            # A private pipe, because nothing else can take bytes from it once the frame's header,
            # with their number, has been sent.
            self._reading, self._writing = pipe()

    def __enter__(self) -> Splicer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._close()

    def send(self, source: int, stream: str, most: int | None = None) -> int:
        """Send, in one frame, the bytes that a descriptor has ready.

        Args:
            source: the descriptor.
            stream: name of the stream that it is.
            most: maximum bytes to send; default the maximum of a frame.

        Returns:
            The number of bytes; 0 if none are ready, the descriptor has ended, or the caller must
            read it with read(2).

        Raises:
            OSError: the connection failed.
        """
        if self._writing < 0:
            return 0
        try:
            size = os.splice(source, self._writing, most or self._limit, flags=os.SPLICE_F_NONBLOCK)
        except OSError as error:
            if error.errno == errno.EINVAL:  # such as from a terminal
                self._close()
            return 0
        if size:
            header = FRAME.pack(STREAMS.index(stream), size)
            self._connection.sendall(header, socket.MSG_MORE)
        rest = size
        while rest:
            rest -= os.splice(self._reading, self._connection.fileno(), rest)
        return size

    def _close(self) -> None:
        for descriptor in (self._reading, self._writing):
            if descriptor >= 0:
                os.close(descriptor)
        self._reading = self._writing = -1


class Incoming:
    """Receives the frames of an input and moves their bytes to a descriptor.

    Args:
        connection: a connection made with ``GIVE``.
        limit: maximum bytes of a frame.

    Attributes:
        rest: number of bytes of the current frame that are still to be moved.
    """

    def __init__(self, connection: socket.socket, limit: int) -> None:
        self._connection, self._limit = connection, limit
        self._held = memoryview(b"")
        self.rest = 0

    def next(self) -> bool:
        """Receive the header of the next frame; return False at the end of the input.

        Raises:
            ConnectionError: the connection was cut, or the peer sent something other than a frame.
            OSError: the connection failed.
        """
        header = _header(self._connection, self._limit)
        self.rest = 0 if header is None else header[1]
        if isinstance(self._connection, ssl.SSLSocket):
            self._held = memoryview(_exactly(self._connection, self.rest))
        return header is not None

    def move(self, target: int) -> None:
        """Move some bytes of the current frame to a pipe.

        Args:
            target: a non-blocking descriptor of the pipe.

        Raises:
            BlockingIOError: the pipe is full.
            BrokenPipeError: the pipe has no reader any more.
            ConnectionResetError: the connection was cut.
        """
        if isinstance(self._connection, ssl.SSLSocket):
            count = os.write(target, self._held)
            self._held = self._held[count:]
        else:
            ready = select.poll()
            ready.register(self._connection, select.POLLIN)
            ready.poll()
            count = os.splice(self._connection.fileno(), target, self.rest)
            if not count:
                raise ConnectionResetError("the connection was cut")
        self.rest -= count


def call(ticket: Ticket, key: str, direction: int, limit: int) -> socket.socket:
    """Connect to the process that runs a command.

    Args:
        ticket: address and secret of the process.
        key: key of the command.
        direction: ``GIVE``, ``TAKE`` or ``LEND``.
        limit: maximum bytes of a frame.

    Raises:
        UnreachableError: the process cannot be reached.
        OSError: the connection failed.
    """
    connection = sockets.connect(ticket.where)
    try:
        connection.sendall(HELLO.pack(ticket.secret, key.encode(), direction, limit))
        connection.settimeout(None)  # a command may print nothing for days
    except BaseException:
        connection.close()
        raise
    return connection


def answer(connection: socket.socket, secret: bytes) -> tuple[str, int, int] | None:
    """Receive a caller's request; return the command's key, the direction and the limit.

    Returns None if the caller's secret is wrong.

    Raises:
        ConnectionError: the caller has closed the connection.
        OSError: the connection failed, or the caller sent nothing in time.
    """
    secret_sent, key, direction, limit = HELLO.unpack(_exactly(connection, HELLO.size))
    if not hmac.compare_digest(secret_sent, secret):
        return None
    return key.decode("ascii", "replace"), direction, min(limit, MAX_FRAME)


def lend(connection: socket.socket, streams: Mapping[str, int]) -> None:
    """Pass descriptors to another process of this machine, and wait until they have arrived.

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
    """Receive descriptors from a caller, by stream; the calling code must close them.

    Raises:
        ConnectionError: the connection was cut, or the caller sent no valid list of descriptors.
        OSError: the connection failed.
    """
    names, descriptors, *_ = socket.recv_fds(connection, len(STREAMS), len(STREAMS))
    known = [STREAMS[number] for number in names if number < len(STREAMS)]
    if not known or len(known) != len(descriptors) or len(set(known)) < len(names):
        for each in descriptors:
            os.close(each)
        raise ConnectionError("the peer sent no valid list of descriptors")
    return dict(zip(known, descriptors, strict=True))


def confirm_borrowed(connection: socket.socket) -> None:
    """Confirm that the descriptors have arrived, and wait until the caller closes the connection.

    Raises:
        OSError: the connection failed.
    """
    connection.sendall(b"\1")
    connection.settimeout(None)
    connection.recv(1)


def pipe() -> tuple[int, int]:
    """Return the reading and the writing end of a new pipe with the capacity ``PIPE``."""
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # over the user's limit for all pipes
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE)
    return reading, writing


def held(reading: int) -> int:
    """Return how many bytes a pipe holds that were not read yet."""
    return int.from_bytes(fcntl.ioctl(reading, termios.FIONREAD, bytes(4)), sys.byteorder)


def closed(reading: int) -> bool:
    """Return whether no process can write to a pipe any more."""
    poll = select.poll()
    poll.register(reading, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _header(connection: socket.socket, limit: int) -> tuple[int, int] | None:
    """Receive the next frame's stream number and size; return None at the end of the stream."""
    number, size = FRAME.unpack(_exactly(connection, FRAME.size))
    if number == END:
        return None
    if number >= len(STREAMS) or size > limit:
        raise ConnectionError("the peer sent something other than a frame")
    return number, size


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """Receive ``size`` bytes.

    Raises:
        ConnectionError: the connection was cut before.
    """
    data = bytearray(size)
    if not sockets.receive(connection, memoryview(data)):
        raise ConnectionError("the connection was cut")
    return data
