"""Fetches blocks from a host above or the client: by RDMA, by stream, or in Monarch's messages.

If both ends have an RDMA device, the first blocks are fetched by RDMA and by stream in turn, all
later ones by the faster of the two. After a block that does not arrive by RDMA, all come by stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from wheelmount.errors import TransferError, UnreachableError
from wheelmount.hosts import rdma
from wheelmount.hosts.actor import ActorError
from wheelmount.hosts.runtime import last_line, translate
from wheelmount.mount.serve.traffic import CLIENT, LOCAL, MESSAGES, RDMA, TCP, Traffic
from wheelmount.mount.transfer.rdma import BlockInfo, LayoutKey, Origin, Ways
from wheelmount.mount.transfer.registered import Registered, pool
from wheelmount.mount.transfer.ring import STUCK_AFTER, Parts, Staged
from wheelmount.mount.transfer.stream import BlockClient, Pace, way

Result = TypeVar("Result")

TRIALS = 2
"""Number of blocks by RDMA, and by stream, that are timed for the choice. The first of each also
makes the connection."""


LATE = 6
"""A block that can be sent by stream instead must arrive by RDMA within this part of the time-out:
a device brings it within milliseconds, or never."""


class Wire(Protocol):
    """The network as a ``Receiver`` needs it.

    Each call raises ``TimeoutError`` if the other end does not answer in time, and
    ``WheelmountError`` if the other end refuses it.
    """

    @property
    def received(self) -> int:
        """Bytes that have arrived, roughly, those of unfinished blocks included."""

    async def digest(self, host: str, block: int) -> BlockInfo:
        """Ask a host or ``CLIENT`` for the hash and the changed files of a block."""

    async def parts(self, host: str, block: int, parts: list[tuple[int, int]]) -> Parts:
        """Ask like ``digest``, and for parts of the block, each with its begin and end."""

    async def read(
        self,
        host: str,
        block: int,
        packed: bool,
        urgent: bool,
        memory: memoryview,
        then: Callable[[Staged], Result],
    ) -> tuple[Result, Pace, str]:
        """Fetch a block, and process it on a thread.

        Args:
            host: the host to ask, or ``CLIENT``.
            block: number of the block.
            packed: whether to request the block compressed, if that makes it smaller.
            urgent: whether a reader waits for the block.
            memory: memory of the size of a block, which the bytes are written to. If the fetch
                fails, parts of it may be written even later.
            then: called with the block's description when all bytes have arrived.

        Returns:
            The result of ``then``, the timing, and the transport as ``Traffic`` counts it.
        """

    async def report(self, host: str, length: int) -> None:
        """Tell the client that ``length`` more bytes are here; 0: the host is at work."""

    def rest(self) -> None:
        """Close idle connections; more blocks may still be requested."""

    def close(self) -> None:
        """Abort transfers that can be aborted."""


class Link:
    """The choice of a transport for the blocks from another process.

    Args:
        ways: the transports that the other process offers.
        transport: the setting of that name.

    Attributes:
        ticket: address of the other process's block server; None if it cannot be reached.
        device: whether both ends have an RDMA device that may be used.
        reason: the reason why blocks no longer come by RDMA; empty if they may.
    """

    def __init__(self, ways: Ways, transport: str) -> None:
        self.ticket = ways.ticket
        self.device = ways.device and transport != TCP and rdma.usable()
        self.reason = ""
        self._only = transport == RDMA
        if not self._only and ways.ticket is not None and way(ways.ticket.where) == LOCAL:
            self.device = False  # on one machine, a socket uses no network
        # By whether a block is fetched by RDMA: the number of blocks, and their seconds per byte.
        self._begun = Counter[bool]()
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def by_device(self) -> bool:
        """Return whether to fetch the next block by RDMA.

        Raises:
            TransferError: the setting allows only RDMA, and it cannot be used.
        """
        if self._only and not self.device:
            raise TransferError(
                "transport is rdma, but a host or the client has no RDMA device that Monarch takes",
                hint="set transport to auto",
            )
        if self._only or not self.device or self.reason:
            return self._only
        if self.ticket is None or self._fewest() >= TRIALS:
            return True
        chosen = self._begun[True] <= self._begun[False]
        self._begun[chosen] += 1
        return chosen

    def limit(self, timeout: float) -> int:
        """Return the seconds, out of a time-out, in which a block must arrive by RDMA."""
        alone = self._only or self.ticket is None
        return max(1, int(timeout if alone else timeout / LATE))

    def note(self, by_device: bool, size: int, took: float) -> None:
        """Note that the ``size`` bytes of a block took ``took`` seconds to arrive."""
        if not self.device or self._fewest() >= TRIALS:
            return
        self._seconds[by_device].append(took / size)
        if self._fewest() >= TRIALS and not self._only and not self.reason:
            by_rdma, by_stream = min(self._seconds[True]), min(self._seconds[False])
            if by_rdma > by_stream:
                self.reason = f"it took {by_rdma / max(by_stream, 1e-12):.1f} times as long"

    def fail(self, error: UnreachableError) -> None:
        """Stop using RDMA after a block that did not arrive by it.

        Raises:
            UnreachableError: no other transport may be used.
        """
        if self._only or self.ticket is None:
            raise error
        self.reason = f"it failed: {error.message}"

    def _fewest(self) -> int:
        return min(map(len, self._seconds.values()))


class Upstream:
    """A host's connections to the client and to other hosts, as ``Wire`` describes them.

    Args:
        key: key of the layout whose blocks are fetched.
        source: reference to the client's delivery.
        peers: the agents of other hosts, by name.
        timeout: seconds within which the other end must answer.
        transport: the setting of that name.
        traffic: receives the reason if blocks do not come by RDMA.
    """

    def __init__(
        self,
        key: LayoutKey,
        source: Origin,
        peers: Mapping[str, Any],
        timeout: float,
        transport: str,
        traffic: Traffic,
    ) -> None:
        self._origin = source
        self._peers = peers
        self._names: dict[str, LayoutKey | str] = dict.fromkeys(peers, key) | {CLIENT: source.name}
        self._timeout = timeout
        self._client = BlockClient(timeout)
        self._transport = transport
        self._traffic = traffic
        self._links: dict[str, Link] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._closed = False

    @property
    def received(self) -> int:
        """Bytes that have arrived by streams. Any other way must bring a block in one time-out."""
        return self._client.received

    async def digest(self, host: str, block: int) -> BlockInfo:
        """Ask a host or ``CLIENT`` for the hash and the changed files of a block."""
        actor, name = self._actor(host), self._names[host]
        info: BlockInfo = await self._ask(lambda: actor.digest.call_one(name, block))
        return info

    async def parts(self, host: str, block: int, parts: list[tuple[int, int]]) -> Parts:
        """Ask like ``digest``, and for parts of the block, each with its begin and end."""
        actor, name = self._actor(host), self._names[host]
        found: Parts = await self._ask(lambda: actor.parts.call_one(name, block, parts))
        return found

    async def read(
        self,
        host: str,
        block: int,
        packed: bool,
        urgent: bool,
        memory: memoryview,
        then: Callable[[Staged], Result],
    ) -> tuple[Result, Pace, str]:
        """Fetch a block and process it, as ``Wire`` describes."""
        link = await self._link(host)
        if link.by_device():
            try:
                staged, took = await self._read_buffer(host, link, block, False, memory)
            except UnreachableError as error:
                link.fail(error)
                self._traffic.explain(host, link.reason)
            else:
                self._time(host, link, True, len(memory), took)
                return await asyncio.to_thread(then, staged), Pace(0.0, took), RDMA
        if ticket := link.ticket:
            try:
                result, pace = await self._client.read(ticket, block, packed, urgent, memory, then)
            except UnreachableError:
                link.ticket = None
            else:
                self._time(host, link, False, len(memory), pace.took)
                return result, pace, way(ticket.where)
        staged, took = await self._read_buffer(host, link, block, packed, memory)
        return await asyncio.to_thread(then, staged), Pace(0.0, took), MESSAGES

    async def report(self, host: str, length: int) -> None:
        """Tell the client that ``length`` more bytes have arrived at this host."""
        origin = self._origin
        await self._answer(origin.actor.arrived.call_one(origin.name, host, length))

    def rest(self) -> None:
        """Close idle streams; more blocks may still be requested."""
        self._client.rest()

    def close(self) -> None:
        """Abort streams and calls; a transfer by ``RDMABuffer`` goes on.

        If it were aborted, Monarch's fallback over TCP would fail at the sender, for all hosts.
        """
        self._closed = True
        self._client.close()
        for call in self._calls:
            call.cancel()

    def _time(self, host: str, link: Link, by_device: bool, size: int, took: float) -> None:
        """Note how long a block took; report the reason if no more blocks come by RDMA."""
        link.note(by_device, size, took)
        if link.reason:
            self._traffic.explain(host, link.reason)

    def _actor(self, host: str) -> Any:
        return self._origin.actor if host == CLIENT else self._peers[host]

    async def _link(self, host: str) -> Link:
        if host not in self._links:
            ways = await self._answer(self._actor(host).ways.call_one(self._names[host]))
            self._links.setdefault(host, Link(ways, self._transport))
        return self._links[host]

    async def _read_buffer(
        self, host: str, link: Link, block: int, packed: bool, memory: memoryview
    ) -> tuple[Staged, float]:
        """Fetch a block by ``RDMABuffer``; return its description, and the seconds that it took.

        Raises:
            UnreachableError: its bytes did not arrive.
        """
        actor, name = self._actor(host), self._names[host]
        staged: Staged
        try:
            staged, buffer = await self._ask(lambda: actor.stage.call_one(name, block, packed))
        except ActorError as error:
            raise translate(error) from None
        if rdma.usable() or buffer.size() > len(memory):
            landing = pool.take(buffer.size())
        else:  # no device is used, so no memory need be registered
            landing = Registered(memory)
        sent, began, timeout = 0, time.monotonic(), link.limit(self._timeout)
        try:
            await buffer.read_into(landing.view, timeout=timeout)
            sent = staged.size
        except Exception as error:
            late = time.monotonic() - began >= timeout
            reason = f"no bytes for {timeout} s" if late else last_line(error)
            raise UnreachableError(reason) from None
        finally:
            with contextlib.suppress(Exception):
                actor.release.broadcast(name, block, packed, sent)
        took = time.monotonic() - began
        if landing.view is not memory:
            memory[: staged.size] = landing.view[: staged.size]
            # Memory of a failed transfer is not reused, as the transfer may still write to it.
            await pool.give(landing)
        return staged, took

    async def _ask(self, call: Callable[[], Any]) -> Any:
        """Repeat a call to another process as long as it returns None; return the result then."""
        deadline = time.monotonic() + STUCK_AFTER * self._timeout
        while time.monotonic() < deadline:
            answer = await self._answer(call())
            if answer is not None:
                return answer
        raise TransferError(f"the block did not arrive within {STUCK_AFTER * self._timeout:g} s")

    async def _answer(self, call: Any) -> Any:
        answer = asyncio.ensure_future(call.as_asyncio())
        self._calls.add(answer)
        answer.add_done_callback(self._calls.discard)
        try:
            return await asyncio.wait_for(answer, self._timeout)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise TransferError("nothing is fetched any more") from None
