"""The blocks on their way: in which order, and how many: no more than a link brings in a moment.

Blocks on their way are ahead of the next request, even if a reader waits for that one. So there
are few blocks on their way over a slow link, and more over a long one. In one tree every host waits
only for hosts above it, so a wait for room here always ends.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

MOMENT = 0.25
"""Seconds that a block may take from its first byte to its last, while others arrive too."""

LEAST = 2
"""Blocks on their way over the slowest link, so that it does not rest between them; and the limit
at which no block is begun just in order while a reader waits."""

SLOW = 0.02
"""Seconds that a block takes by itself from which a link counts as a slow one."""

LULL = 0.1
"""Seconds after a reader's wait within which it is likely to wait again."""

FAR = 5e-3
"""Seconds from request to first byte from which a link counts as a long one."""


QUICK = 1e-3
"""Seconds that a block takes by itself up to which a link counts as a very fast one. There,
processors need longer to hash and write a block than the link to bring it."""

MANY = 24
"""Blocks on their way to a host over a very fast link, one for each of its processors, at most."""


class Order:
    """Blocks in the order in which they are begun: ascending, and on from where a reader was last.

    A reader is likely to need next what is behind: more of its file, or of its directory.

    Args:
        blocks: all of them, ascending.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self._blocks = list(blocks)
        self._begun = bytearray(len(self._blocks))
        self._next = 0

    def follow(self, block: int) -> None:
        """Go on behind a block."""
        self._next = bisect_right(self._blocks, block)

    def pop(self) -> int | None:
        """Return the next block, each once; None: there are no more."""
        place = self._begun.find(0, self._next)
        if place < 0:
            place = self._begun.find(0)
        if place < 0:
            return None
        self._begun[place] = 1
        self._next = place + 1
        return self._blocks[place]


class Window:
    """Limits the blocks on their way through one tree.

    Args:
        usual: the limit at first, and the most on a link that is not a long one.
        most: the most on a long link.
        quick: the most on a very fast one.

    Attributes:
        limit: blocks allowed now.
        count: blocks on their way now.
    """

    def __init__(self, usual: int, most: int, quick: int = 0) -> None:
        self.limit, self.count = usual, 0
        self._quick = max(usual, quick)
        self._usual, self._most = usual, max(usual, most)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._room = asyncio.Event()
        self._readers = 0
        self._calm_at = 0.0
        self._alone = 0.0  # seconds that a block would take by itself

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader that waits for a block, during the context."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            loop = asyncio.get_running_loop()
            self._calm_at = loop.time() + LULL
            loop.call_later(LULL, self._admit)
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
        if self._waiting or (self._readers and self.limit <= LEAST):
            return False
        calm = not self._readers and asyncio.get_running_loop().time() >= self._calm_at
        return self.count < (self.limit if calm or self._alone < SLOW else LEAST)

    def end(self) -> None:
        """Count one block less."""
        self.count -= 1
        self._admit()

    def note(self, waited: float, took: float) -> None:
        """Adapt the limit: seconds from request to first byte, and from there to the last."""
        self._alone += (took / max(1, self.count) - self._alone) / 4
        if took > MOMENT:
            self.limit = max(LEAST, self.limit - 1)
        elif took < MOMENT / 2:
            far = waited > max(took, FAR)
            top = self._quick if self._alone < QUICK else self._usual
            self.limit = max(self.limit, min(self.limit + 1, self._most if far else top))
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self.count < self.limit:
            self.hurry(next(iter(self._waiting)))
        if self._has_room():
            self._room.set()
