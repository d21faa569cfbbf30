"""The sending side: a ring of blocks whose memory other processes read.

The client offers its directory this way, and every host its blocks. Where both ends have an
RDMA device that Monarch supports, a block is staged and read by ``RDMABuffer``; else it is sent by
a stream (``BlockServer``); where no stream connects, by ``RDMABuffer`` again, whose bytes then go
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

# ``status`` tells which transport is in use; a warning would disturb the output.
# Only for wheelmount's buffers: a user's program may have others.
warnings.filterwarnings("ignore", category=RDMATcpFallbackWarning, module=r"wheelmount\.")

Result = TypeVar("Result")

STAGING_THREADS = 8
"""Threads that read and hash blocks; more than cores because disks are waited for."""

PIECE = 1 << 20
"""Bytes of a description that are fetched at once; each must arrive within a time-out."""

Key = tuple[bytes, bool, int]
"""Key of a layout, as ``Layout.key`` makes it."""

BlockInfo = tuple[bytes, tuple[int, ...]]
"""``digest`` and ``changed`` of ``Staged``."""


class Offer:
    """A ring of blocks that other processes read by ``RDMABuffer``.

    Args:
        ring: the blocks; its memory is registered once.
        timeout: seconds within which a call must be answered.
    """

    def __init__(self, ring: Ring, timeout: float) -> None:
        self._ring = ring
        self._soon = PULSE * timeout
        self._buffers: dict[int, Any] = {}
        self._threads = ThreadPoolExecutor(STAGING_THREADS, "wheelmount-stage")

    async def stage(self, block: int, packed: bool) -> tuple[Staged, Any] | None:
        """Stage a block in the ring until ``release``.

        Returns:
            The staged block, and an ``RDMABuffer`` to read it; None: not ready, ask again.
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
        """Return hash and changed files of a block, without its bytes; None: ask again."""
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
        """Release a block of which ``sent`` bytes were fetched (0: the fetch failed)."""
        self._ring.release(block, packed, sent)

    def close(self) -> None:
        """Refuse to stage more blocks."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def drop(self) -> None:
        """Have Monarch unregister the ring's memory, after ``close``."""
        await _drop(self._buffers.values())
        self._buffers.clear()


async def _drop(buffers: Iterable[Any]) -> None:
    for buffer in buffers:
        with contextlib.suppress(Exception):  # the process may be ending
            await buffer.drop()


async def within(seconds: float, work: Awaitable[Result]) -> Result | None:
    """Return the result of some work; None if it takes longer, and then the work goes on.

    Args:
        seconds: how long to wait.
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
    """Where hosts fetch the description of a tree.

    Attributes:
        size: its bytes.
        digest: blake3 of the whole description.
        buffers: an ``RDMABuffer`` and its bytes for each piece of it; none where the client has no
            RDMA device.
    """

    size: int
    digest: bytes
    buffers: tuple[tuple[Any, int], ...]

    @classmethod
    def of(cls, data: bytes) -> Description:
        """Register the memory of a description. To be called in an actor's endpoint."""
        view = memoryview(data)
        pieces = [view[at : at + PIECE] for at in range(0, len(view), PIECE)]
        registered = pieces if rdma.usable() else []
        buffers = tuple((RDMABuffer(piece), len(piece)) for piece in registered)
        return cls(len(view), blake3(view).digest(), buffers)

    async def drop(self) -> None:
        """Have Monarch unregister its memory."""
        await _drop(buffer for buffer, _ in self.buffers)


@dataclass(frozen=True, slots=True)
class Origin:
    """One delivery of the client, as hosts address it.

    Attributes:
        actor: the client's ``SourceActor``.
        name: of the delivery, unique in the client.
    """

    actor: Any
    name: str


@dataclass(slots=True)
class _Offered:
    """A delivery; an actor's endpoint registers its memory when it is opened."""

    ring: Ring
    ticket: Ticket | None
    timeout: float
    tree: bytes
    arrived: Callable[[str, int], None]
    description: Description = field(init=False)
    offer: Offer = field(init=False)


_offered: dict[str, _Offered] = {}
"""Deliveries of this process by name: a ring cannot be pickled and sent to an actor."""


def _find(name: str) -> _Offered:
    if name not in _offered:
        raise TransferError("the client offers this no longer", hint="mount it again")
    return _offered[name]


class SourceActor(Actor):  # type: ignore[misc]
    """Offers the rings of all deliveries of a client; lives in the client's own process.

    There is one for all deliveries, as Monarch keeps some 225 KiB of each actor that has ended
    (torchmonarch 0.7.0). ``block_server``, ``digest``, ``stage``, ``release`` are those of a host's
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
        """Unregister the memory of a delivery."""
        made = _offered.pop(name)
        made.offer.close()
        await made.offer.drop()
        await made.description.drop()

    @concurrent_endpoint
    async def describe(self, name: str) -> Description:
        """Return where the tree's description can be fetched."""
        return _find(name).description

    @concurrent_endpoint
    async def piece(self, name: str, offset: int) -> bytes:
        """Return ``PIECE`` bytes of the tree's description, from an offset."""
        return _find(name).tree[offset : offset + PIECE]

    @concurrent_endpoint
    async def block_server(self, name: str, device: bool) -> Ticket | None:
        """See ``choose``."""
        return choose(_find(name).ticket, device)

    @concurrent_endpoint
    async def digest(self, name: str, block: int) -> BlockInfo | None:
        """Return hash and changed files of a block; None: not known yet, ask again."""
        return await _find(name).offer.digest(block)

    @concurrent_endpoint
    async def stage(self, name: str, block: int, packed: bool) -> tuple[Staged, Any] | None:
        """Stage a block until ``release``; None: not ready, ask again."""
        return await _find(name).offer.stage(block, packed)

    @concurrent_endpoint
    async def release(self, name: str, block: int, packed: bool, sent: int) -> None:
        """Release a block of which ``sent`` bytes were fetched (0: the fetch failed)."""
        _find(name).offer.release(block, packed, sent)

    @concurrent_endpoint
    async def arrived(self, name: str, host: str, length: int) -> None:
        """Note that ``length`` more bytes have arrived at a host, from any sender."""
        _find(name).arrived(host, length)


_actors: dict[str, Any] = {}
"""Source actors of this process, by the actor in whose context they were made, with which they
end: of a program's main thread, and of actors of the user's own."""

_spawning = threading.Lock()


def choose(ticket: Ticket | None, device: bool) -> Ticket | None:
    """Choose how another process fetches blocks from this one.

    Args:
        ticket: of the block server, if there is one.
        device: whether the other end has an RDMA device.

    Returns:
        The ticket of the block server, or None for ``RDMABuffer``.
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
        ring: the directory's blocks.
        ticket: of their block server; None if there is none.
        timeout: seconds within which a host's call must be answered.
        description: of the tree, sent before the blocks.
        arrived: called with a host's name and a number of bytes that arrived there.
        start_timeout: seconds in which memory must be registered.

    Returns:
        The origin that hosts fetch from, until ``withdraw``.

    Raises:
        WheelmountError: the memory could not be registered.
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
    """Stop offering a directory; takes bounded time, and is safe while Monarch ends."""
    if origin.name in _offered:
        runtime.gather({"": origin.actor.close.call_one(origin.name)}, runtime.MESH_TIMEOUT)
        _offered.pop(origin.name, None)


async def fetch_description(source: Origin, timeout: float) -> bytes:
    """Fetch the description of the tree that a client offers.

    Args:
        source: the client's delivery.
        timeout: seconds for each piece.

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
