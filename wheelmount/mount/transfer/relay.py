"""Passes the blocks that a host received on to other hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

from wheelmount.errors import TransferError, WheelmountError
from wheelmount.hosts import rdma
from wheelmount.mount.serve.traffic import Traffic
from wheelmount.mount.store.store import ReblockedStore, Store
from wheelmount.mount.transfer.rdma import BlockInfo, Offer, Ways, within
from wheelmount.mount.transfer.ring import STUCK_AFTER, Parts, Ring, Staged
from wheelmount.mount.transfer.stream import PULSE, BlockServer, block_server

STAGED_BLOCKS = 12
"""Number of blocks that a host keeps staged for others; all others are read from its store."""


class Relay:
    """Gives blocks of one generation to other hosts.

    Args:
        store: the store that contains the blocks.
        ensure: fetches the block with the given number, and returns the error if that failed; the
            second argument is whether a reader waits for the block.
        confirm: returns hash and changed files of a block that arrived before this relay was made.
        traffic: counts bytes sent.
        timeout: seconds within which a request must be answered.
        below: for each tree, the number of hosts that ask this one first; see ``Route``.
    """

    def __init__(
        self,
        store: Store | ReblockedStore,
        ensure: Callable[[int, bool], Awaitable[WheelmountError | None]],
        confirm: Callable[[int], Awaitable[BlockInfo]],
        traffic: Traffic,
        timeout: float,
        below: Sequence[int],
    ) -> None:
        self.layout = store.layout
        self._store = store
        self._ensure = ensure
        self._confirm = confirm
        self._traffic = traffic
        self._timeout = timeout
        self._below = below
        self._ring = Ring(self, slots=STAGED_BLOCKS, lease=timeout, readers=self._readers)
        self._infos: dict[int, BlockInfo] = {}
        self._offer: Offer | None = None
        self._block_server: BlockServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def note(self, block: int, info: BlockInfo) -> None:
        """Note hash and changed files of a block that is being written to the store."""
        self._infos[block] = info

    def put(self, staged: Staged, block: int, packed: bool, memory: memoryview) -> memoryview:
        """Keep the bytes of a block if a host below will ask for it; return memory in exchange."""
        # Hosts that fetch by RDMABuffer need the block in the memory of a slot.
        if self._block_server is None or self._offer is not None:
            return memory
        if not self._readers(block):
            return memory
        return self._ring.put(staged, block, packed, memory)

    def _readers(self, block: int) -> int:
        """Return the number of hosts that will ask for a block."""
        return self._below[block % len(self._below)]

    async def ways(self) -> Ways:
        """Return the ways to fetch blocks from this host."""
        self._check_open()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._block_server = block_server(self, self._timeout)
        ticket = None if self._block_server is None else self._block_server.ticket
        return Ways(ticket, rdma.usable())

    async def digest(self, block: int, *, urgent: bool = False) -> BlockInfo:
        """Wait for a block; return its hash and changed files.

        Args:
            block: number of the block.
            urgent: whether a reader waits for it.

        Raises:
            TransferError: the block could not be fetched.
        """
        self._check_open()
        if error := await self._ensure(block, urgent):
            raise error
        if block not in self._infos:
            self._infos[block] = await self._confirm(block)
        return self._infos[block]

    async def say(self, block: int) -> BlockInfo | None:
        """Return the result of ``digest``, or None if it takes long: the caller must ask again."""
        return await within(PULSE * self._timeout, self.digest(block))

    async def parts(self, block: int, parts: Sequence[tuple[int, int]]) -> Parts | None:
        """Return hash, changed files and parts of a block; None: it takes long, ask again."""
        if await self.say(block) is None:
            return None
        found = await asyncio.to_thread(self._ring.parts, block, parts)
        self._traffic.sent = self._ring.sent
        return found

    async def stage(self, block: int, packed: bool) -> tuple[Staged, Any] | None:
        """Wait for a block and stage it until ``release``.

        Returns None if the block takes long: the caller must ask again.
        """
        if await self.say(block) is None:
            return None
        if self._offer is None:
            self._offer = Offer(self._ring, self._timeout)
        return await self._offer.stage(block, packed)

    def release(self, block: int, packed: bool, sent: int) -> None:
        """Release a block of which ``sent`` bytes were fetched (0: the fetch failed)."""
        if self._offer is not None:
            self._offer.release(block, packed, sent)
        self._traffic.sent = self._ring.sent

    @contextmanager
    def lend(
        self, block: int, packed: bool, urgent: bool = False
    ) -> Iterator[tuple[Staged, memoryview]]:
        """Lend a block, as ``Lender`` says. Must not run on the thread that ensures blocks."""
        self._check_open()
        if self._loop is None:
            raise TransferError("no host has asked for the address of this host's blocks")
        if block not in self._infos or not self._store.has(block):
            arrival = self.digest(block, urgent=urgent)
            arrived = asyncio.run_coroutine_threadsafe(arrival, self._loop)
            try:
                arrived.result(STUCK_AFTER * self._timeout)
            except futures.TimeoutError:
                arrived.cancel()
                raise TransferError(f"block {block} did not arrive") from None
        with self._ring.lend(block, packed) as lent:
            self._traffic.sent = self._ring.sent
            yield lent

    def fill(self, block: int, view: memoryview) -> BlockInfo:
        """Read a block from the store; return its hash and changed files."""
        self._store.read_block(block, view)
        return self._infos[block]

    def close(self) -> None:
        """Refuse to pass on more blocks."""
        self._closed = True
        if self._block_server is not None:
            self._block_server.close()
        if self._offer is not None:
            self._offer.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("this host no longer serves that generation")
