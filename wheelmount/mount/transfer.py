"""Blocks on their way out: a ring offered to others, who read from its memory.

The client offers its directory so, and every host what it has received. Where both ends have an
RDMA device that Monarch takes, a block is staged and read by ``RDMABuffer``. Else it comes by a
stream (``Outlet``); where no stream can be had, by ``RDMABuffer`` again, whose bytes then go
through Monarch's messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import warnings
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from blake3 import blake3

from wheelmount.errors import TransferError
from wheelmount.hosts import engine, rdma
from wheelmount.hosts.actor import (
    Actor,
    RDMABuffer,
    RDMATcpFallbackWarning,
    concurrent_endpoint,
)
from wheelmount.hosts.sockets import Ticket
from wheelmount.mount.ring import Ring, Staged
from wheelmount.mount.stream import PULSE

# Which transport is in use is told by the status, not by a warning in the middle of the output.
# Of wheelmount's own buffers: a user's program may have others.
warnings.filterwarnings("ignore", category=RDMATcpFallbackWarning, module=r"wheelmount\.")

Result = TypeVar("Result")

STAGING_THREADS = 8
"""Threads that read and hash blocks; more than cores because disks are waited for."""

PIECE = 1 << 20
"""Bytes of a description that are fetched at once: each must come within a time-out."""

Key = tuple[bytes, bool, int]
"""See ``Cut.key``."""

Said = tuple[bytes, tuple[int, ...]]
"""``digest`` and ``changed`` of ``Staged``."""

_offered: dict[str, tuple[Ring, Ticket | None, float, bytes, Callable[[str, int], None]]] = {}
"""What this process offers by name: an actor is made from what can be pickled, a ring cannot."""

_loops: list[asyncio.AbstractEventLoop] = []
"""Those of actors that have ended. Monarch stops the loop of an actor and does not close it
(torchmonarch 0.7.0), so that five descriptors would stay for each refresh."""


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

    async def digest(self, block: int) -> Said | None:
        """What a block is, which is not to be read; None: ask again, it takes a while."""
        return await within(self._soon, self._digest(block))

    async def _digest(self, block: int) -> Said:
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
        buffers: an ``RDMABuffer`` and its bytes for each piece of it.
        digest: blake3 of them all.
    """

    buffers: tuple[tuple[Any, int], ...]
    digest: bytes


class SourceActor(Actor):  # type: ignore[misc]
    """The client's end: lives in the client's own process and offers one ring.

    ``outlet``, ``digest``, ``stage`` and ``release`` are as of a host's ``Agent``.
    """

    def __init__(self, name: str) -> None:
        ring, self._ticket, timeout, description, self._arrived = _offered.pop(name)
        self._key = ring.layout.key
        view = memoryview(description)
        pieces = (view[at : at + PIECE] for at in range(0, len(view), PIECE))
        buffers = tuple((RDMABuffer(piece), len(piece)) for piece in pieces)
        self._description = Description(buffers, blake3(view).digest())
        self._offer = Offer(ring, timeout)

    async def __cleanup__(self, _error: Exception | None) -> None:
        self._offer.close()
        for buffer, _ in self._description.buffers:
            with contextlib.suppress(Exception):  # the process may be ending
                await buffer.drop()
        _loops.append(asyncio.get_running_loop())

    @concurrent_endpoint
    async def ready(self) -> None:
        """Return once memory is registered."""

    @concurrent_endpoint
    async def describe(self) -> Description:
        """The tree."""
        return self._description

    @concurrent_endpoint
    async def outlet(self, key: Key, device: bool) -> Ticket | None:
        """See ``choose``."""
        self._check(key)
        return choose(self._ticket, device)

    @concurrent_endpoint
    async def digest(self, key: Key, block: int) -> Said | None:
        """See ``Offer.digest``."""
        self._check(key)
        return await self._offer.digest(block)

    @concurrent_endpoint
    async def stage(self, key: Key, block: int, packed: bool) -> tuple[Staged, Any] | None:
        """See ``Offer.stage``."""
        self._check(key)
        return await self._offer.stage(block, packed)

    def _check(self, key: Key) -> None:
        if key != self._key:
            raise TransferError("the client offers something else", hint="mount it again")

    @concurrent_endpoint
    async def release(self, _key: Key, block: int, packed: bool, sent: int) -> None:
        """See ``Offer.release``."""
        self._offer.release(block, packed, sent)

    @concurrent_endpoint
    async def arrived(self, host: str, length: int) -> None:
        """Hear that ``length`` bytes more have arrived at a host, from wherever."""
        self._arrived(host, length)


def choose(ticket: Ticket | None, device: bool) -> Ticket | None:
    """By what somebody is to get blocks from this process.

    Args:
        ticket: of an outlet, if there is one.
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
) -> Any:
    """Offer a directory to hosts.

    Args:
        ring: its blocks.
        ticket: of their outlet; None where there is none.
        timeout: seconds within which hosts must hear something.
        description: of its tree, as it is to be sent ahead.
        arrived: called with a host's name and a number of bytes as they arrive.

    Returns:
        The actor that hosts fetch from.
    """
    from monarch.actor import this_proc

    for loop in _loops[:]:
        if not loop.is_running():
            _loops.remove(loop)
            loop.close()
    name = f"{engine.NAME}source_{secrets.token_hex(4)}"
    _offered[name] = ring, ticket, timeout, description, arrived
    return this_proc().spawn(name, SourceActor, name)


async def fetch_description(source: Any, timeout: float) -> bytes:
    """The description of the tree that ``source`` offers.

    Args:
        source: the client's actor.
        timeout: seconds for each piece of it.

    Raises:
        TransferError: it did not arrive whole.
    """
    description = await asyncio.wait_for(source.describe.call_one().as_asyncio(), timeout)
    data = bytearray(sum(length for _, length in description.buffers))
    view = memoryview(data)
    for buffer, length in description.buffers:
        await buffer.read_into(view[:length], timeout=max(1, int(timeout)))
        view = view[length:]
    if blake3(data).digest() != description.digest:
        raise TransferError("the description of the tree arrived damaged", hint="try again")
    return bytes(data)
