"""Blocks over sockets: the protocol, the server and the client.

Where there is no RDMA device, Monarch's ``RDMABuffer`` travels in its messages, at a third of the
speed of a socket (``benchmarks.rdma``). There, blocks are requested and sent over connections of
their own (``BlockServer``, ``BlockClient``; see ``hosts.sockets``). Monarch tells the address
of a block server and its secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import select
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import astuple
from typing import Any, NamedTuple, Protocol, TypeVar

import msgpack

from wheelmount.errors import TransferError, UnreachableError
from wheelmount.hosts import sockets
from wheelmount.hosts.address import SECURE
from wheelmount.hosts.runtime import translate
from wheelmount.hosts.sockets import Entrance, Ticket, Where
from wheelmount.mount.serve.traffic import LOCAL, TCP, TLS
from wheelmount.mount.transfer.ring import STUCK_AFTER, Staged

REQUEST = struct.Struct("<16sI??")
"""A request: secret, block, whether to compress it, whether a reader waits for it."""

REPLY = struct.Struct("<BI")
"""A reply: its kind (``REFUSED``, ``GIVEN``, ``WAIT``), and bytes of its head (msgpack)."""

REFUSED, GIVEN, WAIT = 0, 1, 2
"""Heads of replies: a message and a hint; seconds that the server waited for the block, and
fields of a ``Staged``, followed by its bytes; nothing: the server itself waits for the block, and
another reply will follow."""

PULSE = 0.25
"""Part of a time-out after which the client is sent ``WAIT``, repeatedly."""

PART = 5e-3
"""Seconds of its link that a part of a block takes. A block that a reader waits for cannot be sent
ahead of parts that the kernel has already."""

LEAST_PART = 16 << 10
"""Fewest bytes of a part, however slow the link."""

GIVE_WAY = 0.2
"""Seconds for each part of other blocks, all hosts together, while a block that a reader waits for
is sent. So these blocks still arrive at a low rate, for the hosts below."""

MOST_TURNS = 5
"""Most parts of other blocks for which a part waits."""

ALIKE = 4
"""Times that a byte to one host may take of what one to another takes if both count as equally
slow: then this machine's own link may be what limits both."""

HASTE = 2.0
"""Seconds without progress after which a block that a reader waits for interrupts no others: its
host may be lost."""

CHECK = 5e-3
"""Seconds between looks at how much of a block has arrived."""


def way(where: Where) -> str:
    """Return the name under which ``Traffic`` counts bytes from an address."""
    if isinstance(where, str):
        return LOCAL
    return TLS if where.scheme == SECURE else TCP


log = logging.getLogger("wheelmount")


class Lender(Protocol):
    """Lends blocks, as ``Ring.lend`` does. Called on many threads."""

    def lend(
        self, block: int, packed: bool, urgent: bool
    ) -> AbstractContextManager[tuple[Staged, memoryview]]: ...


class BlockServer:
    """Serves blocks to other processes until it is closed.

    Args:
        lender: lends the blocks.
        timeout: seconds within which a client must take some bytes, and is answered.

    Attributes:
        ticket: address and secret for clients.

    Raises:
        OSError: this process cannot listen where it is reached.
    """

    def __init__(self, lender: Lender, timeout: float) -> None:
        self._lender = lender
        self._timeout = timeout
        self._pulses = _Pulses(timeout)
        self._entrance = Entrance(self._answer)
        self.ticket = self._entrance.ticket

    def close(self) -> None:
        """End all connections, and accept no more."""
        self._pulses.close()
        self._entrance.close()

    def _answer(self, connection: socket.socket, let_in: Callable[[], None]) -> None:
        request = memoryview(bytearray(REQUEST.size))
        while sockets.receive(connection, request):
            secret, block, packed, urgent = REQUEST.unpack(request)
            if not hmac.compare_digest(secret, self.ticket.secret):
                log.warning("security: refused who does not know the secret of a stream")
                return
            let_in()
            connection.settimeout(self._timeout)
            try:
                with contextlib.ExitStack() as lent:
                    asked = time.monotonic()
                    with self._pulses.at(connection):
                        lend = self._lender.lend(block, packed, urgent)
                        staged, view = lent.enter_context(lend)
                    waited = time.monotonic() - asked
                    sending = _precedence.sending(connection, len(view), urgent=urgent)
                    pause = lent.enter_context(sending)
                    connection.sendall(_reply(GIVEN, (waited, *astuple(staged))))
                    sockets.send(connection, view, pause)
            except OSError:
                raise
            except Exception as error:
                failure = translate(error)
                connection.sendall(_reply(REFUSED, (failure.message, failure.hint)))
            connection.settimeout(None)  # the next block may be requested much later


