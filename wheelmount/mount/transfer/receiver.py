"""A host's side of a delivery: fetches blocks, writes them to the store, passes them on.

There is one primitive, ``ensure``: fetch a missing block from the host above, which ensures
it first. A delivery ensures every block in order; a block that a reader waits for
is ensured at once. If the host above fails, the next one above is asked, and in the end
the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import mmap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from blake3 import blake3

from wheelmount.errors import StoreError, TransferError, UnreachableError, WheelmountError
from wheelmount.hosts.runtime import translate
from wheelmount.mount.serve.traffic import CLIENT, Traffic
from wheelmount.mount.store.store import ReblockedStore, Store
from wheelmount.mount.transfer.compression import Choice, Processors, unpack
from wheelmount.mount.transfer.dedup import LocalCopies
from wheelmount.mount.transfer.rdma import BlockInfo
from wheelmount.mount.transfer.relay import Relay
from wheelmount.mount.transfer.ring import Staged
from wheelmount.mount.transfer.topology import LEAST_BLOCK, MOST_BLOCK, SHARE, Route
from wheelmount.mount.transfer.upstream import Wire
from wheelmount.mount.transfer.window import MANY, Order, Window

ATTEMPTS, RETRY_DELAY_STEP = 3, 0.2
"""Attempts to fetch a block from the client if its hash is wrong or it does not arrive, and seconds
by which the delay between attempts grows."""

AGAIN = 2.0
"""Seconds for which a failed block counts as failed. After that the next request for it
tries again."""


class Receiver:
    """Fetches one generation to one host, and passes its blocks on.

    Args:
        host: the host's name.
        store: where blocks are written.
        wire: connects to the client and to other hosts.
        route: the hosts between the client and this one.
        in_flight: blocks fetched at once in order, shared by all trees, and as many again
            for readers; fewer over a slow link, see ``Window``. Blocks that peers
            ask for come on top: if they waited for these, two hosts could wait for each other.
        processors: of this host; over a very fast link, as many blocks are fetched at once.
        compress: as in the settings.
        timeout: seconds within which another process must answer.
        traffic: counts bytes received and sent.
        tell: called with each block that is complete, or with one that failed and the reason.
        look: searches for bytes that this host has already; called once, on a thread.

    Attributes:
        relay: passes blocks on to other hosts.
        traffic: as given.
    """

    def __init__(
        self,
        host: str,
        store: Store | ReblockedStore,
        wire: Wire,
        route: Route,
        *,
        in_flight: int,
        processors: int = 1,
        compress: str,
        timeout: float,
        traffic: Traffic,
        tell: Callable[[int, str | None], None],
        look: Callable[[], LocalCopies | None] | None = None,
    ) -> None:
        self.layout = store.layout
        self.traffic = traffic
        self._host = host
        self._store = store
        self._look = look
        self._looking: asyncio.Task[LocalCopies | None] | None = None
        self._wire = wire
        self._route = route
        self._in_flight = in_flight
        self._timeout = timeout
        self._tell = tell
        usual = max(SHARE, in_flight // len(route.trees))
        most = usual * (MOST_BLOCK // max(LEAST_BLOCK, min(self.layout.block_size, MOST_BLOCK)))
        quick = min(processors, MANY) // len(route.trees)
        self._windows = [Window(usual, most, quick) for _ in route.trees]
        self._orders: list[Order] = []
        self._demand = asyncio.Semaphore(in_flight)
        self._demanded: set[asyncio.Task[None]] = set()
        self._wanted: Counter[int] = Counter()  # number of readers that wait for an urgent block
        self._flying: dict[int, asyncio.Task[None]] = {}
        self._failed: dict[int, tuple[float, WheelmountError]] = {}
        self._lost: set[str] = set()
        self._ended = False
        self._calls: defaultdict[str, set[asyncio.Future[bool]]] = defaultdict(set)
        spare = Processors().spare
        self._choices: defaultdict[str, Choice] = defaultdict(lambda: Choice(spare))
        self._compress = compress
        self._buffers: list[memoryview] = []
        self.relay = Relay(
            store, self._ensure_below, self._confirm, self.traffic, timeout, route.below
        )
        self._unreported = 0
        self._reported = 0.0
        self._reports: set[asyncio.Task[None]] = set()

    def want(self, block: int) -> None:
        """Fetch a block that a read waits for, ahead of all others, and go on behind it."""
        for order in self._orders:
            order.follow(block)
        if self._store.has(block):
            self._tell(block, None)
        elif error := self._failure_of(block):
            self._tell(block, error.message)
        else:
            task = asyncio.ensure_future(self._meet(block))
            self._demanded.add(task)
            task.add_done_callback(self._demanded.discard)

    async def _meet(self, block: int) -> None:
        async with self._demand:
            with self._reading(block):
                await self.ensure(block, urgent=True)

    @contextlib.contextmanager
    def _reading(self, block: int) -> Iterator[None]:
        """Count a reader that waits for a block, here or on a host below, during the context."""
        self._wanted[block] += 1
        try:
            with self._window(block).reading():
                yield
        finally:
            self._wanted[block] -= 1
            if not self._wanted[block]:
                del self._wanted[block]

    def _failure_of(self, block: int) -> WheelmountError | None:
        """Return why fetching a block failed a moment ago; None if it did not."""
        when, error = self._failed.get(block, (0.0, None))
        return error if asyncio.get_running_loop().time() < when + AGAIN else None

    async def run(self) -> None:
        """Fetch all missing blocks. After a failure it may be called again.

        Raises:
            TransferError: some blocks did not arrive; all others did.
        """
        await self._fetch_missing()
        if self._store.missing() and not any(
            isinstance(error, StoreError) for _, error in self._failed.values()
        ):  # a block that failed a while ago may be available now
            await asyncio.sleep(AGAIN)
            await self._fetch_missing()
        self._buffers.clear()
        self._wire.rest()
        self._look = self._looking = None
        with contextlib.suppress(Exception):  # for people only
            await self._report()
        self._check()
        if missing := self._store.missing():
            reasons = (self._failed[block] for block in missing if block in self._failed)
            _, error = next(reasons, (0.0, TransferError("it was not asked for")))
            raise TransferError(
                f"{len(missing)} of {self.layout.blocks} blocks did not arrive at "
                f"{self._host}; one of them: {error.message}",
                hint=error.hint,
            )

    async def _fetch_missing(self) -> None:
        missing, trees = self._store.missing(), len(self._windows)
        self._orders = [
            Order(block for block in missing if block % trees == tree) for tree in range(trees)
        ]
        await asyncio.gather(*map(self._work, self._orders, self._windows))

    async def _work(self, order: Order, window: Window) -> None:
        flights = set()
        while True:
            await window.room()
            if self._ended or (block := order.pop()) is None:
                break
            if not self._store.has(block) and self._failure_of(block) is None:
                flights.add(flight := self._fly(block, urgent=True))
                flight.add_done_callback(flights.discard)
        if flights:
            await asyncio.wait(flights)

    def close(self) -> None:
        """Stop fetching, reporting and passing on."""
        self._ended = True
        for task in self._demanded:
            task.cancel()
        self._wire.close()
        self.relay.close()

    async def stop(self) -> None:
        """Close, and wait for transfers that are on their way.

        A process that ends during a transfer harms others: Monarch's
        fallback over TCP then fails at the sender, for all that fetch from it.
        """
        self.close()
        if self._flying:
            await asyncio.wait(self._flying.values(), timeout=self._timeout)

    def mark_dead(self, host: str) -> None:
        """Note that a host is lost: end all waits for it."""
        self._lost.add(host)
        for call in self._calls[host]:
            call.cancel()

    async def _confirm(self, block: int) -> BlockInfo:
        """Compare a block that arrived before this receiver was made with the client's hash."""
        digest, changed = await self._wire.digest(CLIENT, block)
        memory = self._buffer()
        view = memory[: self.layout.length(block)]
        await asyncio.to_thread(self._store.read_block, block, view)
        if (await asyncio.to_thread(blake3, view)).digest() != digest:
            raise TransferError(f"block {block} on {self._host} is not what the client has")
        if len(self._buffers) < self._in_flight:  # nothing clears them where no block is to come
            self._buffers.append(memory)
        return digest, changed

    async def ensure(self, block: int, *, urgent: bool = False) -> WheelmountError | None:
        """Fetch a block unless the store has it; return why it failed, None if it did not.

        Args:
            block: which.
            urgent: whether a reader waits for it, here or on a host below.
        """
        if not self._store.has(block) and self._failure_of(block) is None:
            await asyncio.wait({self._fly(block, urgent=urgent)})
        return None if self._store.has(block) else self._failed[block][1]

    async def _ensure_below(self, block: int, urgent: bool) -> WheelmountError | None:
        """Ensure a block for a host below."""
        with self._reading(block) if urgent else contextlib.nullcontext():
            return await self.ensure(block, urgent=urgent)

    def _fly(self, block: int, *, urgent: bool) -> asyncio.Task[None]:
        task = self._flying.get(block)
        if task is None:
            if urgent:
                self._window(block).begin()
            task = self._flying[block] = asyncio.ensure_future(self._get(block, begun=urgent))
        elif urgent:
            self._window(block).hurry(block)
        return task

    def _window(self, block: int) -> Window:
        return self._windows[block % len(self._windows)]

    async def _get(self, block: int, *, begun: bool) -> None:
        if not begun:
            await self._window(block).turn(block)
        try:
            await self._from_anybody(block)
        except Exception as error:
            failure = self._failure(error)
            self._failed[block] = asyncio.get_running_loop().time(), failure
            if not self._ended:
                self._tell(block, failure.message)
        else:
            self._failed.pop(block, None)
            if not self._ended:
                self._tell(block, None)
        finally:
            del self._flying[block]
            self._window(block).end()

    async def _from_anybody(self, block: int) -> None:
        for host in self._above(block):
            self._check()
            call = asyncio.ensure_future(self._fetch(block, host))
            self._calls[host].add(call)
            try:
                if await call:
                    return
            except asyncio.CancelledError:
                if host not in self._lost:
                    raise
            except Exception as failure:
                # The host above failed, or one above that: ask the next.
                if isinstance(failure, TimeoutError | asyncio.TimeoutError | UnreachableError):
                    self._lost.add(host)
            finally:
                self._calls[host].discard(call)
        reason: WheelmountError = TransferError(f"its hash was wrong {ATTEMPTS} times")
        for attempt in range(ATTEMPTS):
            self._check()
            await asyncio.sleep(attempt * RETRY_DELAY_STEP)
            try:
                if await self._fetch(block, CLIENT):
                    return
            except (TransferError, TimeoutError, asyncio.TimeoutError) as error:
                reason = self._failure(error)  # a connection that failed may work again
        raise reason

    def _check(self) -> None:
        if self._ended:
            raise TransferError(f"delivery to {self._host} was given up")

    def _above(self, block: int) -> Iterator[str]:
        trees = self._route.trees
        return (host for host in trees[block % len(trees)] if host not in self._lost)

    async def _fetch(self, block: int, host: str) -> bool:
        """Fetch a block from a host once; return False if its hash is wrong."""
        if (here := await self._here(block)) and await self._reuse(here, block, host):
            return True
        clock = asyncio.get_running_loop().time
        choice = self._choices[host]
        packed = choice.packed() if self._compress == "auto" else self._compress == "always"
        began = clock()
        memory = self._buffer()
        keep = functools.partial(self._keep, block, packed, memory)
        urgent = self._wanted[block] > 0
        (staged, spare), pace, way = await self._wire.read(
            host, block, packed, urgent, memory, keep
        )
        ended = clock()
        self._window(block).note(ended - began - pace.waited - pace.took, pace.took)
        if spare is None:
            return False
        # Reused only now: a failed transfer may still write to its memory.
        self._buffers.append(spare)
        self.traffic.note(host, staged.size, way)
        choice.note(packed, staged.length, began, ended)
        self._count(staged.length)
        return True

    async def _here(self, block: int) -> LocalCopies | None:
        """Return local files that may make a block, once they are searched; None if none may."""
        if self._look is None:
            return None
        if self._looking is None:
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._look))
        found = await asyncio.shield(self._looking)
        return found if found is not None and found.covers(block) else None

    async def _reuse(self, here: LocalCopies, block: int, host: str) -> bool:
        """Copy a block from local files if it has the hash that another host told."""
        said = await self._wire.digest(host, block)
        memory = self._buffer()
        view = memory[: self.layout.length(block)]
        kept = await asyncio.to_thread(
            lambda: here.read(block, view) and self._write(block, view, said)
        )
        self._buffers.append(memory)
        if kept:
            self.traffic.reused += len(view)
            self._count(len(view))
        return kept

    def _buffer(self) -> memoryview:
        if self._buffers:
            return self._buffers.pop()
        return memoryview(mmap.mmap(-1, self.layout.block_size))

    def _keep(
        self, block: int, packed: bool, memory: memoryview, staged: Staged
    ) -> tuple[Staged, memoryview | None]:
        """Check a block and write it to the store; return free memory, or None if it is damaged."""
        view = memory[: staged.size]
        if staged.size < staged.length:
            try:
                view = unpack(view, staged.length)
            except TransferError:
                return staged, None
        if not self._write(block, view, (staged.digest, staged.changed)):
            return staged, None
        return staged, self.relay.put(staged, block, packed, memory)

    def _write(self, block: int, view: memoryview, said: BlockInfo) -> bool:
        digest, changed = said
        if len(view) != self.layout.length(block) or blake3(view).digest() != digest:
            return False
        for inode in changed:
            self._store.mark_changed(inode)
        self.relay.note(block, said)
        self._store.write(block, view, digest)
        return True

    def _count(self, length: int) -> None:
        self._unreported += length
        now = asyncio.get_running_loop().time()
        if now > self._reported + self._route.report:
            self._reported = now
            reporting = asyncio.ensure_future(self._report())
            self._reports.add(reporting)
            reporting.add_done_callback(self._forget_report)

    def _forget_report(self, report: asyncio.Task[None]) -> None:
        self._reports.discard(report)
        if not report.cancelled():
            report.exception()  # for people only

    async def _report(self) -> None:
        length, self._unreported = self._unreported, 0
        await self._wire.report(self._host, length)

    def _failure(self, error: Exception) -> WheelmountError:
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            return TransferError(
                f"nothing came for {self._timeout:g} s", hint="is the client alive?"
            )
        failure = translate(error)
        if isinstance(failure, TransferError) or isinstance(error, WheelmountError):
            return failure
        return TransferError(f"it could not be fetched: {failure.message}", hint=failure.hint)
