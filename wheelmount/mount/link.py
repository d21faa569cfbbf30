"""An agent's connection to the process that serves its mount: what is wanted, and what is here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from wheelmount.mount import control

RECONNECT, RECONNECTIONS = 0.1, 50
"""Seconds between attempts to reach a serving process that took over, and their number."""


class Link:
    """A connection that is made again where a serving process dies and another takes its place.

    Args:
        directory: of the mount.

    Attributes:
        kept: whether the mount is to stay when this connection ends.
    """

    def __init__(self, directory: Path) -> None:
        self.kept = False
        self._directory = directory
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    async def open(self, want: Callable[[int], None]) -> None:
        """Feed the mount; ``want`` is called with each block that a read waits for."""
        reader, self._writer = await asyncio.open_unix_connection(self._directory / control.SOCKET)
        self._writer.write(control.encode({"op": "feed", "keep": self.kept}))
        self._listening = asyncio.create_task(self._listen(reader, want))

    async def close(self) -> None:
        """Leave the serving process to another who will feed it."""
        if self._listening is not None:
            self._listening.cancel()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._keep(self._writer)
            self._writer.close()
            self._writer = None

    async def keep(self) -> None:
        """Let the mount stay when this connection ends."""
        self.kept = True
        if self._writer is not None:
            await self._keep(self._writer)

    async def _keep(self, writer: asyncio.StreamWriter) -> None:
        writer.write(control.encode({"keep": True}))
        await writer.drain()

    def tell(self, block: int, failure: str | None) -> None:
        """A block is here, or cannot be had."""
        if self._writer is not None and not self._writer.is_closing():
            message: control.Message = {"have": block}
            if failure is not None:
                message = {"failed": block, "reason": failure}
            self._writer.write(control.encode(message))

    async def _listen(self, reader: asyncio.StreamReader, want: Callable[[int], None]) -> None:
        with contextlib.suppress(OSError):
            async for line in reader:
                want(control.decode(line)["want"])
        # It has unmounted; or it died, and another goes on in its place.
        for _ in range(RECONNECTIONS):
            await asyncio.sleep(RECONNECT)
            with contextlib.suppress(OSError):
                await self.open(want)
                return
