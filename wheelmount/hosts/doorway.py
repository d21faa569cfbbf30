"""Limits callers from the network that have not shown a certificate yet.

Monarch keeps silent connections open, so any machine that reaches a port could use up all
descriptors of a process. Here each caller is watched until it has shown a certificate: the
connection of a caller that sends too little in time is closed, and so are the oldest of an address
with many. Listeners without certificates (``tcp://``) accept every caller and watch none.

Monarch does not report the end of a TLS handshake, but the kernel counts the bytes in each
direction. A caller that has shown a certificate has sent some hundred bytes and then received
tickets; a stranger cannot make the listener send as many bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

PROOF_TIMEOUT = 20.0
"""Seconds that a caller has to show a certificate."""

MOST = 256
"""Callers of one address that may be in a handshake at the same time."""

SHOWN = 700
"""Least bytes that a caller has sent once it has shown a certificate."""

ANSWER = 480
"""Least bytes that a caller has then received, besides the certificate and the name of its
authority: 344 of a handshake, and two tickets of 92. A stranger gets 344, and 93 if it asks for
another kind of key (rustls 0.23)."""

POLL_INTERVAL = 5.0
"""Seconds between checks for silent callers."""

_ACKED_RECEIVED = struct.Struct("<QQ"), 120
"""``tcpi_bytes_acked`` and ``_received`` in ``struct tcp_info`` (linux/tcp.h), and where."""


@dataclass(frozen=True, slots=True)
class _Caller:
    connection: int
    inode: int  # by which it is known where the descriptor is another's by now
    since: float


class Doorway:
    """Callers of one process, or of one socket.

    Args:
        answer: bytes that a caller has been sent once its certificate was taken; None where
            ``let_in`` says so.
    """

    def __init__(self, answer: int | None = None) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Caller]] = {}
        self._watched = False
        self._closed = threading.Event()

    def take(self, peer: socket.socket) -> None:
        """Watch a caller that was accepted, hanging up on others if its address has many.

        Args:
            peer: at a descriptor that may be closed at any time.

        Raises:
            OSError: it has gone already.
        """
        address, number = str(peer.getpeername()[0]), peer.fileno()
        with self._lock:
            waiting = self._waiting.setdefault(address, deque())
            waiting.append(_Caller(number, os.fstat(number).st_ino, time.monotonic()))
            if len(waiting) > MOST:
                self._look(address)
            while len(waiting) > MOST:
                _hang_up(waiting.popleft())
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="doorway", daemon=True).start()

    def let_in(self, peer: socket.socket) -> None:
        """Watch a caller no longer."""
        with self._lock:
            for waiting in self._waiting.values():
                for caller in [each for each in waiting if each.connection == peer.fileno()]:
                    waiting.remove(caller)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def sweep(self, patience: float = PROOF_TIMEOUT, *, urgent: bool = False) -> None:
        """Forget callers that have shown a certificate or closed; hang up on callers that are late.

        Args:
            patience: seconds in which a caller must show a certificate.
            urgent: also hang up on late callers that have sent enough bytes, but received too few.
        """
        with self._lock:
            for address in list(self._waiting):
                self._look(address, patience, urgent=urgent)
                if not self._waiting[address]:
                    del self._waiting[address]

    def _look(self, address: str, patience: float = PROOF_TIMEOUT, *, urgent: bool = False) -> None:
        waiting = self._waiting[address]
        callers = list(waiting)
        waiting.clear()
        for caller in callers:
            acked, received = _facts(caller)
            said = self._answer is not None and received >= SHOWN
            if acked < 0 or (said and self._answer is not None and acked >= self._answer):
                continue
            late = time.monotonic() - caller.since > patience
            if late and (urgent or not said):
                _hang_up(caller)
            else:  # a caller that resumes a TLS session receives less; kept until there are many
                waiting.append(caller)

    def _watch(self) -> None:
        while not self._closed.wait(POLL_INTERVAL):
            self.sweep()
            with self._lock:
                if not self._waiting:
                    self._watched = False
                    return


def _facts(caller: _Caller) -> tuple[int, int]:
    """Bytes that a caller was sent, and has sent; -1 of one that is gone."""
    with contextlib.suppress(OSError):
        if os.fstat(caller.connection).st_ino == caller.inode:
            kind, place = _ACKED_RECEIVED
            with borrowed(caller.connection) as peer:
                facts = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, place + kind.size)
            if len(facts) < place + kind.size:  # of a kernel that does not count them
                return 0, 0
            acked, received = kind.unpack_from(facts, place)
            return acked, received
    return -1, -1


def _hang_up(caller: _Caller) -> None:
    with contextlib.suppress(OSError), borrowed(caller.connection) as peer:
        if os.fstat(caller.connection).st_ino == caller.inode:
            peer.shutdown(socket.SHUT_RDWR)  # its owner sees that, and closes it


@contextlib.contextmanager
def borrowed(connection: int) -> Iterator[socket.socket]:
    """Use another's descriptor as a socket during the context, and leave it open."""
    peer = socket.socket(fileno=connection)
    try:
        yield peer
    finally:
        peer.detach()


def answer(certificate: str) -> int:
    """Bytes that callers have been sent once their certificates were taken.

    Args:
        certificate: PEM of the one that they are shown.
    """
    from cryptography import x509  # of which a process that listens nowhere has no need
    from cryptography.hazmat.primitives.serialization import Encoding

    shown = x509.load_pem_x509_certificate(certificate.encode())
    return ANSWER + len(shown.public_bytes(Encoding.DER)) + len(shown.issuer.public_bytes())
