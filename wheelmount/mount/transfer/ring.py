"""A ring of staged blocks: a fixed amount of memory from which other processes fetch.

The ring has slots, each the size of a block. A block is staged once for all readers while a process
holds it, and for later readers until its slot is needed for another block. Slots that no process
holds are reused: first the slot whose block was the latest to be sent to all its readers, because
it may still be in a processor's cache; then a slot that was never used; then the least recently
used slot. Blocks are read and hashed on the caller's thread, outside the lock.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from wheelmount.errors import TransferError, WaitError
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.transfer.compression import pack

CLOSED = "this directory is no longer offered"

STUCK_AFTER = 40
"""Number of time-outs after which the fetch of a block counts as stuck."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A block that is ready to be fetched.

    Attributes:
        slot: number of the block's slot in the ring.
        length: bytes of the block.
        size: bytes that the block takes in the ring; fewer than ``length`` if it is compressed.
        digest: blake3 of the block, 32 bytes.
        changed: numbers of files that differ from the tree; their bytes here are zeros.
    """

    slot: int
    length: int
    size: int
    digest: bytes
    changed: tuple[int, ...]


@dataclass(slots=True)
class _Slot:
    number: int
    holders: int = 0
    given: int = 0  # number of times that the block was fetched
    lent: int = 0  # number of holders that are certain to release the slot
    lease: float = 0.0  # time from which all other holders count as gone
    staged: Staged | None = None
    error: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)


BlockKey = tuple[int, bool]
"""Number of a block, and whether it is compressed."""


Parts = tuple[bytes, tuple[int, ...], bytes]
"""``digest`` and ``changed`` of ``Staged``, and bytes of the block."""


class Filler(Protocol):
    """A source of a ring's blocks."""

    layout: Layout

    def fill(self, block: int, view: memoryview) -> tuple[bytes, tuple[int, ...]]:
        """Read a block into ``view``; return ``digest`` and ``changed`` as in ``Staged``."""