class _Precedence:
    """Interrupts blocks that are sent to a host while more urgent ones are sent there.

    The same while they are sent to another host that bytes do not reach faster. Where several
    connections share a slow link, one of them may else get nothing for seconds.
    """

    def __init__(self) -> None:
        self._urgent: dict[socket.socket, _Urgent] = {}
        self._paces: dict[str, float] = {}  # seconds that a byte takes, by address
        self._turn = 0.0  # when the next part of a block that gives way is sent
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def sending(
        self, connection: socket.socket, size: int, *, urgent: bool
    ) -> Iterator[Callable[[], int]]:
        """Note a block that is sent during the context.

        Args:
            connection: by which.
            size: of the block, bytes.
            urgent: whether a reader waits for it.

        Yields:
            What to call before each part; it returns the most bytes of the part.
        """
        address = connection.getpeername()
        host = str(address[0]) if isinstance(address, tuple) else ""
        part = self._part(host)
        sockets.limit_unsent(connection, part)
        began, interrupted = time.monotonic(), False

        def pause() -> int:
            nonlocal interrupted
            if urgent:
                self._urgent[connection] = _Urgent(host, time.monotonic())
            else:
                interrupted |= self._give_way(host)
            return part

        try:
            if urgent:
                pause()
            yield pause
            if urgent or host not in self._paces:
                self._await_arrival(connection)
            if not interrupted:
                # Up to twice the last only: a connection that stands still says little of the link.
                pace = (time.monotonic() - began) / max(1, size)
                self._paces[host] = min(pace, 2 * self._paces.get(host, pace))
        finally:
            if urgent:
                with self._changed:
                    self._urgent.pop(connection, None)
                    self._changed.notify_all()

    def _part(self, host: str) -> int:
        pace = self._paces.get(host, math.inf)
        return max(LEAST_PART, min(sockets.UNSENT, int(PART / max(pace, 1e-12))))

    def _give_way(self, host: str) -> bool:
        """Wait while more urgent blocks are sent; return whether there were any."""
        if not self._is_behind(host):
            return False
        now = time.monotonic()
        with self._changed:
            turn = max(self._turn, now) + GIVE_WAY
            self._turn = min(turn, now + MOST_TURNS * GIVE_WAY)
            self._changed.wait_for(lambda: not self._is_behind(host), self._turn - now)
        return True

    def _is_behind(self, host: str) -> bool:
        """Return whether a more urgent block is sent to a host, or by a link as slow as its."""
        since = time.monotonic() - HASTE
        urgent = {each.host for each in list(self._urgent.values()) if each.moved > since}
        slow = ALIKE * self._paces.get(host, math.inf)
        return host in urgent or any(slow >= self._paces.get(each, math.inf) for each in urgent)

    def _await_arrival(self, connection: socket.socket) -> None:
        """Wait until the kernel has no bytes of a block left, or another is requested."""
        requested = select.poll()
        requested.register(connection, select.POLLIN)
        until = time.monotonic() + HASTE
        while sockets.unacknowledged(connection) and time.monotonic() < until:
            if requested.poll(CHECK * 1e3):
                break


class _Urgent(NamedTuple):
    """A block that a reader waits for: the host's address, and when its last part was sent."""

    host: str
    moved: float


_precedence = _Precedence()


