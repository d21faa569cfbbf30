"""Memory that is registered with RDMA devices: all that another machine can read, or write to.

Monarch registers memory for reads and for writes, its own and remote ones, and a device goes on
answering for memory that was given up. So no byte is used where it lies there: blocks that others
read are copies, with the hash of the original, and blocks that come are copied out before they are
checked. It is made once and used again, as to register it takes long.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Any

from wheelmount.errors import UnreachableError
from wheelmount.hosts.actor import RDMABuffer
from wheelmount.hosts.runtime import last_line

IDLE = 64 << 20
"""Bytes that are kept for later blocks; what is more is unregistered."""


class Registered:
    """Memory of a fixed size.

    Args:
        view: all of it.

    Attributes:
        view: as given; always this same object, by which Monarch knows that it is registered.
    """

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._buffer: Any = None

    @property
    def buffer(self) -> Any:
        """An ``RDMABuffer`` of all of it. To be asked for in an actor's endpoint.

        Raises:
            UnreachableError: it cannot be registered.
        """
        if self._buffer is None:
            try:
                self._buffer = RDMABuffer(self.view)
            except Exception as error:
                raise UnreachableError(
                    f"memory was not registered: {last_line(error)}",
                    hint="look at `ulimit -l`",
                ) from None
        return self._buffer

    async def drop(self) -> None:
        """Have Monarch unregister it."""
        if self._buffer is not None:
            with contextlib.suppress(Exception):  # the process may be ending
                await self._buffer.drop()


class Pool:
    """Registered memory of this process that is not in use.

    Args:
        idle: bytes to keep.
    """

    def __init__(self, idle: int = IDLE) -> None:
        self._most = idle
        self._idle: list[Registered] = []  # the latest last
        self._lock = threading.Lock()

    def take(self, size: int) -> Registered:
        """Return memory of a size, which is new if there is none."""
        with self._lock:
            for each in reversed(self._idle):
                if len(each.view) == size:
                    self._idle.remove(each)
                    return each
        return Registered(memoryview(mmap.mmap(-1, size)))

    async def give(self, memory: Registered) -> None:
        """Take memory back that nothing reads or writes any more."""
        with self._lock:
            self._idle.append(memory)
            surplus = []
            while sum(len(each.view) for each in self._idle) > self._most:
                surplus.append(self._idle.pop(0))
        for each in surplus:
            await each.drop()


pool = Pool()