class Ring:
    """Stages blocks of a layout on demand.

    Args:
        filler: reads the blocks.
        slots: number of slots.
        lease: seconds after which a holder that never released its block counts as gone. A borrower
            (``lend``) may hold a block for longer, and waits for a slot for ``STUCK_AFTER`` leases.
        readers: returns the number of processes that will fetch a block, each once, compressed or
            not; 0 if unknown. When as many have fetched it, its slot is reused first.
    """

    def __init__(
        self,
        filler: Filler,
        *,
        slots: int,
        lease: float,
        readers: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self._filler = filler
        self._readers = readers
        self.layout = layout = filler.layout
        slots = max(1, min(slots, layout.blocks))
        self._lease = lease
        size = layout.block_size
        memory = memoryview(mmap.mmap(-1, slots * size))
        self.slots = [memory[n * size : (n + 1) * size] for n in range(slots)]
        """The memory of each slot, ``block_size`` bytes."""
        self._free = [_Slot(n) for n in range(slots)]
        self._used: OrderedDict[BlockKey, _Slot] = OrderedDict()  # least recently used first
        self._condition = threading.Condition()
        self._closed = False
        self.sent = 0
        """Bytes that were fetched from the ring."""

    @property
    def filling(self) -> bool:
        """Whether blocks are being read now."""
        with self._condition:
            return any(not slot.ready.is_set() for slot in self._used.values())

    def close(self) -> None:
        """Free the memory, and refuse to stage more. Blocks that are lent stay intact."""
        with self._condition:
            self._closed = True
            self._free.clear()
            self._used.clear()
            self.slots = [memoryview(b"")] * len(self.slots)
            self._condition.notify_all()

    def stage(self, block: int, packed: bool = False) -> Staged:
        """Stage a block in the ring until ``release``.

        Args:
            block: number of the block.
            packed: whether to compress the block, if that makes it smaller.

        Raises:
            WaitError: all slots stayed in use during a lease.
            TransferError: there is no such block.
        """
        return self._stage((block, packed), self._lease, lent=False)[1]

    def _stage(self, key: BlockKey, timeout: float, *, lent: bool) -> tuple[_Slot, Staged]:
        block, packed = key
        if block >= self.layout.blocks:
            raise TransferError(f"there is no block {block}")
        slot, is_new = self._take(key, timeout, lent=lent)
        if is_new:
            try:
                slot.staged = self._fill(slot.number, block, packed)
            except BaseException as error:
                slot.error = error
                with self._condition:
                    if self._used.get(key) is slot:
                        self._empty(key, slot)
                    self._condition.notify_all()
                raise
            finally:
                slot.ready.set()
        elif not slot.ready.wait(timeout):
            self._drop(key, slot, lent=lent)
            raise WaitError(f"block {block} was not read in {timeout:g} s")
        if slot.staged is None:
            raise slot.error or WaitError(f"block {block} was not read")
        return slot, slot.staged

    def release(self, block: int, packed: bool = False, sent: int = 0) -> None:
        """Release a block that ``stage`` returned, of which ``sent`` bytes were fetched."""
        self._count(sent)
        with self._condition:
            slot = self._used.get((block, packed))
        if slot is not None:
            self._drop((block, packed), slot, given=sent > 0)

    def parts(self, block: int, parts: Sequence[tuple[int, int]]) -> Parts:
        """Return digest and changed files of a block, and parts of its bytes, joined.

        Args:
            block: number of the block.
            parts: begin and end of each part in the block.
        """
        staged, sent = self.stage(block), 0
        try:
            view = self.slots[staged.slot][: staged.length]
            data = b"".join(view[begin:end] for begin, end in parts)
            sent = len(data)
            return staged.digest, staged.changed, data
        finally:
            self.release(block, sent=sent)

    def _drop(self, key: BlockKey, slot: _Slot, *, given: bool = False, lent: bool = False) -> None:
        with self._condition:
            slot.holders = max(0, slot.holders - 1)
            slot.lent -= lent
            slot.given += given
            done = 0 < self._readers(key[0]) <= slot.given
            # A holder that counted as gone may release a block that is being read again.
            done = done and slot.ready.is_set() and not slot.holders
            if done and self._used.get(key) is slot:
                self._empty(key, slot)
            self._condition.notify_all()

    def _empty(self, key: BlockKey, slot: _Slot) -> None:
        del self._used[key]
        self._free.append(_Slot(slot.number))

    @contextmanager
    def lend(
        self, block: int, packed: bool, urgent: bool = False
    ) -> Iterator[tuple[Staged, memoryview]]:
        """Stage a block during the context, while its bytes are sent; see ``stage``.

        ``urgent``, an argument of every ``Lender``, is ignored.
        """
        del urgent
        slot, staged = self._stage((block, packed), STUCK_AFTER * self._lease, lent=True)
        # Counted before the block is sent, so that ``sent`` includes all blocks that have arrived.
        self._count(staged.size)
        given = False
        try:
            yield staged, self.slots[staged.slot][: staged.size]
            given = True
        finally:
            if not given:
                self._count(-staged.size)
            self._drop((block, packed), slot, given=given, lent=True)

    def put(self, staged: Staged, block: int, packed: bool, memory: memoryview) -> memoryview:
        """Add a block that is in memory already.

        Args:
            staged: description of the block; its ``slot`` is ignored.
            block: number of the block.
            packed: whether the block was requested compressed.
            memory: memory of the size of a slot that contains the block; the ring keeps it.

        Returns:
            Free memory in exchange; the same memory if no slot can be freed.
        """
        key = block, packed
        with self._condition:
            if key in self._used:
                return memory
            slot = self._vacate(time.monotonic())
            if slot is None:
                return memory
            slot.staged = replace(staged, slot=slot.number)
            slot.ready.set()
            self._used[key] = slot
            memory, self.slots[slot.number] = self.slots[slot.number], memory
        return memory

    def _count(self, sent: int) -> None:
        with self._condition:
            self.sent += sent

    def _take(self, key: BlockKey, timeout: float, *, lent: bool) -> tuple[_Slot, bool]:
        """Hold the slot of a block; return it, and whether the caller must read the block."""
        deadline = time.monotonic() + timeout
        with self._condition:
            while True:
                if self._closed:
                    raise TransferError(CLOSED)
                now = time.monotonic()
                slot = self._used.get(key)
                is_new = slot is None
                if slot is None:
                    slot = self._vacate(now)
                if slot is not None:
                    self._used[key] = slot
                    self._used.move_to_end(key)
                    slot.holders += 1
                    slot.lent += lent
                    slot.lease = now + self._lease
                    return slot, is_new
                if now >= deadline:
                    raise WaitError(
                        f"all slots for blocks were in use for {timeout:g} s",
                        hint="raise WHEELMOUNT_RING, or look for hosts that hang",
                    )
                self._condition.wait(min(1.0, deadline - now))

    def _vacate(self, now: float) -> _Slot | None:
        """Return a slot that no process holds, without its block; None if there is none."""
        if self._free:
            return self._free.pop()
        for key, slot in self._used.items():
            gone = not slot.holders or (now > slot.lease and not slot.lent)
            if slot.ready.is_set() and gone:
                del self._used[key]
                return _Slot(slot.number)
        return None

    def _fill(self, number: int, block: int, packed: bool) -> Staged:
        length = self.layout.length(block)
        view = self.slots[number][:length]
        if len(view) < length:
            raise TransferError(CLOSED)
        digest, changed = self._filler.fill(block, view)
        size = pack(view) if packed else 0
        return Staged(number, length, size or length, digest, changed)
