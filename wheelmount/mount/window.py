"""How many blocks are to be on their way: no more than a link brings in a moment.

All that is on its way is ahead of what is asked for next, be it by a reader who waits. So there
are few blocks on their way over a slow link, and more over a long one.
"""

from __future__ import annotations

import asyncio

MOMENT = 0.25
"""Seconds that a block may take from its first bytes to its last, while others come beside it."""

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
        most: above ``limit`` at all times.
    """

    def __init__(self, usual: int, most: int) -> None:
        self.limit, self.count = usual, 0
        self._usual, self.most = usual, max(usual, most)
        self._room = asyncio.Event()

    async def room(self) -> None:
        """Wait until there may be one more."""
        while self.count >= self.limit:
            self._room.clear()
            await self._room.wait()

    def begin(self) -> None:
        """One more is asked for; those that a reader waits for need no room."""
        self.count += 1

    def end(self) -> None:
        """One less is on its way."""
        self.count -= 1
        self._room.set()

    def note(self, waited: float, took: float) -> None:
        """One has come: seconds until its first bytes, and from those to the last."""
        if took > MOMENT:
            self.limit = max(1, self.limit - 1)
        elif took < MOMENT / 2:
            far = waited > max(took, FAR)
            self.limit = max(self.limit, min(self.limit + 1, self.most if far else self._usual))
