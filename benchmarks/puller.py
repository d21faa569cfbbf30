"""Actors on hosts, for measuring: one reads buffers of the client, one reads files."""

from __future__ import annotations

import asyncio
import mmap
import os
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

IN_FLIGHT = 6


class Puller(Actor):  # type: ignore[misc]
    """Reads buffers into memory, some at a time."""

    @concurrent_endpoint
    async def pull(self, buffers: list[tuple[Any, int]]) -> None:
        """Read all buffers, each of so many bytes."""
        queue = iter(buffers)
        most = max((length for _, length in buffers), default=1)

        async def work() -> None:
            memory = memoryview(mmap.mmap(-1, most))
            for buffer, length in queue:
                await buffer.read_into(memory[:length], timeout=60)

        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))


class Reader(Actor):  # type: ignore[misc]
    """Reads the files below a directory."""

    @concurrent_endpoint
    async def read(self, place: str) -> None:
        """Read every file once."""
        await asyncio.to_thread(_read, place)


def _read(place: str) -> None:
    for folder, _, names in os.walk(place):
        for name in names:
            with open(f"{folder}/{name}", "rb", buffering=0) as file:  # noqa: PTH123 - the quickest
                while file.read(1 << 20):
                    pass
