"""The giving end of streams: blocks for whoever knows the secret."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import ssl
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import astuple
from typing import Any, Protocol

import msgpack

from wheelmount.hosts import gate
from wheelmount.hosts.address import SECURE, Address
from wheelmount.hosts.engine import translate
from wheelmount.mount import stream
from wheelmount.mount.ring import Staged
from wheelmount.mount.stream import CONNECT_TIMEOUT, REPLY, REQUEST, Ticket

log = logging.getLogger("wheelmount")


class Lender(Protocol):
    """Who has blocks; see ``Ring.lend``. Called on many threads."""

    def lend(
        self, block: int, packed: bool
    ) -> AbstractContextManager[tuple[Staged, memoryview]]: ...


class Outlet:
    """Gives blocks to others, until it is closed.

    Args:
        lender: has them.
        timeout: seconds that a block may take to be sent.

    Attributes:
        ticket: by which others get them.

    Raises:
        OSError: this process cannot listen where it is reached.
    """

    def __init__(self, lender: Lender, timeout: float) -> None:
        self._lender = lender
        self._timeout = timeout
        self._open: set[socket.socket] = set()
        self._closed = False
        self._turn = threading.Lock()
        where, self._listening = stream.listen()
        self.ticket = Ticket(where, secrets.token_bytes(16))
        self._context = None
        if isinstance(where, Address) and where.scheme == SECURE:
            self._context = stream.trust(ssl.PROTOCOL_TLS_SERVER)
        threading.Thread(target=self._accept, name="wheelmount-outlet", daemon=True).start()

    def close(self) -> None:
        """Hang up on all, and let nobody connect."""
        with self._turn:
            self._closed = True
            for each in [self._listening, *self._open]:
                stream.hang_up(each)

    def _accept(self) -> None:
        with self._listening:
            while not self._closed:
                try:
                    self._accept_one()
                except (OSError, RuntimeError):
                    # Of who is gone already, or no descriptor or no thread is free.
                    if not self._closed:
                        time.sleep(0.1)

    def _accept_one(self) -> None:
        connection, _ = self._listening.accept()
        serving = threading.Thread(
            target=self._serve, args=(connection,), name="wheelmount-outlet", daemon=True
        )
        try:
            serving.start()
        except RuntimeError:
            connection.close()
            raise

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
                stream.prepare(connection)
                self._answer(connection)
            finally:
                with self._turn:
                    self._open.discard(connection)

    def _answer(self, connection: socket.socket) -> None:
        request = memoryview(bytearray(REQUEST.size))
        while stream.receive(connection, request):
            secret, block, packed = REQUEST.unpack(request)
            if not hmac.compare_digest(secret, self.ticket.secret):
                log.warning("security: refused who does not know the secret of a stream")
                return
            connection.settimeout(self._timeout)
            try:
                with self._lender.lend(block, packed) as (staged, view):
                    connection.sendall(_reply(True, astuple(staged)))
                    connection.sendall(view)
            except OSError:
                raise
            except Exception as error:
                failure = translate(error)
                connection.sendall(_reply(False, (failure.message, failure.hint)))
            connection.settimeout(None)  # the next block may be wanted much later


def _reply(good: bool, said: tuple[Any, ...]) -> bytes:
    head: bytes = msgpack.packb(said)
    return REPLY.pack(good, len(head)) + head


def outlet(lender: Lender, timeout: float) -> Outlet | None:
    """An outlet, if this process can have one; see there."""
    try:
        return Outlet(lender, timeout)
    except OSError as error:
        log.warning("bytes go through Monarch's messages: %s", error)
        return None
