"""How many blocks are to be on their way: no more than a link brings in a moment.

All that is on its way is ahead of what is asked for next, be it by a reader who waits. So there
are few blocks on their way over a slow link, and more over a long one. In one tree all wait for
those above them and for nobody else, so whoever waits for room here gets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

MOMENT = 0.25
"""Seconds that a block may take from its first bytes to its last, while others come beside it."""

LEAST = 2
"""Blocks on their way over the slowest link, so that it does not rest between them; and the limit
at which nothing is begun that merely is next while a reader waits."""

FAR = 5e-3
"""Seconds from asking for a block to its first bytes from which a link counts as a long one."""


class Window:
    """Blocks on their way through one tree.

    Args:
        usual: how many at first, and at most on a link that is not a long one.
        most: on a long one.

    Attributes:
        limit: how many there may be now.
        count: how many there are.
    """

    def __init__(self, usual: int, most: int) -> None:
        self.limit, self.count = usual, 0
        self._usual, self._most = usual, max(usual, most)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._room = asyncio.Event()
        self._readers = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While a reader waits for a block."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._admit()

    def begin(self) -> None:
        """One more is on its way; one that a reader waits for needs no room."""
        self.count += 1

    async def turn(self, block: int) -> None:
        """Wait for room for one that others ask for, and ``begin``."""
        if self.count < self.limit and not self._waiting:
            self.begin()
        else:
            self._waiting[block] = turn = asyncio.get_running_loop().create_future()
            await turn

    def hurry(self, block: int) -> None:
        """Have no turn waited for: a reader wants it."""
        if turn := self._waiting.pop(block, None):
            self.begin()
            turn.set_result(None)

    async def room(self) -> None:
        """Wait until there may be one more, and nobody else wants it."""
        while not self._has_room():
            self._room.clear()
            await self._room.wait()

    def _has_room(self) -> bool:
        slow = self.limit <= LEAST
        return self.count < self.limit and not self._waiting and not (slow and self._readers)

    def end(self) -> None:
        """One less is on its way."""
        self.count -= 1
        self._admit()

    def note(self, waited: float, took: float) -> None:
        """One has come: seconds that the network took until its first bytes, and to the last."""
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
