"""A host's end of a delivery: it pulls blocks, keeps them, and lets others pull from it.

One primitive, ``ensure``: have a block, or get it from whoever is above for that block, who ensures
it first. Delivery of everything is that for every block in order; a block that somebody waits for
is ensured at once. Whoever is above and fails is passed over for the next above, and in the end for
the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import mmap
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from blake3 import blake3

from wheelmount.errors import TransferError, UnreachableError, WheelmountError
from wheelmount.hosts import rdma
from wheelmount.hosts.engine import translate
from wheelmount.mount import stream
from wheelmount.mount.elsewhere import Elsewhere
from wheelmount.mount.packing import Choice, unpack
from wheelmount.mount.recut import Recut
from wheelmount.mount.ring import Ring, Staged
from wheelmount.mount.store import Store
from wheelmount.mount.stream import Inlet, Ticket
from wheelmount.mount.topology import Route
from wheelmount.mount.traffic import CLIENT, Traffic
from wheelmount.mount.transfer import Offer, Way

ATTEMPTS = 3
"""Times the client is asked for a block that arrives with the wrong hash."""

LEAST_SHARE = 2
"""Blocks on their way in each tree, so that no link waits for what another brings."""

RELAYED = 12
"""Blocks a host keeps staged for others; they are read from its store again where need be."""


class Receiver:
    """A host's end of the delivery of one generation.

    Args:
        host: its name.
        store: where blocks go.
        source: the client's actor.
        route: who is between the client and this host.
        in_flight: blocks fetched at the same time because they are next, shared by all trees, and
            because somebody reads them. Others that peers ask for come on top: were those to wait
            for these, two hosts could wait for each other.
        timeout: seconds a block may take.
        tell: called with every block that is whole, and with one that failed and the reason.
        look: looks for what is here already; called once, on a thread.
    """

    def __init__(
        self,
        host: str,
        store: Store | Recut,
        source: Any,
        route: Route,
        *,
        in_flight: int,
        timeout: float,
        tell: Callable[[int, str | None], None],
        look: Callable[[], Elsewhere | None] | None = None,
    ) -> None:
        self.layout = store.layout
        self.traffic = Traffic()
        self._host = host
        self._store = store
        self._look = look
        self._looking: asyncio.Task[Elsewhere | None] | None = None
        self._source = source
        self._route = route
        self._in_flight = in_flight
        self._timeout = timeout
        self._tell = tell
        self._queues: list[deque[int]] = [deque() for _ in route.trees]
        for block in store.missing():
            self._queues[block % len(route.trees)].append(block)
        self._demand = asyncio.Semaphore(in_flight)
        self._demanded: set[asyncio.Task[None]] = set()
        self._flying: dict[int, asyncio.Task[None]] = {}
        self._failed: dict[int, WheelmountError] = {}
        self._given: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._lost: set[str] = set()
        self._ended = False
        self._calls: defaultdict[str, set[asyncio.Future[bool]]] = defaultdict(set)
        self._choices: defaultdict[str, Choice] = defaultdict(Choice)
        self._buffers: list[memoryview] = []
        self._ways: defaultdict[str, Way] = defaultdict(_way)
        self._inlet = Inlet(timeout)
        self._ring = Ring(self, slots=RELAYED, lease=timeout)
        self._offer: Offer | None = None
        self._unreported = 0
        self._reported = time.monotonic()

    def want(self, block: int) -> None:
        """Get a block that a read waits for, ahead of all that merely are to come."""
        if self._store.has(block):
            self._tell(block, None)
        elif block in self._failed:
            self._tell(block, self._failed[block].message)
        else:
            task = asyncio.ensure_future(self._meet(block))
            self._demanded.add(task)
            task.add_done_callback(self._demanded.discard)

    async def _meet(self, block: int) -> None:
        async with self._demand:
            await self.ensure(block)

    async def run(self) -> None:
        """Fetch everything.

        Raises:
            TransferError: something did not arrive; all the rest did.
        """
        share = max(LEAST_SHARE, self._in_flight // len(self._queues))
        await asyncio.gather(*(self._work(queue) for queue in self._queues * share))
        self._buffers.clear()
        self._inlet.close()
        self._look = self._looking = None
        with contextlib.suppress(Exception):  # for people only
            await asyncio.wait_for(self._report().as_asyncio(), self._timeout)
        if self._ended:
            raise TransferError(f"delivery to {self._host} was given up")
        if self._failed:
            block, error = next(iter(self._failed.items()))
            raise TransferError(
                f"{len(self._failed)} of {self.layout.blocks} blocks did not arrive at "
                f"{self._host}; block {block}: {error.message}",
                hint=error.hint,
            )

    def retire(self) -> None:
        """Fetch nothing more, and tell of nothing: another takes its place."""
        self._ended = True
        for queue in self._queues:
            queue.clear()
        for task in self._demanded:
            task.cancel()

    async def stop(self) -> None:
        """Fetch nothing more, and wait for what is on its way.

        A process that ends with a transfer on its way takes more than itself down: Monarch's
        fallback over TCP then fails at the sender, for all who fetch from it.
        """
        self.retire()
        if self._flying:
            await asyncio.wait(self._flying.values(), timeout=self._timeout)
        self.close()

    def close(self) -> None:
        """Fetch nothing more, and give nothing: what is here is of no use to anybody."""
        self.retire()
        self._inlet.close()
        if self._offer is not None:
            self._offer.close()

    def lose(self, host: str) -> None:
        """Do not wait for a host any more: it is gone."""
        self._lost.add(host)
        for call in self._calls[host]:
            call.cancel()

    async def stage(self, block: int, packed: bool, way: Way) -> tuple[Staged, Any]:
        """Have a block staged for another host, until ``release``; see ``Offer``.

        Raises:
            TransferError: it cannot be had.
        """
        if self._ended:
            raise TransferError(f"{self._host} gives nothing any more")
        if error := await self.ensure(block):
            raise error
        if block not in self._given:
            await self._confirm(block)
        if self._offer is None:
            self._offer = Offer(self._ring, stream.outlet(self._ring.slots, self._timeout))
        return await self._offer.stage(block, packed, way)

    def release(self, block: int, packed: bool, sent: int) -> None:
        """See ``Offer.release``."""
        self._ring.release(block, packed, sent)
        self.traffic.sent = self._ring.sent

    def fill(self, block: int, view: memoryview) -> tuple[bytes, tuple[int, ...]]:
        """A block as it came; see ``Filler``."""
        self._store.read_block(block, view)
        return self._given[block]

    async def _confirm(self, block: int) -> None:
        """See with the client that a block is right which arrived before this receiver was."""
        call = self._source.stage.call_one(self.layout.key, block, False, Way.STREAM)
        staged, _ = await asyncio.wait_for(call.as_asyncio(), self._timeout)
        try:
            memory = self._buffer()
            view = memory[: staged.length]
            await asyncio.to_thread(self._store.read_block, block, view)
            if await asyncio.to_thread(_digest, view) != staged.digest:
                raise TransferError(f"block {block} on {self._host} is not what the client has")
            self._given[block] = staged.digest, staged.changed
            self._buffers.append(memory)
        finally:
            self._let_go(self._source, block, False, 0)

    async def _work(self, queue: deque[int]) -> None:
        while queue:
            await self.ensure(queue.popleft())

    async def ensure(self, block: int) -> WheelmountError | None:
        """Have a block in the store; returns why it cannot be had if that is so."""
        if not self._store.has(block) and block not in self._failed:
            await asyncio.shield(self._fly(block))
        return self._failed.get(block)

    def _fly(self, block: int) -> asyncio.Task[None]:
        task = self._flying.get(block)
        if task is None:
            task = self._flying[block] = asyncio.ensure_future(self._get(block))
        return task

    async def _get(self, block: int) -> None:
        try:
            await self._from_anybody(block)
        except Exception as error:
            self._failed[block] = self._failure(error)
            if not self._ended:
                self._tell(block, self._failed[block].message)
        else:
            self._tell(block, None)
        finally:
            del self._flying[block]

    async def _from_anybody(self, block: int) -> None:
        for host in self._above(block):
            call = asyncio.ensure_future(self._fetch(block, host))
            self._calls[host].add(call)
            try:
                if await call:
                    return
            except asyncio.CancelledError:
                if host not in self._lost:
                    raise
            except Exception as failure:
                # Whoever is above failed, or somebody above that: ask who is left.
                if isinstance(failure, TimeoutError | asyncio.TimeoutError):
                    self._lost.add(host)
            finally:
                self._calls[host].discard(call)
        for _ in range(ATTEMPTS):
            if await self._fetch(block, CLIENT):
                return
        raise TransferError(f"its hash was wrong {ATTEMPTS} times")

    def _above(self, block: int) -> Iterator[str]:
        trees = self._route.trees
        return (host for host in trees[block % len(trees)] if host not in self._lost)

    async def _fetch(self, block: int, host: str) -> bool:
        """Get a block from a host once; False if what came is not what was sent."""
        above = self._route.peers[host] if host != CLIENT else self._source
        here = await self._here(block)
        choice = self._choices[host]
        packed = here is None and choice.packed()
        began = time.monotonic()
        way = self._ways[host]
        call = above.stage.call_one(self.layout.key, block, packed, way)
        staged, buffer = await asyncio.wait_for(call.as_asyncio(), self._timeout)
        sent = 0
        try:
            memory = self._buffer()
            if here is not None and await asyncio.to_thread(
                self._reuse, here, block, memory, staged
            ):
                self._buffers.append(memory)
                self.traffic.reused += staged.length
                self._count(staged.length)
                return True
            if not await self._read(buffer, block, memory[: staged.size], staged):
                return False
            # Only now used again: into the memory of a transfer that failed bytes may still come.
            self._buffers.append(memory)
            sent = staged.size
            self.traffic.note(host, sent)
            choice.note(packed, staged.length, began, time.monotonic())
            self._count(staged.length)
            return True
        except UnreachableError:
            if way is Way.BUFFER:
                raise
            self._ways[host] = Way.BUFFER
        finally:
            self._let_go(above, block, packed, sent)
        return await self._fetch(block, host)

    async def _read(self, by: Any, block: int, view: memoryview, staged: Staged) -> bool:
        keep = functools.partial(self._keep, block, view, staged)
        if isinstance(by, Ticket):
            return await self._inlet.read(by, view, keep)
        await by.read_into(view, timeout=max(1, int(self._timeout)))
        return await asyncio.to_thread(keep)

    def _let_go(self, above: Any, block: int, packed: bool, sent: int) -> None:
        with contextlib.suppress(Exception):
            above.release.broadcast(self.layout.key, block, packed, sent)

    async def _here(self, block: int) -> Elsewhere | None:
        """Where a block may be on this host already, as soon as that is known."""
        if self._look is None:
            return None
        if self._looking is None:
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._look))
        found = await asyncio.shield(self._looking)
        return found if found is not None and found.covers(block) else None

    def _reuse(self, here: Elsewhere, block: int, memory: memoryview, staged: Staged) -> bool:
        view = memory[: staged.length]
        return here.read(block, view) and self._keep(block, view, staged)

    def _buffer(self) -> memoryview:
        if self._buffers:
            return self._buffers.pop()
        return memoryview(mmap.mmap(-1, self.layout.block_size))

    def _keep(self, block: int, view: memoryview, staged: Staged) -> bool:
        if len(view) < staged.length:
            try:
                view = unpack(view, staged.length)
            except TransferError:
                return False
        if _digest(view) != staged.digest:
            return False
        for inode in staged.changed:
            self._store.mark_changed(inode)
        self._given[block] = staged.digest, staged.changed
        self._store.write(block, view)
        return True

    def _count(self, length: int) -> None:
        self._unreported += length
        if time.monotonic() - self._reported > self._route.report:
            with contextlib.suppress(Exception):
                self._report()

    def _report(self) -> Any:
        length, self._unreported = self._unreported, 0
        self._reported = time.monotonic()
        return self._source.arrived.call_one(self._host, length)

    def _failure(self, error: Exception) -> WheelmountError:
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            return TransferError(
                f"it did not come within {self._timeout:g} s", hint="is the client alive?"
            )
        failure = translate(error)
        if isinstance(failure, TransferError) or isinstance(error, WheelmountError):
            return failure
        return TransferError(f"it could not be fetched: {failure.message}", hint=failure.hint)


def _way() -> Way:
    return Way.DEVICE if rdma.usable() else Way.STREAM


def _digest(view: memoryview) -> bytes:
    return blake3(view).digest()
