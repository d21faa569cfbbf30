"""The order in which a host fetches blocks, and the number that it fetches at the same time.

A block that a reader waits for arrives after all blocks that were requested before. So few blocks
are fetched at the same time over a slow link, and more over a long one. In one tree, every host
waits only for hosts above it, so each wait for room in a window ends.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

MAX_SECONDS = 0.25
"""Seconds that a block may take from its first byte to its last while others arrive too. If blocks
take longer, fewer are fetched at the same time."""

MIN_LIMIT = 2
"""Number of blocks fetched at the same time over the slowest link, so that it is never idle. A
window with this limit begins no blocks in order while a reader waits."""

SLOW = 0.02
"""Least number of seconds per block, if it arrived alone, over a link that counts as slow."""

LULL = 0.1
"""Seconds after a reader's wait in which the reader is likely to wait again."""

LONG = 5e-3
"""Seconds between request and first byte over a link that counts as long, if there are more."""

FAST = 1e-3
"""Seconds per block, if it arrived alone, over a link that counts as very fast, if there are fewer.
A host needs longer to hash and write a block than such a link to transfer it."""

MAX_FAST = 24
"""Maximum of blocks that a host fetches at the same time over a very fast link. Below it, there is
one for each of the host's processors."""


NO_RANKS: Mapping[int, int] = MappingProxyType({})


class Order:
    """Blocks in the order in which they are fetched: from the last block of a reader on.

    A reader is likely to need the blocks behind it next: what an earlier reader needed then, or
    more of its file, or of its directory.

    Args:
        blocks: numbers of all blocks.
        ranks: for blocks that come ahead of all others, their places among each other. The others
            ascend.
    """

    def __init__(self, blocks: Iterable[int], ranks: Mapping[int, int] = NO_RANKS) -> None:
        self._ranks = ranks
        self._blocks = sorted(blocks, key=self._rank)
        self._begun = bytearray(len(self._blocks))
        self._next = 0

    def follow(self, block: int) -> None:
        """Continue with the block behind this one."""
        self._next = bisect_right(self._blocks, self._rank(block), key=self._rank)

    def _rank(self, block: int) -> int:
        return self._ranks.get(block, len(self._ranks) + block)

    def pop(self) -> int | None:
        """Return the next block, each block once, or None if there are no more."""
        place = self._begun.find(0, self._next)
        if place < 0:
            place = self._begun.find(0)
        if place < 0:
            return None
        self._begun[place] = 1
        self._next = place + 1
        return self._blocks[place]


class Window:
    """Limits the number of blocks that are fetched at the same time through one tree.

    Args:
        usual: first value of the limit, and its maximum over a link that is neither long nor very
            fast.
        long: maximum of the limit over a long link.
        fast: maximum of the limit over a very fast link.

    Attributes:
        limit: number of blocks that may be fetched at the same time now.
        count: number of blocks that are being fetched.
    """

    def __init__(self, usual: int, long: int, fast: int = 0) -> None:
        self.limit, self.count = usual, 0
        self._usual, self._long, self._fast = usual, max(usual, long), max(usual, fast)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._room = asyncio.Event()
        self._readers = 0
        self._calm_at = 0.0  # time from which readers are unlikely to wait again
        self._alone = 0.0  # seconds that a block would take if it arrived alone

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
        """Count one more block; if a reader waits for it, it may exceed the limit."""
        self.count += 1

    async def turn(self, block: int) -> None:
        """Wait until a block that another host asked for may be fetched, then ``begin``."""
        if self.count < self.limit and not self._waiting:
            self.begin()
        else:
            self._waiting[block] = turn = asyncio.get_running_loop().create_future()
            await turn

    def hurry(self, block: int) -> None:
        """End the wait of ``turn`` for a block, because a reader needs it."""
        if turn := self._waiting.pop(block, None):
            self.begin()
            turn.set_result(None)

    async def room(self) -> None:
        """Wait until a block may be fetched in order, for no reader and no other host."""
        while not self._has_room():
            self._room.clear()
            await self._room.wait()

    def _has_room(self) -> bool:
        if self._waiting or (self._readers and self.limit <= MIN_LIMIT):
            return False
        calm = not self._readers and asyncio.get_running_loop().time() >= self._calm_at
        return self.count < (self.limit if calm or self._alone < SLOW else MIN_LIMIT)

    def end(self) -> None:
        """Count one block less."""
        self.count -= 1
        self._admit()

    def note(self, waited: float, took: float) -> None:
        """Adapt the limit to the time that a block took.

        Args:
            waited: seconds from the request to the first byte.
            took: seconds from the first byte to the last.
        """
        self._alone += (took / max(1, self.count) - self._alone) / 4
        if took > MAX_SECONDS:
            self.limit = max(MIN_LIMIT, self.limit - 1)
        elif took < MAX_SECONDS / 2:
            if waited > max(took, LONG):
                top = self._long
            else:
                top = self._fast if self._alone < FAST else self._usual
            self.limit = max(self.limit, min(self.limit + 1, top))
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self.count < self.limit:
            self.hurry(next(iter(self._waiting)))
        if self._has_room():
            self._room.set()
