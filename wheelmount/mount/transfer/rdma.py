"""The sending side: a ring of blocks whose memory other processes read.

The client offers its directory this way, and every host its blocks. Where both ends have an
RDMA device that Monarch takes, a block is staged and can be read by ``RDMABuffer``; anywhere it can
be sent by a stream (``BlockServer``); where no stream connects, it is read by ``RDMABuffer`` whose
bytes then go through Monarch's messages. ``Upstream`` chooses. The description of a tree always
goes through these messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import warnings
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

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
from wheelmount.mount.transfer.registered import Registered, pool
from wheelmount.mount.transfer.ring import Parts, Ring, Staged
from wheelmount.mount.transfer.stream import PULSE

# ``status`` tells which transport is in use; a warning would disturb the output.
# Only for wheelmount's buffers: a user's program may have others.
warnings.filterwarnings("ignore", category=RDMATcpFallbackWarning, module=r"wheelmount\.")

Result = TypeVar("Result")

STAGING_THREADS = 8
"""Threads that read and hash blocks; more than cores because disks are waited for."""

PIECE = 1 << 20
"""Bytes of a description that are fetched at once; each must arrive within a time-out."""

LayoutKey = tuple[bytes, bool, int]
"""Key of a layout, as ``Layout.key`` makes it."""

BlockInfo = tuple[bytes, tuple[int, ...]]
"""``digest`` and ``changed`` of ``Staged``."""


class Ways(NamedTuple):
    """The ways to fetch blocks from a process.

    Attributes:
        ticket: of its block server, if it has one.
        device: whether it has an RDMA device.
    """

    ticket: Ticket | None
    device: bool


@dataclass(slots=True)
class _Copy:
    """A copy of a slot in registered memory."""

    memory: Registered
    key: tuple[int, bool] = (-1, False)
    readers: int = 0


class Offer:
    """A ring of blocks that other processes read by ``RDMABuffer``.

    With a device they read copies of the slots, as they could write to what they read.

    Args:
        ring: the blocks.
        timeout: seconds within which a call must be answered.
    """

    def __init__(self, ring: Ring, timeout: float) -> None:
        self._ring = ring
        self._soon = PULSE * timeout
        self._buffers: dict[int, Any] = {}
        self._copies: dict[int, _Copy] = {}  # by slot
        # A power of two, so that there are few sizes and memory is used again.
        self._size = 1 << (ring.layout.block_size - 1).bit_length()
        self._threads = ThreadPoolExecutor(STAGING_THREADS, "wheelmount-stage")

    async def prepare(self) -> None:
        """Have Monarch look for devices now, which prints, and not when blocks are asked for."""
        if rdma.usable():
            memory = pool.take(self._size)
            with contextlib.suppress(Exception):  # asked for a block, it is said
                _ = memory.buffer
                await pool.give(memory)

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
        try:
            offered = self._copy(staged, block, packed) if rdma.usable() else self._buffer(staged)
        except BaseException:
            self.release(block, packed, 0)
            raise
        return staged, offered

    def _let_go(self, done: asyncio.Future[Staged], block: int, packed: bool) -> None:
        if not done.cancelled() and done.exception() is None:
            self._ring.release(block, packed)

    async def digest(self, block: int) -> BlockInfo | None:
        """Return hash and changed files of a block, without its bytes; None: ask again."""
        return await within(self._soon, self._digest(block))

    async def parts(self, block: int, parts: Sequence[tuple[int, int]]) -> Parts | None:
        """Return what ``Ring.parts`` does; None: ask again."""
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._threads, self._ring.parts, block, parts)
        return await within(self._soon, reading)

    async def _digest(self, block: int) -> BlockInfo:
        staged = await self._stage(block, False)
        self._ring.release(block)
        return staged.digest, staged.changed

    async def _stage(self, block: int, packed: bool) -> Staged:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._ring.stage, block, packed)

    def _copy(self, staged: Staged, block: int, packed: bool) -> Any:
        copy = self._copies.get(staged.slot)
        if copy is None:
            copy = self._copies[staged.slot] = _Copy(pool.take(self._size))
        if copy.key != (block, packed) or not copy.readers:
            copy.key, copy.readers = (block, packed), 0
            copy.memory.view[: staged.size] = self._ring.slots[staged.slot][: staged.size]
        copy.readers += 1
        return copy.memory.buffer

    def _buffer(self, staged: Staged) -> Any:
        slot = self._ring.slots[staged.slot]
        if staged.size < len(slot):  # a read takes a buffer whole
            return RDMABuffer(slot[: staged.size])
        if staged.slot not in self._buffers:
            self._buffers[staged.slot] = RDMABuffer(slot)
        return self._buffers[staged.slot]

    def release(self, block: int, packed: bool, sent: int) -> None:
        """Release a block of which ``sent`` bytes were fetched (0: the fetch failed)."""
        for copy in self._copies.values():
            if copy.key == (block, packed) and copy.readers:
                copy.readers -= 1
        self._ring.release(block, packed, sent)

    def close(self) -> None:
        """Refuse to stage more blocks."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def drop(self) -> None:
        """Give the memory up that others read, after ``close``."""
        for buffer in self._buffers.values():
            with contextlib.suppress(Exception):  # the process may be ending
                await buffer.drop()
        self._buffers.clear()
        copies, self._copies = self._copies, {}
        for copy in copies.values():
            await pool.give(copy.memory)


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
    """The description of a tree, as it is to arrive.

    Attributes:
        size: its bytes.
        digest: blake3 of all of it.
    """

    size: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Origin:
    """One delivery of the client, as hosts address it.

    Attributes:
        actor: the client's ``SourceActor``.
        name: of the delivery, unique in the client.
        description: of its tree.
    """

    actor: Any
    name: str
    description: Description = Description(0, b"")


