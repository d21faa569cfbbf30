"""Actors on hosts, for measuring: one reads buffers of the client, one reads files."""

from __future__ import annotations

import asyncio
import mmap
import os
from itertools import accumulate
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

IN_FLIGHT = 6


class Puller(Actor):  # type: ignore[misc]
    """Reads buffers into memory, some at a time."""

    @concurrent_endpoint
    async def pull(self, buffers: list[tuple[Any, int]]) -> None:
        """Read all buffers, each of so many bytes."""
        memory = memoryview(mmap.mmap(-1, sum(length for _, length in buffers) or 1))
        ends = accumulate(length for _, length in buffers)
        queue = iter(zip(buffers, ends, strict=True))

        async def work() -> None:
            for (buffer, length), end in queue:
                await buffer.read_into(memory[end - length : end], timeout=60)

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
