"""The giving end of streams: blocks for whoever knows the secret."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import astuple
from typing import Any, Protocol

import msgpack

from wheelmount.hosts import sockets
from wheelmount.hosts.engine import translate
from wheelmount.hosts.sockets import Entrance
from wheelmount.mount.ring import Staged
from wheelmount.mount.stream import (
    GIVEN,
    PATIENCE,
    PULSE,
    REFUSED,
    REPLY,
    REQUEST,
    WAIT,
)

log = logging.getLogger("wheelmount")


class Lender(Protocol):
    """Who has blocks; see ``Ring.lend``. Called on many threads."""

    def lend(
        self, block: int, packed: bool, urgent: bool
    ) -> AbstractContextManager[tuple[Staged, memoryview]]: ...


class Outlet:
    """Gives blocks to others, until it is closed.

    Args:
        lender: has them.
        timeout: seconds within which others must take some bytes, and hear something.

    Attributes:
        ticket: by which others get them.

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
        """Hang up on all, and let nobody connect."""
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
                    connection.sendall(_reply(GIVEN, (waited, *astuple(staged))))
                    sockets.send(connection, view)
            except OSError:
                raise
            except Exception as error:
                failure = translate(error)
                connection.sendall(_reply(REFUSED, (failure.message, failure.hint)))
            connection.settimeout(None)  # the next block may be wanted much later


class _Pulses:
    """Says ``WAIT`` to all who wait for a block, so that they do not think that this end is gone.

    Args:
        timeout: see ``Outlet``.
    """

    def __init__(self, timeout: float) -> None:
        self._patience = PATIENCE * timeout
        self._waiting: dict[socket.socket, float] = {}
        self._turn = threading.Lock()
        self._closed = threading.Event()
        args = (PULSE * timeout,)
        threading.Thread(target=self._run, args=args, name="wheelmount-pulse", daemon=True).start()

    @contextlib.contextmanager
    def at(self, connection: socket.socket) -> Iterator[None]:
        """While a block is waited for that is to go to a connection; nothing else is sent there."""
        with self._turn:
            self._waiting[connection] = time.monotonic() + self._patience
        try:
            yield
        finally:
            with self._turn:
                del self._waiting[connection]

    def _run(self, interval: float) -> None:
        while not self._closed.wait(interval):
            with self._turn:
                now = time.monotonic()
                for connection, until in self._waiting.items():
                    if now < until:
                        with contextlib.suppress(OSError):  # who waits there hears of it
                            connection.sendall(REPLY.pack(WAIT, 0))

    def close(self) -> None:
        self._closed.set()


def _reply(kind: int, said: tuple[Any, ...]) -> bytes:
    head: bytes = msgpack.packb(said)
    return REPLY.pack(kind, len(head)) + head


def outlet(lender: Lender, timeout: float) -> Outlet | None:
    """An outlet, if this process can have one; see there."""
    try:
        return Outlet(lender, timeout)
    except OSError as error:
        log.warning("bytes go through Monarch's messages: %s", error)
        return None
