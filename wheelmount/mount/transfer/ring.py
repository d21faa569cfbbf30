"""A ring of staged blocks: bounded memory from which others fetch.

A fixed number of slots, each the size of a block. A block is staged once for all that want it
while somebody holds it, and for later ones as long as its memory is not needed. A slot is used
again when nobody holds it: first the one whose block was the last to go to all who were to have it,
whose memory may still be in a processor's cache; then one that was never used; then the one that
was wanted longest ago. Reading and hashing happen on the caller's thread, outside the lock.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from wheelmount.errors import TransferError, WaitError
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.transfer.compression import pack

CLOSED = "this directory is no longer offered"

STUCK_AFTER = 40
"""Time-outs that a block may be waited for; then the work that is to bring it counts as stuck."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A block that is ready to be fetched.

    Attributes:
        slot: its place in the ring.
        length: its bytes.
        size: bytes it takes in the ring; fewer than ``length`` if it is compressed.
        digest: blake3 of them, 32 bytes.
        changed: inodes that are no longer what the tree says; their bytes here are zeros.
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
    given: int = 0  # how often its block was fetched
    lent: int = 0  # of the holders, those who let go for certain
    lease: float = 0.0  # when the others count as gone that said nothing since
    staged: Staged | None = None
    error: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)


Key = tuple[int, bool]
"""A block, and whether it is compressed."""


class Filler(Protocol):
    """Where a ring's blocks come from."""

    layout: Layout

    def fill(self, block: int, view: memoryview) -> tuple[bytes, tuple[int, ...]]:
        """Read a block; returns ``digest`` and ``changed`` of ``Staged``."""


class Ring:
    """Blocks of a layout, read on demand.

    Args:
        filler: reads them.
        slots: size of the ring in blocks.
        lease: seconds after which a holder that never released its block is given up. Who has it
            lent holds it for as long as it takes; others wait for that longer, see ``STUCK_AFTER``.
        readers: how many are to fetch a block, each once, compressed and not counted apart; 0 if
            that is not known. Who comes after them has it read again.
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
        self._used: OrderedDict[Key, _Slot] = OrderedDict()  # least recently used first
        self._condition = threading.Condition()
        self._closed = False
        self.sent = 0
        """Bytes that were fetched from it."""

    def close(self) -> None:
        """Give its memory back; nothing more is staged. What is lent stays as it is."""
        with self._condition:
            self._closed = True
            self._free.clear()
            self._used.clear()
            self.slots = [memoryview(b"")] * len(self.slots)
            self._condition.notify_all()

    def stage(self, block: int, packed: bool = False) -> Staged:
        """Have a block in the ring, and keep it there until ``release``.

        Args:
            block: which.
            packed: whether to compress it, if it is worth it.

        Raises:
            WaitError: all slots stayed taken for the length of a lease.
            TransferError: there is no such block.
        """
        return self._stage((block, packed), self._lease, lent=False)[1]

    def _stage(self, key: Key, timeout: float, *, lent: bool) -> tuple[_Slot, Staged]:
        block, packed = key
        if block >= self.layout.blocks:
            raise TransferError(f"there is no block {block}")
        slot, mine = self._take(key, timeout, lent=lent)
        if mine:
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
        """Let go of a block that ``stage`` gave, and of which ``sent`` bytes were fetched."""
        self._count(sent)
        with self._condition:
            slot = self._used.get((block, packed))
        if slot is not None:
            self._drop((block, packed), slot, given=sent > 0)

    def _drop(self, key: Key, slot: _Slot, *, given: bool = False, lent: bool = False) -> None:
        with self._condition:
            slot.holders = max(0, slot.holders - 1)
            slot.lent -= lent
            slot.given += given
            over = 0 < self._readers(key[0]) <= slot.given
            # One that is being read is not over: who lets go late held it in another slot.
            over = over and slot.ready.is_set() and not slot.holders
            if over and self._used.get(key) is slot:
                self._empty(key, slot)
            self._condition.notify_all()

    def _empty(self, key: Key, slot: _Slot) -> None:
        del self._used[key]
        self._free.append(_Slot(slot.number))

    @contextmanager
    def lend(
        self, block: int, packed: bool, urgent: bool = False
    ) -> Iterator[tuple[Staged, memoryview]]:
        """A block and its bytes, staged while they are sent; see ``stage``.

        All are urgent here.
        """
        del urgent
        slot, staged = self._stage((block, packed), STUCK_AFTER * self._lease, lent=True)
        self._count(staged.size)  # now: who has it is not to know sooner
        given = False
        try:
            yield staged, self.slots[staged.slot][: staged.size]
            given = True
        finally:
            if not given:
                self._count(-staged.size)
            self._drop((block, packed), slot, given=given, lent=True)

    def put(self, staged: Staged, block: int, packed: bool, memory: memoryview) -> memoryview:
        """Have a block in the ring that is in memory already.

        Args:
            staged: what it is; its ``slot`` counts for nothing.
            block: which.
            packed: whether it was to be compressed.
            memory: with it, of the size of a slot; becomes the ring's.

        Returns:
            Memory for it: the same again if nobody can be made to make room.
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

    def _take(self, key: Key, timeout: float, *, lent: bool) -> tuple[_Slot, bool]:
        deadline = time.monotonic() + timeout
        with self._condition:
            while True:
                if self._closed:
                    raise TransferError(CLOSED)
                now = time.monotonic()
                slot = self._used.get(key)
                mine = slot is None
                if slot is None:
                    slot = self._vacate(now)
                if slot is not None:
                    self._used[key] = slot
                    self._used.move_to_end(key)
                    slot.holders += 1
                    slot.lent += lent
                    slot.lease = now + self._lease
                    return slot, mine
                if now >= deadline:
                    raise WaitError(
                        f"all blocks of a ring were taken for {timeout:g} s",
                        hint="raise WHEELMOUNT_RING, or look for hosts that hang",
                    )
                self._condition.wait(min(1.0, deadline - now))

    def _vacate(self, now: float) -> _Slot | None:
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
