"""A simulated network: links of a rate, hosts that hang, are cut off or die, bytes that flip."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from random import Random
from typing import Any, Protocol, TypeVar

from wheelmount.errors import TransferError
from wheelmount.mount.serve.traffic import TCP
from wheelmount.mount.transfer.rdma import BlockInfo
from wheelmount.mount.transfer.ring import STUCK_AFTER, Staged
from wheelmount.mount.transfer.stream import PULSE, Pace

Result = TypeVar("Result")

CHUNK = 1024
"""Bytes that a link carries at once; those of several transfers go by turns."""


class Giver(Protocol):
    """What a node gives: a relay, or the client's ring."""

    async def digest(self, block: int, *, urgent: bool = False) -> BlockInfo: ...

    def lend(
        self, block: int, packed: bool
    ) -> AbstractContextManager[tuple[Staged, memoryview]]: ...


class Node:
    """One end of the network.

    Attributes:
        givers: by key of a layout.
        dead: it has ended.
        cut: nothing comes from it or goes to it.
        sent: bytes that left it.
    """

    def __init__(self, name: str, rate: float) -> None:
        self.name, self.rate = name, rate
        self.givers: dict[Any, Giver] = {}
        self.dead = self.cut = False
        self.sent = 0
        self._free = {"up": 0.0, "down": 0.0}

    @property
    def silent(self) -> bool:
        return self.dead or self.cut

    def book(self, way: str, now: float, size: int) -> float:
        """When its link will have carried so many bytes more."""
        self._free[way] = max(now, self._free[way]) + size / self.rate
        return self._free[way]


class Network:
    """All nodes, and what goes wrong between them.

    Args:
        random: of the seed.
        latency: seconds of each way.
        corruption: part of the transfers in which a byte flips.
        resets: part of the transfers that end in the middle.
    """

    def __init__(self, random: Random, latency: float, corruption: float, resets: float) -> None:
        self.random = random
        self.latency, self.corruption, self.resets = latency, corruption, resets
        self.nodes: dict[str, Node] = {}
        self.flips = 0


class Line:
    """The wire of one host for one layout; see ``Wire``."""

    def __init__(self, network: Network, node: Node, key: Any, timeout: float) -> None:
        self._network, self._node, self._key, self._timeout = network, node, key, timeout
        self._closed = asyncio.Event()

    async def digest(self, host: str, block: int) -> BlockInfo:
        """Ask a host for hash and changed files of a block."""
        return await self._unless_closed(self._digest(self._network.nodes[host], block))

    async def _digest(self, other: Node, block: int) -> BlockInfo:
        await self._travel(other)
        said: BlockInfo = await self._hear(other, self._giver(other).digest(block))
        await self._travel(other)
        return said

    async def read(
        self,
        host: str,
        block: int,
        packed: bool,
        urgent: bool,
        memory: memoryview,
        then: Callable[[Staged], Result],
    ) -> tuple[Result, Pace, str]:
        """Fetch a block, and process it at once."""
        other = self._network.nodes[host]
        reading = self._read(other, block, packed, urgent, memory)
        staged, pace = await self._unless_closed(reading)
        return then(staged), pace, TCP

    async def _read(
        self, other: Node, block: int, packed: bool, urgent: bool, memory: memoryview
    ) -> tuple[Staged, Pace]:
        network, clock = self._network, asyncio.get_running_loop().time
        await self._travel(other)
        giver = self._giver(other)
        asked = clock()
        await self._hear(other, giver.digest(block, urgent=urgent))
        waited = clock() - asked
        await self._travel(other)
        with giver.lend(block, packed) as (staged, view):
            data = bytes(view)
        other.sent += len(data)
        began, reset = clock(), network.random.random() < network.resets
        for begin in range(0, len(data), CHUNK):
            piece = data[begin : begin + CHUNK]
            await self._wait_for_a_way(other)
            there = other.book("up", clock(), len(piece))
            here = self._node.book("down", clock(), len(piece))
            await asyncio.sleep(max(there, here) - clock())
            if reset and begin >= len(data) // 2:
                raise TransferError("the connection was reset")
            memory[begin : begin + len(piece)] = piece
        if network.random.random() < network.corruption:
            network.flips += 1
            memory[network.random.randrange(staged.size)] ^= 1 << network.random.randrange(8)
        return staged, Pace(waited, clock() - began)

    async def report(self, host: str, length: int) -> None:
        """Do nothing: no simulated client asks for reports."""

    def rest(self) -> None:
        """Do nothing: a simulated network has no idle connections."""

    def close(self) -> None:
        """Fail all calls in progress, and later ones."""
        self._closed.set()

    def _giver(self, other: Node) -> Giver:
        if self._key not in other.givers:
            raise TransferError("it has nothing of that")
        return other.givers[self._key]

    async def _travel(self, other: Node) -> None:
        await asyncio.sleep(self._network.latency * self._network.random.uniform(0.5, 2))
        await self._wait_for_a_way(other)

    async def _wait_for_a_way(self, other: Node) -> None:
        """Go on when nothing is in the way; what comes back within a time-out was only late."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        while other.silent or self._node.silent:
            if asyncio.get_running_loop().time() >= deadline:
                raise TimeoutError(f"nothing came from {other.name}")
            await asyncio.sleep(self._timeout / 8)

    async def _hear(self, other: Node, work: Awaitable[Result]) -> Result:
        """Wait for what another node does, as long as it says that it waits itself."""
        task = asyncio.ensure_future(work)  # which goes on if whoever asked is gone
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        for _ in range(round(STUCK_AFTER / PULSE)):
            done, _ = await asyncio.wait({task}, timeout=PULSE * self._timeout)
            await self._wait_for_a_way(other)
            if done:
                return task.result()
        raise TimeoutError(f"{other.name} says nothing any more")

    async def _unless_closed(self, work: Awaitable[Result]) -> Result:
        task, closed = asyncio.ensure_future(work), asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
            if closed.done():
                raise TransferError("nothing is fetched any more")
            return await task
        finally:
            task.cancel()
            closed.cancel()
            await asyncio.gather(task, closed, return_exceptions=True)
