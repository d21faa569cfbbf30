"""A host's side of a delivery: fetches blocks, writes them to the store, passes them on.

A missing block is fetched by ``ensure`` from the host above, which first ensures that it has the
block itself. A delivery ensures all blocks in order; a block that a reader waits for is ensured
immediately. If the host above fails, the block is fetched from the next host above, and in the end
from the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import mmap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from blake3 import blake3

from wheelmount import linux
from wheelmount.errors import StoreError, TransferError, UnreachableError, WheelmountError
from wheelmount.hosts.runtime import translate
from wheelmount.mount.serve.traffic import CLIENT, MESSAGES, Traffic
from wheelmount.mount.snapshot.layout import Extent
from wheelmount.mount.store.kept import Kept
from wheelmount.mount.store.store import ReblockedStore, Store
from wheelmount.mount.transfer.compression import Choice, Processors, unpack
from wheelmount.mount.transfer.dedup import LocalCopies
from wheelmount.mount.transfer.rdma import BlockInfo
from wheelmount.mount.transfer.relay import Relay
from wheelmount.mount.transfer.ring import Staged
from wheelmount.mount.transfer.topology import LEAST_BLOCK, MOST_BLOCK, SHARE, Route
from wheelmount.mount.transfer.upstream import Wire
from wheelmount.mount.transfer.window import MAX_FAST, Order, Window

log = logging.getLogger("wheelmount")

ATTEMPTS, RETRY_DELAY_STEP = 3, 0.2
"""Number of attempts to fetch a block from the client, and seconds by which the delay between them
grows."""

RETRY_AFTER = 2.0
"""Seconds after a failure during which requests for the block fail too. Later requests fetch it
again."""


class Receiver:
    """Fetches one generation to one host, and passes its blocks on.

    Args:
        host: the host's name.
        store: the store that blocks are written to.
        wire: connects to the client and to other hosts.
        route: the hosts between the client and this one.
        in_flight: number of blocks fetched at the same time in order, shared by all trees, and of
            blocks fetched for readers; fewer over a slow link, see ``Window``. Blocks that peers
            ask for are not counted: if they waited for others, two hosts could wait for each
            other.
        processors: number of this host's processors; over a very fast link, as many blocks are
            fetched at the same time.
        compress: the setting of that name.
        timeout: seconds within which another process must answer.
        traffic: counts bytes received and sent.
        tell: called with the number of each block that arrived and None, or that failed and the
            reason.
        look: searches for bytes that this host has already; called once, on a thread.
        kept: keeps the blocks for later mounts.

    Attributes:
        relay: passes blocks on to other hosts.
        traffic: the argument of that name.
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
        kept: Kept | None = None,
    ) -> None:
        self.layout = store.layout
        self.traffic = traffic
        self._host = host
        self._store = store
        self._look = look
        self._kept = kept
        self._search: asyncio.Task[LocalCopies | None] | None = None
        self._search_clock = linux.ThreadClock()
        self._wire = wire
        self._route = route
        self._in_flight = in_flight
        self._timeout = timeout
        self._tell = tell
        at_first = max(SHARE, in_flight // len(route.trees))
        most = at_first * (MOST_BLOCK // max(LEAST_BLOCK, min(self.layout.block_size, MOST_BLOCK)))
        over_fast_link = min(processors, MAX_FAST) // len(route.trees)
        self._windows = [Window(at_first, most, over_fast_link) for _ in route.trees]
        self._orders: list[Order] = []
        self._ranks = {block: rank for rank, block in enumerate(route.first)}
        self._reader_slots = asyncio.Semaphore(in_flight)
        self._reader_tasks: set[asyncio.Task[None]] = set()
        self._waiting: Counter[int] = Counter()  # number of readers that wait for each block
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._failed: dict[int, tuple[float, WheelmountError]] = {}
        self._avoided: set[str] = set()
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
        """Fetch a block that a reader waits for before all others, then those next in order."""
        for order in self._orders:
            order.follow(block)
        if self._store.has(block):
            self._tell(block, None)
        elif error := self._recent_failure(block):
            self._tell(block, error.message)
        else:
            task = asyncio.ensure_future(self._fetch_for_reader(block))
            self._reader_tasks.add(task)
            task.add_done_callback(self._reader_tasks.discard)

    async def _fetch_for_reader(self, block: int) -> None:
        async with self._reader_slots:
            with self._reading(block):
                await self.ensure(block, urgent=True)

    @contextlib.contextmanager
    def _reading(self, block: int) -> Iterator[None]:
        """Count a reader that waits for a block, here or on a host below, during the context."""
        self._waiting[block] += 1
        try:
            with self._window(block).reading():
                yield
        finally:
            self._waiting[block] -= 1
            if not self._waiting[block]:
                del self._waiting[block]

    def _recent_failure(self, block: int) -> WheelmountError | None:
        """Return the error of a fetch that failed less than ``RETRY_AFTER`` ago, else None."""
        when, error = self._failed.get(block, (0.0, None))
        return error if asyncio.get_running_loop().time() < when + RETRY_AFTER else None

    async def run(self) -> None:
        """Fetch all missing blocks; may be called again after a failure.

        Raises:
            TransferError: some blocks did not arrive; all others did.
        """
        telling = asyncio.ensure_future(self._tell_of_bytes())
        try:
            await self._fetch_missing()
            if self._store.missing() and not any(
                isinstance(error, StoreError) for _, error in self._failed.values()
            ):  # a block that failed earlier may be available now
                await asyncio.sleep(RETRY_AFTER)
                await self._fetch_missing()
        finally:
            telling.cancel()
        self._buffers.clear()
        self._wire.rest()
        self._look = self._search = None
        with contextlib.suppress(Exception):  # only the shown progress depends on reports
            await self._report()
        self._check_open()
        if missing := self._store.missing():
            reasons = (self._failed[block] for block in missing if block in self._failed)
            _, error = next(reasons, (0.0, TransferError("it was not requested")))
            raise TransferError(
                f"{len(missing)} of {self.layout.blocks} blocks did not arrive at "
                f"{self._host}; one of them: {error.message}",
                hint=error.hint,
            )

    async def _fetch_missing(self) -> None:
        missing, trees = self._store.missing(), len(self._windows)
        self._orders = [
            Order((block for block in missing if block % trees == tree), self._ranks)
            for tree in range(trees)
        ]
        await asyncio.gather(*map(self._fetch_in_order, self._orders, self._windows))

    async def _fetch_in_order(self, order: Order, window: Window) -> None:
        fetches = set()
        while True:
            await window.room()
            if self._ended or (block := order.pop()) is None:
                break
            if not self._store.has(block) and self._recent_failure(block) is None:
                fetches.add(fetch := self._start_fetch(block, urgent=True))
                fetch.add_done_callback(fetches.discard)
        if fetches:
            await asyncio.wait(fetches)

    def close(self) -> None:
        """Stop fetching blocks, reporting them, and passing them on."""
        self._ended = True
        for task in self._reader_tasks:
            task.cancel()
        self._wire.close()
        self.relay.close()

    async def stop(self) -> None:
        """Close, and wait for transfers that have begun.

        If this process ended during a transfer, Monarch's fallback over TCP would fail at the
        sender, for all hosts that fetch from it.
        """
        self.close()
        if self._fetches:
            await asyncio.wait(self._fetches.values(), timeout=self._timeout)

    def avoid(self, host: str) -> None:
        """Fetch nothing more from a host that is lost or slow, and end all waits for it."""
        self._avoided.add(host)
        for call in self._calls[host]:
            call.cancel()

    async def _confirm(self, block: int) -> BlockInfo:
        """Compare a block that arrived before this receiver was made with the client's hash.

        Returns:
            The hash, and the numbers of changed files.

        Raises:
            TransferError: the block has another hash.
        """
        digest, changed = await self._wire.digest(CLIENT, block)
        memory = self._buffer()
        view = memory[: self.layout.length(block)]
        await asyncio.to_thread(self._store.read_block, block, view)
        if (await asyncio.to_thread(blake3, view)).digest() != digest:
            raise TransferError(f"block {block} on {self._host} differs from the client's")
        # If no block is to arrive, ``run`` does not clear the buffers.
        if len(self._buffers) < self._in_flight:
            self._buffers.append(memory)
        return digest, changed

    async def ensure(self, block: int, *, urgent: bool = False) -> WheelmountError | None:
        """Fetch a block unless the store has it; return the error if it could not be fetched.

        Args:
            block: number of the block.
            urgent: whether a reader waits for the block, here or on a host below.
        """
        if not self._store.has(block) and self._recent_failure(block) is None:
            await asyncio.wait({self._start_fetch(block, urgent=urgent)})
        return None if self._store.has(block) else self._failed[block][1]

    async def _ensure_below(self, block: int, urgent: bool) -> WheelmountError | None:
        """Ensure a block for a host below."""
        with self._reading(block) if urgent else contextlib.nullcontext():
            return await self.ensure(block, urgent=urgent)

    def _start_fetch(self, block: int, *, urgent: bool) -> asyncio.Task[None]:
        task = self._fetches.get(block)
        if task is None:
            if urgent:
                self._window(block).begin()
            task = self._fetches[block] = asyncio.ensure_future(
                self._fetch_anywhere(block, begun=urgent)
            )
        elif urgent:
            self._window(block).hurry(block)
        return task

    def _window(self, block: int) -> Window:
        return self._windows[block % len(self._windows)]

    async def _fetch_anywhere(self, block: int, *, begun: bool) -> None:
        if not begun:
            await self._window(block).turn(block)
        try:
            await self._fetch_from_above(block)
        except Exception as error:
            failure = self._error_for(error)
            self._failed[block] = asyncio.get_running_loop().time(), failure
            if not self._ended:
                self._tell(block, failure.message)
        else:
            self._failed.pop(block, None)
            if not self._ended:
                self._tell(block, None)
        finally:
            del self._fetches[block]
            self._window(block).end()

    async def _fetch_from_above(self, block: int) -> None:
        clock = asyncio.get_running_loop().time
        for host in self._above(block):
            self._check_open()
            began = clock()
            call = asyncio.ensure_future(self._fetch_from(block, host))
            self._calls[host].add(call)
            try:
                if await call:
                    return
            except asyncio.CancelledError:
                if host not in self._avoided:
                    raise
            except Exception as failure:  # of this host or of one above it
                stuck = clock() > began + self._timeout  # it waited for the block itself
                silent = isinstance(failure, TimeoutError | asyncio.TimeoutError | UnreachableError)
                if stuck or silent:
                    self._avoided.add(host)
            finally:
                self._calls[host].discard(call)
        reason: WheelmountError = TransferError(f"its hash was wrong {ATTEMPTS} times")
        for attempt in range(ATTEMPTS):
            self._check_open()
            await asyncio.sleep(attempt * RETRY_DELAY_STEP)
            try:
                if await self._fetch_from(block, CLIENT):
                    return
            except (TransferError, TimeoutError, asyncio.TimeoutError) as error:
                reason = self._error_for(error)  # a connection that failed may work again
        raise reason

    def _check_open(self) -> None:
        if self._ended:
            raise TransferError(f"delivery to {self._host} was abandoned")

    def _above(self, block: int) -> Iterator[str]:
        trees = self._route.trees
        return (host for host in trees[block % len(trees)] if host not in self._avoided)

    async def _fetch_from(self, block: int, host: str) -> bool:
        """Make one attempt to fetch a block from a host; return False if its hash is wrong."""
        if (copies := await self._local_copies()) and await self._reuse(copies, block, host):
            return True
        clock = asyncio.get_running_loop().time
        choice = self._choices[host]
        packed = choice.packed() if self._compress == "auto" else self._compress == "always"
        began = clock()
        memory = self._buffer()
        keep = functools.partial(self._store_block, block, packed, memory)
        urgent = self._waiting[block] > 0
        (staged, spare), pace, way = await self._wire.read(
            host, block, packed, urgent, memory, keep
        )
        ended = clock()
        self._window(block).note(ended - began - pace.waited - pace.took, pace.took)
        if spare is None:
            return False
        # Memory of a failed transfer is not reused, as the transfer may still write to it.
        self._buffers.append(spare)
        self.traffic.note(host, staged.size, way)
        choice.note(packed, staged.length, began, ended)
        self._count_arrived(staged.length)
        return True

    async def _local_copies(self) -> LocalCopies | None:
        """Search for local files that may have the bytes of blocks; return None if none may."""
        if self._look is None:
            return None
        if self._search is None:
            look = asyncio.to_thread(self._search_clock.run, self._look)
            self._search = asyncio.ensure_future(look)
        try:
            return await asyncio.shield(self._search)
        except Exception as error:  # all bytes can be fetched
            log.info("local files are not searched: %s", error)
            self._look = None
            return None

    async def _reuse(self, copies: LocalCopies, block: int, host: str) -> bool:
        """Make a block of local files, and of a few bytes of ``host`` that these lack.

        Returns False if that does not make the block with the hash that ``host`` has.
        """
        for lacking in copies.tries(block):
            if lacking and self.traffic.certain:
                break
            if lacking:
                parts = [(each.block_offset, each.block_offset + each.length) for each in lacking]
                digest, changed, data = await self._wire.parts(host, block, parts)
                self.traffic.note(host, len(data), MESSAGES)
            else:
                (digest, changed), data = await self._wire.digest(host, block), b""
            memory = self._buffer()
            view = memory[: self.layout.length(block)]
            info = digest, changed
            kept = await asyncio.to_thread(self._copy, copies, block, view, info, lacking, data)
            self._buffers.append(memory)
            if kept is not None:
                self.traffic.kept += kept
                self.traffic.reused += len(view) - kept - len(data)
                self._count_arrived(len(view))
                return True
        return False

    def _copy(
        self,
        copies: LocalCopies,
        block: int,
        view: memoryview,
        info: BlockInfo,
        lacking: Sequence[Extent],
        data: bytes,
    ) -> int | None:
        """Write a block from local files; return how many bytes were kept, or None if it failed."""
        for kept in copies.candidates(block, info[0], view, lacking, data):
            if self._write(block, view, info):
                if kept < len(view):
                    self._keep(block, view, info)
                return kept
        return None

    def _buffer(self) -> memoryview:
        if self._buffers:
            return self._buffers.pop()
        return memoryview(mmap.mmap(-1, self.layout.block_size))

    def _store_block(
        self, block: int, packed: bool, memory: memoryview, staged: Staged
    ) -> tuple[Staged, memoryview | None]:
        """Write a block to the store; return its description and free memory to fetch into.

        Instead of memory, None is returned if the block's hash is wrong.
        """
        view = memory[: staged.size]
        if staged.size < staged.length:
            try:
                view = unpack(view, staged.length)
            except TransferError:
                return staged, None
        info = staged.digest, staged.changed
        if not self._write(block, view, info):
            return staged, None
        self._keep(block, view, info)
        return staged, self.relay.put(staged, block, packed, memory)

    def _write(self, block: int, view: memoryview, info: BlockInfo) -> bool:
        digest, changed = info
        if len(view) != self.layout.length(block) or blake3(view).digest() != digest:
            return False
        for inode in changed:
            self._store.mark_changed(inode)
        self.relay.note(block, info)
        self._store.write(block, view, digest)
        return True

    def _keep(self, block: int, view: memoryview, info: BlockInfo) -> None:
        """Keep a block for later mounts, unless files changed while it was read."""
        digest, changed = info
        if self._kept is not None and not changed:
            extents = list(self.layout.extents(block))
            self._kept.put(digest, view, extents, self.layout.tree.inodes)

    def _count_arrived(self, length: int) -> None:
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
            report.exception()  # else asyncio would log it

    async def _tell_of_bytes(self) -> None:
        """Tell the client that bytes arrive, also where a block takes minutes.

        The words of another host that it waits itself count too, and the search for local bytes as
        long as it takes time of a processor. Else the client would take this host for one whose
        disk hangs (``Delivery``).
        """
        before = (0, 0.0)
        while True:
            await asyncio.sleep(self._timeout / 2)
            before, last = (self._wire.received, self._search_clock.seconds()), before
            if before != last:
                with contextlib.suppress(Exception):
                    await self._report()

    async def _report(self) -> None:
        length, self._unreported = self._unreported, 0
        await self._wire.report(self._host, length)

    def _error_for(self, error: Exception) -> WheelmountError:
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            return TransferError(
                f"no bytes arrived for {self._timeout:g} s", hint="is the client alive?"
            )
        failure = translate(error)
        if isinstance(failure, TransferError) or isinstance(error, WheelmountError):
            return failure
        return TransferError(f"it could not be fetched: {failure.message}", hint=failure.hint)
