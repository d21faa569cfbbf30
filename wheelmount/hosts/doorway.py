"""Callers from the network who have not shown a certificate yet.

Monarch keeps a connection that says nothing, and so whoever reaches a port takes all descriptors
of a process. Here each caller is watched until it has sent as much as it takes to show a
certificate: one that has not in time is hung up on, and so are the oldest of an address with many.
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

PATIENCE = 20.0
"""Seconds that a caller has to show a certificate."""

MOST = 256
"""Callers of one address that may be about to."""

SHOWN = 700
"""Bytes that a caller has sent at least when it has shown a certificate."""

GLANCE = 5.0
"""Seconds between looks at who is silent."""

_RECEIVED = struct.Struct("<Q"), 128
"""``tcpi_bytes_received`` in ``struct tcp_info`` (linux/tcp.h), and where."""


@dataclass(frozen=True, slots=True)
class _Caller:
    connection: int
    inode: int  # by which it is known where the descriptor is another's by now
    since: float


class Doorway:
    """Those of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Caller]] = {}
        self._watched = False

    def take(self, connection: int, address: str) -> None:
        """Watch a caller that was accepted, hanging up on others if its address has many.

        Args:
            connection: its descriptor, which may be closed at any time.
            address: it calls from.
        """
        with self._lock:
            waiting = self._waiting.setdefault(address, deque())
            waiting.append(_Caller(connection, os.fstat(connection).st_ino, time.monotonic()))
            if len(waiting) > MOST:
                self._look(address)
            while len(waiting) > MOST:
                _hang_up(waiting.popleft())
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="doorway", daemon=True).start()

    def sweep(self, patience: float = PATIENCE) -> None:
        """Forget who has shown a certificate or has gone; hang up on who is silent for too long."""
        with self._lock:
            for address in list(self._waiting):
                self._look(address)
                waiting = self._waiting[address]
                while waiting and time.monotonic() - waiting[0].since > patience:
                    _hang_up(waiting.popleft())
                if not waiting:
                    del self._waiting[address]

    def _look(self, address: str) -> None:
        waiting = self._waiting[address]
        silent = [caller for caller in waiting if _silent(caller)]
        waiting.clear()
        waiting.extend(silent)

    def _watch(self) -> None:
        while True:
            time.sleep(GLANCE)
            self.sweep()


def _silent(caller: _Caller) -> bool:
    with contextlib.suppress(OSError):
        if os.fstat(caller.connection).st_ino == caller.inode:
            kind, place = _RECEIVED
            with _borrowed(caller.connection) as peer:
                facts = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, place + kind.size)
            return len(facts) < place + kind.size or kind.unpack_from(facts, place)[0] < SHOWN
    return False


def _hang_up(caller: _Caller) -> None:
    with contextlib.suppress(OSError), _borrowed(caller.connection) as peer:
        if os.fstat(caller.connection).st_ino == caller.inode:
            peer.shutdown(socket.SHUT_RDWR)  # its owner sees that, and closes it


@contextlib.contextmanager
def _borrowed(connection: int) -> Iterator[socket.socket]:
    peer = socket.socket(fileno=connection)
    try:
        yield peer
    finally:
        peer.detach()
