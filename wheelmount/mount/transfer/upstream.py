"""How a host gets blocks from whoever is above: a stream where it can, else ``RDMABuffer``."""

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
    """What a ``Receiver`` needs of the network.

    Each call ends with a ``TimeoutError`` when the other end said nothing for a while, and with a
    ``WheelmountError`` when it cannot give what it is asked for.
    """

    async def digest(self, host: str, block: int) -> BlockInfo:
        """What a block is, from a host or ``CLIENT``."""

    async def read(
        self,
        host: str,
        block: int,
        packed: bool,
        urgent: bool,
        memory: memoryview,
        then: Callable[[Staged], Result],
    ) -> tuple[Result, Pace, str]:
        """Get a block, and go on with it on a thread.

        Args:
            host: from whom; a host, or ``CLIENT``.
            block: which.
            packed: whether to have it compressed, if it is worth it.
            urgent: whether a reader waits for it.
            memory: to have it in, of the size of a block. If this fails, some may be changed, now
                or a little later.
            then: called with what it is once all is there.

        Returns:
            What ``then`` returned, how the block came, and by which way; see ``Traffic``.
        """

    async def report(self, host: str, length: int) -> None:
        """Tell the client that so many bytes more have arrived at this host."""

    def rest(self) -> None:
        """Keep nothing open for blocks to come; more may still be asked for."""

    def close(self) -> None:
        """Give up what can be given up."""


class Upstream:
    """The wire of a host: actors of Monarch, and the streams that they tell of.

    Args:
        key: of the layout whose blocks are wanted.
        source: the client's delivery.
        peers: the agents of hosts.
        timeout: seconds within which the other end must say something.
    """

    def __init__(self, key: Key, source: Origin, peers: Mapping[str, Any], timeout: float) -> None:
        self._origin = source
        self._actors = {**peers, CLIENT: source.actor}
        self._names: dict[str, Key | str] = dict.fromkeys(peers, key) | {CLIENT: source.name}
        self._timeout = timeout
        self._client = BlockClient(timeout)
        self._tickets: dict[str, Ticket | None] = {}

    async def digest(self, host: str, block: int) -> BlockInfo:
        """See ``Wire``."""
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
        """See ``Wire``."""
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
        """See ``Wire``."""
        origin = self._origin
        await self._answer(origin.actor.arrived.call_one(origin.name, host, length))

    def rest(self) -> None:
        """See ``Wire``."""
        self._client.rest()

    def close(self) -> None:
        """See ``Wire``; a transfer by ``RDMABuffer`` goes on.

        If it were given up, Monarch's fallback over TCP would fail at the sender, for all others.
        """
        self._client.close()

    async def _ticket(self, host: str) -> Ticket | None:
        """By what blocks of a host are to be had; None: by ``RDMABuffer``."""
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
        """What another process says, which is asked again as long as it says that it waits."""
        deadline = time.monotonic() + STUCK_AFTER * self._timeout
        while time.monotonic() < deadline:
            answer = await self._answer(call())
            if answer is not None:
                return answer
        raise TransferError(f"it did not come within {STUCK_AFTER * self._timeout:g} s")

    async def _answer(self, call: Any) -> Any:
        return await asyncio.wait_for(call.as_asyncio(), self._timeout)
