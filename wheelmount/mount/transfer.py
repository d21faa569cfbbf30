"""Blocks on their way: the client offers its ring, a host fetches from it by ``RDMABuffer``.

One primitive, ``Receiver.ensure``: have a block, or get it. Delivery of everything is that for
every block in order; a block that somebody waits for goes ahead of the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import secrets
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from monarch.actor import Actor, concurrent_endpoint
from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning

from wheelmount.errors import TransferError, WheelmountError
from wheelmount.mount.source import Source, Staged
from wheelmount.mount.store import Store

# Which transport is in use is told by the status, not by a warning in the middle of the output.
warnings.filterwarnings("ignore", category=RDMATcpFallbackWarning)

ATTEMPTS = 3
"""Times a block is asked for when it arrives with the wrong hash."""

STAGING_THREADS = 8
"""Threads of the client that read and hash blocks; more than cores because disks are waited for."""

_offered: dict[str, tuple[Source, bytes, Callable[[str, int], None]]] = {}
"""Sources of this process by name: an actor is made from what can be pickled, a ring cannot."""


@dataclass(frozen=True, slots=True)
class Description:
    """Where the description of a tree can be fetched.

    Attributes:
        buffer: an ``RDMABuffer``.
        length: bytes.
        digest: blake3 of them.
    """

    buffer: Any
    length: int
    digest: bytes


class SourceActor(Actor):  # type: ignore[misc]
    """The client's end: lives in the client's own process and offers one ``Source``."""

    def __init__(self, name: str) -> None:
        self._source, self._description, self._arrived = _offered.pop(name)
        self._buffer = RDMABuffer(memoryview(self._description))
        self._ring = [RDMABuffer(slot) for slot in self._source.slots]
        self._threads = ThreadPoolExecutor(STAGING_THREADS, "wheelmount-stage")

    @concurrent_endpoint
    async def describe(self) -> Description:
        """The tree."""
        digest = blake3(self._description).digest()
        return Description(self._buffer, len(self._description), digest)

    @concurrent_endpoint
    async def ring(self) -> list[Any]:
        """The buffers that blocks are fetched from, by slot."""
        return self._ring

    @concurrent_endpoint
    async def stage(self, block: int) -> tuple[Staged, Any]:
        """Have a block in the ring until ``release``.

        The second is a buffer of its own for the last block where that is shorter than the others:
        a read takes a buffer whole.
        """
        loop = asyncio.get_running_loop()
        staged = await loop.run_in_executor(self._threads, self._source.stage, block)
        slot = self._source.slots[staged.slot]
        short = staged.length < len(slot)
        return staged, RDMABuffer(slot[: staged.length]) if short else None

    @concurrent_endpoint
    async def release(self, host: str, block: int, length: int) -> None:
        """Let go of a block; ``length`` bytes of it arrived at ``host`` (0: it failed)."""
        self._source.release(block)
        self._arrived(host, length)


def offer(source: Source, description: bytes, arrived: Callable[[str, int], None]) -> Any:
    """Offer a source to hosts.

    Args:
        source: what.
        description: of its tree, as it is to be sent ahead.
        arrived: called with a host's name and a number of bytes whenever a block has arrived.

    Returns:
        The actor that hosts fetch from.
    """
    from monarch.actor import this_proc

    name = f"source_{secrets.token_hex(4)}"
    _offered[name] = source, description, arrived
    return this_proc().spawn(name, SourceActor, name)


class Receiver:
    """A host's end of the delivery of one mount.

    Args:
        host: its name.
        store: where blocks go.
        source: the actor they come from.
        ring: that one's buffers.
        in_flight: blocks fetched at the same time.
        timeout: seconds a block may take.
        tell: called with every block that is whole, and with one that failed and the reason.
    """

    def __init__(
        self,
        host: str,
        store: Store,
        source: Any,
        ring: list[Any],
        *,
        in_flight: int,
        timeout: float,
        tell: Callable[[int, str | None], None],
    ) -> None:
        self._host = host
        self._store = store
        self._source = source
        self._ring = ring
        self._in_flight = in_flight
        self._timeout = timeout
        self._tell = tell
        self._queue = deque(store.missing())
        self._urgent: deque[int] = deque()
        self._flying: set[int] = set()
        self._failed: dict[int, WheelmountError] = {}
        self._landed = asyncio.Condition()
        self._buffers: list[memoryview] = []

    def want(self, block: int) -> None:
        """Put a block that a read waits for before all others."""
        if self._store.has(block):
            self._tell(block, None)
        elif block in self._failed:
            self._tell(block, self._failed[block].message)
        elif block not in self._flying:
            self._urgent.append(block)

    async def run(self) -> None:
        """Fetch everything.

        Raises:
            TransferError: something did not arrive; all the rest did.
        """
        await asyncio.gather(*(self._work() for _ in range(self._in_flight)))
        if self._failed:
            block, error = next(iter(self._failed.items()))
            raise TransferError(
                f"{len(self._failed)} of {self._store.layout.blocks} blocks did not arrive at "
                f"{self._host}; block {block}: {error.message}",
                hint=error.hint,
            )

    async def stop(self) -> None:
        """Fetch nothing more, and wait for what is on its way.

        A process that ends with a transfer on its way takes more than itself down: Monarch's
        fallback over TCP then fails at the sender, for all who fetch from it.
        """
        self._queue.clear()
        self._urgent.clear()
        async with self._landed:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(
                    self._landed.wait_for(lambda: not self._flying), self._timeout
                )

    async def _work(self) -> None:
        while self._urgent or self._queue:
            block = self._urgent.popleft() if self._urgent else self._queue.popleft()
            await self.ensure(block)

    async def ensure(self, block: int) -> None:
        """Have a block in the store, or know why it cannot be had."""
        if block in self._flying or block in self._failed or self._store.has(block):
            return
        self._flying.add(block)
        try:
            for attempt in range(1, ATTEMPTS + 1):
                if await self._fetch(block):
                    break
                if attempt == ATTEMPTS:
                    raise TransferError(f"its hash was wrong {ATTEMPTS} times")
        except Exception as error:
            self._failed[block] = _failure(error, self._timeout)
            self._tell(block, self._failed[block].message)
        else:
            self._tell(block, None)
        finally:
            self._flying.discard(block)
            async with self._landed:
                self._landed.notify_all()

    async def _fetch(self, block: int) -> bool:
        """Get a block once; False if what came is not what was sent."""
        staged, buffer = await asyncio.wait_for(
            self._source.stage.call_one(block).as_asyncio(), self._timeout
        )
        arrived = 0
        try:
            memory = self._buffer()
            view = memory[: staged.length]
            buffer = buffer or self._ring[staged.slot]
            await buffer.read_into(view, timeout=max(1, int(self._timeout)))
            if not await asyncio.to_thread(self._keep, block, view, staged):
                return False
            # Only now used again: into the memory of a transfer that failed bytes may still come.
            self._buffers.append(memory)
            arrived = staged.length
            return True
        finally:
            with contextlib.suppress(Exception):
                self._source.release.broadcast(self._host, block, arrived)

    def _buffer(self) -> memoryview:
        if self._buffers:
            return self._buffers.pop()
        return memoryview(mmap.mmap(-1, self._store.layout.block_size))

    def _keep(self, block: int, view: memoryview, staged: Staged) -> bool:
        if blake3(view).digest() != staged.digest:
            return False
        for inode in staged.changed:
            self._store.mark_changed(inode)
        self._store.write(block, view)
        return True


async def fetch_description(source: Any, timeout: float) -> bytes:
    """The description of the tree that ``source`` offers.

    Raises:
        TransferError: it did not arrive whole.
    """
    description = await asyncio.wait_for(source.describe.call_one().as_asyncio(), timeout)
    data = bytearray(description.length)
    await description.buffer.read_into(memoryview(data), timeout=max(1, int(timeout)))
    if blake3(data).digest() != description.digest:
        raise TransferError("the description of the tree arrived damaged", hint="try again")
    return bytes(data)


def _failure(error: Exception, timeout: float) -> WheelmountError:
    if isinstance(error, WheelmountError):
        return error
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return TransferError(f"it did not come within {timeout:g} s", hint="is the client alive?")
    return TransferError(
        f"it could not be fetched: {(str(error) or type(error).__name__).strip().splitlines()[-1]}"
    )
