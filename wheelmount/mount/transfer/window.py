"""The number of blocks on their way: no more than a link brings in a moment.

Blocks on their way are ahead of the next request, even if a reader waits for that one. So there
are few blocks on their way over a slow link, and more over a long one. In one tree every host waits
only for hosts above it, so a wait for room here always ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

MOMENT = 0.25
"""Seconds that a block may take from its first byte to its last, while others arrive too."""

LEAST = 2
"""Blocks on their way over the slowest link, so that it does not rest between them; and the limit
at which no block is begun just in order while a reader waits."""

FAR = 5e-3
"""Seconds from request to first byte from which a link counts as a long one."""


class Window:
    """Limits the blocks on their way through one tree.

    Args:
        usual: the limit at first, and the most on a link that is not a long one.
        most: the most on a long link.

    Attributes:
        limit: blocks allowed now.
        count: blocks on their way now.
    """

    def __init__(self, usual: int, most: int) -> None:
        self.limit, self.count = usual, 0
        self._usual, self._most = usual, max(usual, most)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._room = asyncio.Event()
        self._readers = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader that waits for a block, during the context."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._admit()

    def begin(self) -> None:
        """Count one more block; one that a reader waits for needs no room."""
        self.count += 1

    async def turn(self, block: int) -> None:
        """Wait for room for a block that another host asks for, and ``begin``."""
        if self.count < self.limit and not self._waiting:
            self.begin()
        else:
            self._waiting[block] = turn = asyncio.get_running_loop().create_future()
            await turn

    def hurry(self, block: int) -> None:
        """End the wait of ``turn`` for a block: a reader needs it."""
        if turn := self._waiting.pop(block, None):
            self.begin()
            turn.set_result(None)

    async def room(self) -> None:
        """Wait for room that no reader or other host needs."""
        while not self._has_room():
            self._room.clear()
            await self._room.wait()

    def _has_room(self) -> bool:
        slow = self.limit <= LEAST
        return self.count < self.limit and not self._waiting and not (slow and self._readers)

    def end(self) -> None:
        """Count one block less."""
        self.count -= 1
        self._admit()

    def note(self, waited: float, took: float) -> None:
        """Adapt the limit: seconds from request to first byte, and from there to the last."""
        if took > MOMENT:
            self.limit = max(LEAST, self.limit - 1)
        elif took < MOMENT / 2:
            far = waited > max(took, FAR)
            self.limit = max(self.limit, min(self.limit + 1, self._most if far else self._usual))
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self.count < self.limit:
            self.hurry(next(iter(self._waiting)))
        if self._has_room():
            self._room.set()
