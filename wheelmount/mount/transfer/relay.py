"""What a host gives to others of what it received."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

from wheelmount.errors import TransferError, WheelmountError
from wheelmount.hosts.sockets import Ticket
from wheelmount.mount.serve.traffic import Traffic
from wheelmount.mount.store.store import ReblockedStore, Store
from wheelmount.mount.transfer.rdma import BlockInfo, Offer, choose, within
from wheelmount.mount.transfer.ring import STUCK_AFTER, Ring, Staged
from wheelmount.mount.transfer.stream import PULSE, BlockServer, block_server

KEPT = 12
"""Blocks a host keeps staged for others; they are read from its store again where need be."""


class Relay:
    """Blocks of one generation for other hosts.

    Args:
        store: where they are.
        ensure: has a block arrive there, or returns why it cannot be had; also told whether a
            reader waits for it.
        confirm: says of a block that arrived before this relay was made what it is.
        traffic: told about what was given.
        timeout: seconds within which whoever waits for a block here must hear something.
        below: how many hosts ask this one first, by turns of blocks; see ``Route``.
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
        self._ring = Ring(self, slots=KEPT, lease=timeout, readers=self._readers)
        self._given: dict[int, BlockInfo] = {}
        self._offer: Offer | None = None
        self._block_server: BlockServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def note(self, block: int, said: BlockInfo) -> None:
        """A block is being written to the store."""
        self._given[block] = said

    def put(self, staged: Staged, block: int, packed: bool, memory: memoryview) -> memoryview:
        """Keep a block as it came, if somebody is to ask for it; see ``Ring.put``."""
        if self._block_server is None or self._offer is not None:  # whose memory is registered
            return memory
        if not self._readers(block):
            return memory
        return self._ring.put(staged, block, packed, memory)

    def _readers(self, block: int) -> int:
        """See ``Ring``; none are expected where others ask who were not, as of all that is here."""
        return self._below[block % len(self._below)]

    async def block_server(self, device: bool) -> Ticket | None:
        """See ``choose``."""
        self._check()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._block_server = block_server(self, self._timeout)
        return choose(None if self._block_server is None else self._block_server.ticket, device)

    async def digest(self, block: int, *, urgent: bool = False) -> BlockInfo:
        """What a block is, once it is here.

        Args:
            block: which.
            urgent: whether a reader waits for it.

        Raises:
            TransferError: it cannot be had.
        """
        self._check()
        if error := await self._ensure(block, urgent):
            raise error
        if block not in self._given:
            self._given[block] = await self._confirm(block)
        return self._given[block]

    async def say(self, block: int) -> BlockInfo | None:
        """As ``digest``; None: ask again, it takes a while."""
        return await within(PULSE * self._timeout, self.digest(block))

    async def stage(self, block: int, packed: bool) -> tuple[Staged, Any] | None:
        """Have a block staged, until ``release``; see ``Offer`` and ``digest``."""
        if await self.say(block) is None:
            return None
        if self._offer is None:
            self._offer = Offer(self._ring, self._timeout)
        return await self._offer.stage(block, packed)

    def release(self, block: int, packed: bool, sent: int) -> None:
        """See ``Offer.release``."""
        self._ring.release(block, packed, sent)
        self._traffic.sent = self._ring.sent

    @contextmanager
    def lend(
        self, block: int, packed: bool, urgent: bool = False
    ) -> Iterator[tuple[Staged, memoryview]]:
        """See ``Lender``; not for the thread on which blocks are ensured."""
        self._check()
        if self._loop is None:
            raise TransferError("nobody was told how to ask for it")
        if block not in self._given or not self._store.has(block):
            having = asyncio.run_coroutine_threadsafe(self.digest(block, urgent=urgent), self._loop)
            try:
                having.result(STUCK_AFTER * self._timeout)
            except futures.TimeoutError:
                having.cancel()
                raise TransferError("it did not come") from None
        with self._ring.lend(block, packed) as lent:
            self._traffic.sent = self._ring.sent
            yield lent

    def fill(self, block: int, view: memoryview) -> BlockInfo:
        """A block as it came; see ``Filler``."""
        self._store.read_block(block, view)
        return self._given[block]

    def close(self) -> None:
        """Give nothing: what is here is of no use to anybody."""
        self._closed = True
        if self._block_server is not None:
            self._block_server.close()
        if self._offer is not None:
            self._offer.close()

    def _check(self) -> None:
        if self._closed:
            raise TransferError("it gives nothing any more")