@dataclass(slots=True)
class _Offered:
    """A delivery; an actor's endpoint registers its memory when it is opened."""

    ring: Ring
    ticket: Ticket | None
    timeout: float
    tree: bytes
    arrived: Callable[[str, int], None]
    offer: Offer = field(init=False)


_offered: dict[str, _Offered] = {}
"""Deliveries of this process by name: a ring cannot be pickled and sent to an actor."""


def _find(name: str) -> _Offered:
    if name not in _offered:
        raise TransferError("the client offers this no longer", hint="mount it again")
    return _offered[name]


class SourceActor(Actor):
    """Offers the rings of all deliveries of a client; lives in the client's own process.

    There is one for all deliveries, as Monarch keeps some 225 KiB of each actor that has ended
    (torchmonarch 0.7.0). ``ways``, ``digest``, ``parts``, ``stage``, ``release`` are those of a
    host's ``Agent``.
    """

    @concurrent_endpoint
    async def open(self, name: str) -> None:
        """Prepare a delivery for hosts."""
        made = _find(name)
        made.offer = Offer(made.ring, made.timeout)
        await made.offer.prepare()

    @concurrent_endpoint
    async def close(self, name: str) -> None:
        """Give up the memory of a delivery."""
        made = _offered.pop(name)
        made.offer.close()
        await made.offer.drop()

    @concurrent_endpoint
    async def piece(self, name: str, offset: int) -> bytes:
        """Return ``PIECE`` bytes of the tree's description, from an offset."""
        return _find(name).tree[offset : offset + PIECE]

    @concurrent_endpoint
    async def ways(self, name: str) -> Ways:
        """Return the ways to fetch a delivery's blocks."""
        return Ways(_find(name).ticket, rdma.usable())

    @concurrent_endpoint
    async def digest(self, name: str, block: int) -> BlockInfo | None:
        """Return hash and changed files of a block; None: not known yet, ask again."""
        return await _find(name).offer.digest(block)

    @concurrent_endpoint
    async def parts(self, name: str, block: int, parts: list[tuple[int, int]]) -> Parts | None:
        """Return hash, changed files and some bytes of a block; None: not known yet, ask again."""
        return await _find(name).offer.parts(block, parts)

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
        start_timeout: seconds in which the client's actor must be ready.

    Returns:
        The origin that hosts fetch from, until ``withdraw``.

    Raises:
        WheelmountError: it is not.
    """
    from monarch.actor import context, this_proc

    with _spawning:
        key = str(context().actor_instance.actor_id)
        if key not in _actors:
            name = f"{runtime.NAME}source_{secrets.token_hex(4)}"
            _actors[key] = this_proc().spawn(name, SourceActor)
    promised = Description(len(description), blake3(description).digest())
    origin = Origin(_actors[key], secrets.token_hex(8), promised)
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
    actor, name, description = source.actor, source.name, source.description
    data = bytearray(description.size)
    for offset in range(0, len(data), PIECE):
        # By RDMABuffer without a device Monarch would keep some 45 KiB of each read (0.7.0).
        piece = actor.piece.call_one(name, offset).as_asyncio()
        data[offset : offset + PIECE] = await asyncio.wait_for(piece, timeout)
    if blake3(data).digest() != description.digest:
        raise TransferError("the description of the tree arrived damaged", hint="try again")
    return bytes(data)
