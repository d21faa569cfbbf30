"""Fetches blocks from a host above or the client: by stream if possible, else ``RDMABuffer``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from wheelmount.errors import TransferError, UnreachableError
from wheelmount.hosts import rdma
from wheelmount.hosts.sockets import Ticket
from wheelmount.mount.serve.traffic import CLIENT, MESSAGES, RDMA
from wheelmount.mount.transfer.rdma import BlockInfo, Key, Origin
from wheelmount.mount.transfer.ring import STUCK_AFTER, Staged
from wheelmount.mount.transfer.stream import BlockClient, Pace, way

Result = TypeVar("Result")


class Wire(Protocol):
    """The network as a ``Receiver`` needs it.

    Each call ends with a ``TimeoutError`` if the other end did not answer for a while, and with a
    ``WheelmountError`` if it refused.
    """

    async def digest(self, host: str, block: int) -> BlockInfo:
        """Ask a host or ``CLIENT`` for hash and changed files of a block."""

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
            block: which.
            packed: whether to request it compressed, if it shrinks.
            urgent: whether a reader waits for it.
            memory: to write it to, of the size of a block. After a failure parts may be changed,
                also a little later.
            then: called with its description when all bytes are there.

        Returns:
            What ``then`` returned, the timing, and the way as ``Traffic`` counts it.
        """

    async def report(self, host: str, length: int) -> None:
        """Tell the client that ``length`` more bytes have arrived at this host."""

    def rest(self) -> None:
        """Close idle connections; more blocks may still be requested."""

    def close(self) -> None:
        """Abort transfers that can be aborted."""


class Upstream:
    """A host's connections: Monarch's actors, and the streams that they tell of.

    Args:
        key: of the layout whose blocks are wanted.
        source: the client's delivery.
        peers: the agents of other hosts.
        timeout: seconds within which the other end must answer.
    """

    def __init__(self, key: Key, source: Origin, peers: Mapping[str, Any], timeout: float) -> None:
        self._origin = source
        self._actors = {**peers, CLIENT: source.actor}
        self._names: dict[str, Key | str] = dict.fromkeys(peers, key) | {CLIENT: source.name}
        self._timeout = timeout
        self._client = BlockClient(timeout)
        self._tickets: dict[str, Ticket | None] = {}

    async def digest(self, host: str, block: int) -> BlockInfo:
        """Ask a host or ``CLIENT`` for hash and changed files of a block."""
        actor, name = self._actors[host], self._names[host]
        said: BlockInfo = await self._ask(lambda: actor.digest.call_one(name, block))
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
        """Fetch a block by stream or ``RDMABuffer``, and process it; as ``Wire`` says."""
        if ticket := await self._ticket(host):
            try:
                result, pace = await self._client.read(ticket, block, packed, urgent, memory, then)
            except UnreachableError:
                self._tickets[host] = None
            else:
                return result, pace, way(ticket.where)
        staged, took = await self._read_buffer(host, block, packed, memory)
        by = RDMA if rdma.usable() else MESSAGES
        return await asyncio.to_thread(then, staged), Pace(0.0, took), by

    async def report(self, host: str, length: int) -> None:
        """Tell the client that ``length`` more bytes have arrived at this host."""
        origin = self._origin
        await self._answer(origin.actor.arrived.call_one(origin.name, host, length))

    def rest(self) -> None:
        """Close idle streams; more blocks may still be requested."""
        self._client.rest()

    def close(self) -> None:
        """Abort streams; a transfer by ``RDMABuffer`` goes on.

        If it were aborted, Monarch's fallback over TCP would fail at the sender, for all hosts.
        """
        self._client.close()

    async def _ticket(self, host: str) -> Ticket | None:
        """Return the ticket of a host's block server; None: by ``RDMABuffer``."""
        if host not in self._tickets:
            call = self._actors[host].block_server.call_one(self._names[host], rdma.usable())
            self._tickets.setdefault(host, await self._answer(call))
        return self._tickets[host]

    async def _read_buffer(
        self, host: str, block: int, packed: bool, memory: memoryview
    ) -> tuple[Staged, float]:
        actor, name = self._actors[host], self._names[host]
        staged: Staged
        staged, buffer = await self._ask(lambda: actor.stage.call_one(name, block, packed))
        sent, began = 0, time.monotonic()
        try:
            await buffer.read_into(memory[: staged.size], timeout=max(1, int(self._timeout)))
            sent = staged.size
        finally:
            with contextlib.suppress(Exception):
                actor.release.broadcast(name, block, packed, sent)
        return staged, time.monotonic() - began

    async def _ask(self, call: Callable[[], Any]) -> Any:
        """Call another process, again as long as it answers that it waits; return its answer."""
        deadline = time.monotonic() + STUCK_AFTER * self._timeout
        while time.monotonic() < deadline:
            answer = await self._answer(call())
            if answer is not None:
                return answer
        raise TransferError(f"it did not come within {STUCK_AFTER * self._timeout:g} s")

    async def _answer(self, call: Any) -> Any:
        return await asyncio.wait_for(call.as_asyncio(), self._timeout)
