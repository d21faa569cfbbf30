"""Blocks on their way out: a ring offered to others, who read from its memory.

The client offers its directory so, and every host what it has received. Where both ends have an
RDMA device that Monarch takes, a block is staged and read by ``RDMABuffer``. Else it comes by a
stream (``BlockServer``); where no stream can be had, by ``RDMABuffer`` again, whose bytes then go
through Monarch's messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from blake3 import blake3

from wheelmount.errors import TransferError
from wheelmount.hosts import rdma, runtime
from wheelmount.hosts.actor import (
    Actor,
    RDMABuffer,
    RDMATcpFallbackWarning,
    concurrent_endpoint,
)
from wheelmount.hosts.sockets import Ticket
from wheelmount.mount.transfer.ring import Ring, Staged
from wheelmount.mount.transfer.stream import PULSE

# Which transport is in use is told by the status, not by a warning in the middle of the output.
# Of wheelmount's own buffers: a user's program may have others.
warnings.filterwarnings("ignore", category=RDMATcpFallbackWarning, module=r"wheelmount\.")

Result = TypeVar("Result")

STAGING_THREADS = 8
"""Threads that read and hash blocks; more than cores because disks are waited for."""

PIECE = 1 << 20
"""Bytes of a description that are fetched at once: each must come within a time-out."""

Key = tuple[bytes, bool, int]
"""See ``Layout.key``."""

BlockInfo = tuple[bytes, tuple[int, ...]]
"""``digest`` and ``changed`` of ``Staged``."""


class Offer:
    """A ring whose memory others can read by ``RDMABuffer``.

    Args:
        ring: what is offered; its memory is registered once.
        timeout: seconds within which others must hear something.
    """

    def __init__(self, ring: Ring, timeout: float) -> None:
        self._ring = ring
        self._soon = PULSE * timeout
        self._buffers: dict[int, Any] = {}
        self._threads = ThreadPoolExecutor(STAGING_THREADS, "wheelmount-stage")

    async def stage(self, block: int, packed: bool) -> tuple[Staged, Any] | None:
        """Have a block in the ring until ``release``.

        Returns:
            What it is, and an ``RDMABuffer`` to read it by; None: ask again, it takes a while.
        """
        staging = asyncio.ensure_future(self._stage(block, packed))
        staged = await within(self._soon, staging)
        if staged is None:
            staging.add_done_callback(lambda done: self._let_go(done, block, packed))
            return None
        return staged, self._buffer(staged)

    def _let_go(self, done: asyncio.Future[Staged], block: int, packed: bool) -> None:
        if not done.cancelled() and done.exception() is None:
            self._ring.release(block, packed)

    async def digest(self, block: int) -> BlockInfo | None:
        """What a block is, which is not to be read; None: ask again, it takes a while."""
        return await within(self._soon, self._digest(block))

    async def _digest(self, block: int) -> BlockInfo:
        staged = await self._stage(block, False)
        self._ring.release(block)
        return staged.digest, staged.changed

    async def _stage(self, block: int, packed: bool) -> Staged:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._ring.stage, block, packed)

    def _buffer(self, staged: Staged) -> Any:
        slot = self._ring.slots[staged.slot]
        if staged.size < len(slot):  # a read takes a buffer whole
            return RDMABuffer(slot[: staged.size])
        if staged.slot not in self._buffers:
            self._buffers[staged.slot] = RDMABuffer(slot)
        return self._buffers[staged.slot]

    def release(self, block: int, packed: bool, sent: int) -> None:
        """Let go of a block of which ``sent`` bytes were fetched (0: it failed)."""
        self._ring.release(block, packed, sent)

    def close(self) -> None:
        """Stage nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def drop(self) -> None:
        """Have Monarch let go of the ring's memory, after ``close``."""
        await _drop(self._buffers.values())
        self._buffers.clear()


async def _drop(buffers: Iterable[Any]) -> None:
    for buffer in buffers:
        with contextlib.suppress(Exception):  # the process may be ending
            await buffer.drop()


async def within(seconds: float, work: Awaitable[Result]) -> Result | None:
    """What something comes to; None if it takes longer, and goes on by itself.

    Args:
        seconds: to wait for it.
        work: the coroutine or task.
    """
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if done:
        return task.result()
    task.add_done_callback(lambda late: late.cancelled() or late.exception())  # it is heard
    return None


@dataclass(frozen=True, slots=True)
class Description:
    """Where the description of a tree can be fetched.

    Attributes:
        size: its bytes.
        digest: blake3 of them all.
        buffers: an ``RDMABuffer`` and its bytes for each piece of it; none where the client has no
            RDMA device.
    """

    size: int
    digest: bytes
    buffers: tuple[tuple[Any, int], ...]

    @classmethod
    def of(cls, data: bytes) -> Description:
        """Register the memory of a description; in an endpoint of an actor."""
        view = memoryview(data)
        pieces = [view[at : at + PIECE] for at in range(0, len(view), PIECE)]
        registered = pieces if rdma.usable() else []
        buffers = tuple((RDMABuffer(piece), len(piece)) for piece in registered)
        return cls(len(view), blake3(view).digest(), buffers)

    async def drop(self) -> None:
        """Have Monarch let go of its memory."""
        await _drop(buffer for buffer, _ in self.buffers)


@dataclass(frozen=True, slots=True)
class Origin:
    """What hosts fetch from: one delivery of the client.

    Attributes:
        actor: the client's ``SourceActor``.
        name: of the delivery, unique among all.
    """

    actor: Any
    name: str


@dataclass(slots=True)
class _Offered:
    """A delivery; what an actor's endpoint has to register comes when it is opened."""

    ring: Ring
    ticket: Ticket | None
    timeout: float
    tree: bytes
    arrived: Callable[[str, int], None]
    description: Description = field(init=False)
    offer: Offer = field(init=False)