class _Pulses:
    """Sends ``WAIT`` to all clients that wait for a block, so that they do not time out.

    Args:
        timeout: that of the ``BlockServer``, seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._patience = STUCK_AFTER * timeout
        self._waiting: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        args = (PULSE * timeout,)
        threading.Thread(target=self._run, args=args, name="wheelmount-pulse", daemon=True).start()

    @contextlib.contextmanager
    def at(self, connection: socket.socket) -> Iterator[None]:
        """Send ``WAIT`` to a connection during the context; nothing else may be sent there then."""
        with self._lock:
            self._waiting[connection] = time.monotonic() + self._patience
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[connection]

    def _run(self, interval: float) -> None:
        while not self._closed.wait(interval):
            with self._lock:
                now = time.monotonic()
                for connection, until in self._waiting.items():
                    if now < until:
                        with contextlib.suppress(OSError):  # its client finds out by itself
                            connection.sendall(REPLY.pack(WAIT, 0))

    def close(self) -> None:
        self._closed.set()


def _reply(kind: int, said: tuple[Any, ...]) -> bytes:
    head: bytes = msgpack.packb(said)
    return REPLY.pack(kind, len(head)) + head


def block_server(lender: Lender, timeout: float) -> BlockServer | None:
    """Start a block server; None if this process cannot listen where others reach it."""
    try:
        return BlockServer(lender, timeout)
    except OSError as error:
        log.warning("bytes go through Monarch's messages: %s", error)
        return None


READERS = 1024
"""Most threads, and so blocks that one host waits for at once. Far more than are ever
wanted: if blocks waited for a thread, two hosts that give to each other would wait for
ever."""

HEAD, NUMBER = 1 << 10, 9
"""Most bytes of a head, and of a number in it (msgpack) for each file that changed: there may
be as many files in a block as it has bytes."""

Result = TypeVar("Result")


class Pace(NamedTuple):
    """Timing of a block, in seconds.

    Attributes:
        waited: time that the server waited for the block itself.
        took: time from its first byte to the last.
    """

    waited: float
    took: float


_Arrived = tuple[Staged, Pace]


class BlockClient:
    """Fetches blocks from block servers, over connections that are kept for the next block.

    Args:
        timeout: seconds within which some bytes of a block must arrive, or a ``WAIT``: the server
            waits for it itself.

    Attributes:
        received: bytes that have arrived, roughly, those of unfinished blocks and of ``WAIT``
            included.
    """

    def __init__(self, timeout: float) -> None:
        self.received = 0
        self._timeout = timeout
        self._idle: defaultdict[Where, list[socket.socket]] = defaultdict(list)
        self._reached: set[Where] = set()
        self._threads = ThreadPoolExecutor(READERS, "wheelmount-fetch")
        self._readings: set[_Reading] = set()
        self._resting = self._closed = False

    async def read(
        self,
        ticket: Ticket,
        block: int,
        packed: bool,
        urgent: bool,
        memory: memoryview,
        then: Callable[[Staged], Result],
    ) -> tuple[Result, Pace]:
        """Fetch a block, and process it on the same thread.

        Args:
            ticket: of the block server.
            block: which.
            packed: whether to request it compressed, if it shrinks.
            urgent: whether a reader waits for it.
            memory: to write it to, of the size of a block. After a failure parts may be changed,
                also a little later.
            then: called with its description when all bytes are there.

        Returns:
            What ``then`` returned, and the timing.

        Raises:
            UnreachableError: the first connection to this server failed.
            TimeoutError: no bytes arrived in time.
            TransferError: the server refused or hung up, or this client is closed.
        """
        if self._closed:
            raise TransferError("nothing is fetched any more")
        reading = _Reading(ticket, block, packed, urgent, memory, self._note)
        self._readings.add(reading)
        work = self._threads.submit(self._read, reading, then)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            reading.give_up()
            raise
        finally:
            self._readings.discard(reading)

    def _read(self, reading: _Reading, then: Callable[[Staged], Result]) -> tuple[Result, Pace]:
        where = reading.ticket.where
        try:
            (staged, pace), connection = self._through(reading)
        except TimeoutError as error:
            raise TimeoutError(f"{sockets.name(where)}: {error}") from None
        except OSError as error:
            raise TransferError(f"{sockets.name(where)}: {error.strerror or error}") from None
        self._idle[where].append(connection)
        if self._resting:
            self.rest()
        return then(staged), pace

    def _through(self, reading: _Reading) -> tuple[_Arrived, socket.socket]:
        where = reading.ticket.where
        while (connection := self._pop(where)) is not None:
            try:
                return reading.through(connection, self._timeout), connection
            except TimeoutError:
                raise
            except OSError:  # it has been closed meanwhile: connect again
                if reading.given_up:
                    raise
        try:
            connection = sockets.connect(where)
        except UnreachableError as error:
            if where in self._reached:
                raise TransferError(error.message) from None
            raise
        self._reached.add(where)
        return reading.through(connection, self._timeout), connection

    def _note(self, count: int) -> None:
        self.received += count  # without a lock, as only a change of it is of interest

    def _pop(self, where: Where) -> socket.socket | None:
        try:
            return self._idle[where].pop()
        except IndexError:  # another thread may have taken the last one
            return None

    def close(self) -> None:
        """Abort all reads, and refuse more. Not thread-safe."""
        self._closed = True
        for reading in self._readings:
            reading.give_up()
        self.rest()

    def rest(self) -> None:
        """Close idle connections now, and others when they become idle."""
        self._resting = True
        for where in list(self._idle):
            while (connection := self._pop(where)) is not None:
                connection.close()


class _Reading:
    """A block on its way; the read can be aborted at any moment."""

    def __init__(
        self,
        ticket: Ticket,
        block: int,
        packed: bool,
        urgent: bool,
        memory: memoryview,
        note: Callable[[int], object],
    ) -> None:
        self.ticket = ticket
        self._request = REQUEST.pack(ticket.secret, block, packed, urgent)
        self._memory = memory
        self._note = note
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.given_up = False

    def give_up(self) -> None:
        """Abort the read; wakes the thread that waits in it."""
        with self._lock:
            self.given_up = True
            if self._connection is not None:
                sockets.hang_up(self._connection)

    def through(self, connection: socket.socket, timeout: float) -> _Arrived:
        """Send the request on a connection, and read the block.

        Raises:
            ConnectionError: the other end hung up.
            OSError: the connection failed in another way, or timed out.
            TransferError: the server refused.
        """
        with self._lock:
            self._connection = connection
            if self.given_up:
                sockets.hang_up(connection)
        try:
            arrived = self._receive(connection, timeout)
        except BaseException:
            connection.close()
            raise
        finally:
            with self._lock:
                self._connection = None
        return arrived

    def _receive(self, connection: socket.socket, timeout: float) -> _Arrived:
        connection.settimeout(timeout)
        connection.sendall(self._request)
        reply = bytearray(REPLY.size)
        kind = WAIT
        while kind == WAIT:
            _fill(connection, memoryview(reply), self._note)
            kind, size = REPLY.unpack(reply)
        began = time.monotonic()
        try:
            if size > HEAD + NUMBER * len(self._memory):
                raise ValueError("its head is too large")
            head = bytearray(size)
            _fill(connection, memoryview(head))
            said = msgpack.unpackb(head, use_list=False)
            if kind != GIVEN:
                message, hint = said
                raise TransferError(message, hint=hint)
            waited, *fields = said
            staged = Staged(*fields)
            if not 0 <= waited < float("inf"):
                raise ValueError("it waited for no time")
            if not 0 <= staged.size <= staged.length <= len(self._memory):
                raise ValueError("it does not fit")
        except (ValueError, TypeError) as error:  # msgpack's errors, too
            raise TransferError(f"what came is no block: {error}") from None
        _fill(connection, self._memory[: staged.size], self._note)
        return staged, Pace(waited, time.monotonic() - began)


def _fill(
    connection: socket.socket, view: memoryview, note: Callable[[int], object] = lambda _: None
) -> None:
    if not sockets.receive(connection, view, note):
        raise ConnectionError("it hung up")