_offered: dict[str, _Offered] = {}
"""What this process offers, by name: an actor is sent what can be pickled, a ring cannot."""


def _find(name: str) -> _Offered:
    if name not in _offered:
        raise TransferError("the client offers this no longer", hint="mount it again")
    return _offered[name]


class SourceActor(Actor):  # type: ignore[misc]
    """The client's end: lives in the client's own process, and offers the rings of its deliveries.

    One for all deliveries of a process, as Monarch keeps some 225 KiB of each actor that has ended
    (torchmonarch 0.7.0). ``block_server``, ``digest``, ``stage`` and ``release`` are as of a host's
    ``Agent``.
    """

    @concurrent_endpoint
    async def open(self, name: str) -> None:
        """Register the memory of a delivery."""
        made = _find(name)
        made.description = Description.of(made.tree)
        made.offer = Offer(made.ring, made.timeout)

    @concurrent_endpoint
    async def close(self, name: str) -> None:
        """Have the memory of a delivery back."""
        made = _offered.pop(name)
        made.offer.close()
        await made.offer.drop()
        await made.description.drop()

    @concurrent_endpoint
    async def describe(self, name: str) -> Description:
        """Where the tree is."""
        return _find(name).description

    @concurrent_endpoint
    async def piece(self, name: str, offset: int) -> bytes:
        """``PIECE`` bytes of the tree's description."""
        return _find(name).tree[offset : offset + PIECE]

    @concurrent_endpoint
    async def block_server(self, name: str, device: bool) -> Ticket | None:
        """See ``choose``."""
        return choose(_find(name).ticket, device)

    @concurrent_endpoint
    async def digest(self, name: str, block: int) -> BlockInfo | None:
        """See ``Offer.digest``."""
        return await _find(name).offer.digest(block)

    @concurrent_endpoint
    async def stage(self, name: str, block: int, packed: bool) -> tuple[Staged, Any] | None:
        """See ``Offer.stage``."""
        return await _find(name).offer.stage(block, packed)

    @concurrent_endpoint
    async def release(self, name: str, block: int, packed: bool, sent: int) -> None:
        """See ``Offer.release``."""
        _find(name).offer.release(block, packed, sent)

    @concurrent_endpoint
    async def arrived(self, name: str, host: str, length: int) -> None:
        """Hear that ``length`` bytes more have arrived at a host, from wherever."""
        _find(name).arrived(host, length)


_actors: dict[str, Any] = {}
"""Source actors of this process, by the actor in whose context they were made, with which they
end: of a program's main thread, and of actors of the user's own."""

_spawning = threading.Lock()


def choose(ticket: Ticket | None, device: bool) -> Ticket | None:
    """By what somebody is to get blocks from this process.

    Args:
        ticket: of an block_server, if there is one.
        device: whether the other end has an RDMA device.

    Returns:
        The ticket, or None: by ``RDMABuffer``.
    """
    return None if device and rdma.usable() else ticket


def offer(
    ring: Ring,
    ticket: Ticket | None,
    timeout: float,
    description: bytes,
    arrived: Callable[[str, int], None],
    start_timeout: float,
) -> Origin:
    """Offer a directory to hosts.

    Args:
        ring: its blocks.
        ticket: of their block_server; None where there is none.
        timeout: seconds within which hosts must hear something.
        description: of its tree, as it is to be sent ahead.
        arrived: called with a host's name and a number of bytes as they arrive.
        start_timeout: seconds for memory to be registered.

    Returns:
        What hosts fetch from, until ``withdraw``.

    Raises:
        WheelmountError: memory could not be registered.
    """
    from monarch.actor import context, this_proc

    with _spawning:
        key = str(context().actor_instance.actor_id)
        if key not in _actors:
            name = f"{runtime.NAME}source_{secrets.token_hex(4)}"
            _actors[key] = this_proc().spawn(name, SourceActor)
    origin = Origin(_actors[key], secrets.token_hex(8))
    _offered[origin.name] = _Offered(ring, ticket, timeout, description, arrived)
    try:
        runtime.one(origin.actor.open.call_one(origin.name), start_timeout)
    except BaseException:
        _offered.pop(origin.name, None)
        raise
    return origin


def withdraw(origin: Origin) -> None:
    """Offer a directory no more; bounded, and fine where Monarch is ending."""
    if origin.name in _offered:
        runtime.gather({"": origin.actor.close.call_one(origin.name)}, runtime.MESH_TIMEOUT)
        _offered.pop(origin.name, None)


async def fetch_description(source: Origin, timeout: float) -> bytes:
    """The description of the tree that a client offers.

    Args:
        source: the client's delivery.
        timeout: seconds for each piece of it.

    Raises:
        TransferError: it did not arrive whole.
    """
    actor, name = source.actor, source.name

    async def answer(call: Any) -> Any:
        return await asyncio.wait_for(call.as_asyncio(), timeout)

    description: Description = await answer(actor.describe.call_one(name))
    data = bytearray(description.size)
    view = memoryview(data)
    if description.buffers and rdma.usable():
        for buffer, length in description.buffers:
            await buffer.read_into(view[:length], timeout=max(1, int(timeout)))
            view = view[length:]
    else:  # of each read without a device Monarch keeps some 45 KiB in the client (0.7.0)
        for offset in range(0, len(data), PIECE):
            piece = await answer(actor.piece.call_one(name, offset))
            view[offset : offset + len(piece)] = piece
    if blake3(data).digest() != description.digest:
        raise TransferError("the description of the tree arrived damaged", hint="try again")
    return bytes(data)
