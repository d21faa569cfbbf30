"""The source: the client's end of a mount, which reads blocks from the directory into a ring.

The ring bounds the client's memory: a fixed number of slots, each the size of a block. A block is
staged once for all hosts that want it at about the same time; a slot is used again when nobody
holds it. Reading and hashing happen on the caller's thread, outside the lock.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from blake3 import blake3

from wheelmount.errors import WaitError
from wheelmount.mount.layout import Extent, Layout


@dataclass(frozen=True, slots=True)
class Staged:
    """A block that is ready to be fetched.

    Attributes:
        slot: its place in the ring.
        length: its bytes.
        digest: blake3 of them, 32 bytes.
        changed: inodes that are no longer what the tree says; their bytes here are zeros.
    """

    slot: int
    length: int
    digest: bytes
    changed: tuple[int, ...]


@dataclass(slots=True)
class _Slot:
    number: int
    holders: int = 0
    lease: float = 0.0  # when holders that said nothing since count as gone
    staged: Staged | None = None
    error: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class Source:
    """Blocks of a directory, read on demand.

    Args:
        root: the directory.
        layout: its snapshot.
        slots: size of the ring in blocks.
        lease: seconds after which a holder that never released its block is given up.
    """

    def __init__(self, root: bytes, layout: Layout, *, slots: int, lease: float) -> None:
        self.root = root
        self.layout = layout
        self.changed: set[int] = set()
        slots = max(1, min(slots, layout.blocks))
        self._lease = lease
        size = layout.block_size
        memory = memoryview(mmap.mmap(-1, slots * size))
        self.slots = [memory[n * size : (n + 1) * size] for n in range(slots)]
        """The memory of each slot, ``block_size`` bytes."""
        self._free = [_Slot(n) for n in range(slots)]
        self._used: OrderedDict[int, _Slot] = OrderedDict()  # by block, least recently used first
        self._digests: dict[int, bytes] = {}
        self._turn = threading.Condition()

    def stage(self, block: int) -> Staged:
        """Have a block in the ring, and keep it there until ``release``.

        Raises:
            WaitError: all slots stayed taken for the length of a lease.
        """
        slot, mine = self._take(block)
        if mine:
            try:
                slot.staged = self._fill(slot.number, block)
            except BaseException as error:
                slot.error = error
                with self._turn:
                    self._used.pop(block, None)
                    self._free.append(_Slot(slot.number))
                    self._turn.notify_all()
                raise
            finally:
                slot.ready.set()
        elif not slot.ready.wait(self._lease):
            raise WaitError(f"block {block} was not read in {self._lease:g} s")
        if slot.staged is None:
            raise slot.error or WaitError(f"block {block} was not read")
        return slot.staged

    def release(self, block: int) -> None:
        """Let go of a block that ``stage`` gave."""
        with self._turn:
            slot = self._used.get(block)
            if slot is not None and slot.holders:
                slot.holders -= 1
                self._turn.notify_all()

    def _take(self, block: int) -> tuple[_Slot, bool]:
        deadline = time.monotonic() + self._lease
        with self._turn:
            while True:
                now = time.monotonic()
                slot = self._used.get(block)
                mine = slot is None
                if slot is None:
                    slot = self._free.pop() if self._free else self._evict(now)
                if slot is not None:
                    self._used[block] = slot
                    self._used.move_to_end(block)
                    slot.holders += 1
                    slot.lease = now + self._lease
                    return slot, mine
                if now >= deadline:
                    raise WaitError(
                        f"all blocks of the client's ring were taken for {self._lease:g} s",
                        hint="raise WHEELMOUNT_RING, or look for hosts that hang",
                    )
                self._turn.wait(min(1.0, deadline - now))

    def _evict(self, now: float) -> _Slot | None:
        for block, slot in self._used.items():
            if slot.ready.is_set() and (not slot.holders or now > slot.lease):
                del self._used[block]
                return _Slot(slot.number)
        return None

    def _fill(self, number: int, block: int) -> Staged:
        length = self.layout.length(block)
        view = self.slots[number][:length]
        changed = []
        for extent in self.layout.extents(block):
            piece = view[extent.block_offset : extent.block_offset + extent.length]
            if extent.inode in self.changed or not self._read(extent, piece):
                piece[:] = bytes(len(piece))
                changed.append(extent.inode)
        digest = blake3(view).digest()
        if self._digests.setdefault(block, digest) != digest and not changed:
            # Same size and time as in the tree, other bytes than the hosts before got.
            changed = [extent.inode for extent in self.layout.extents(block)]
        self.changed.update(changed)
        return Staged(number, length, digest, tuple(changed))

    def _read(self, extent: Extent, piece: memoryview) -> bool:
        """Read a piece of a file; False if the file is not what the tree says (or not there)."""
        inode = self.layout.tree.inodes[extent.inode]
        path = os.path.join(self.root, inode.path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            done = 0
            while done < len(piece):
                count = os.preadv(fd, [piece[done:]], extent.file_offset + done)
                if not count:
                    return False
                done += count
            status = os.fstat(fd)  # after the read: an edit before or during it shows here
        except OSError:
            return False
        finally:
            os.close(fd)
        stamp = self.layout.tree.stamps[extent.inode]
        found = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        return found == (stamp.device, stamp.inode, inode.size, inode.mtime_ns)


def file_digest(path: bytes) -> bytes:
    """blake3 of a file, 32 bytes; of one that cannot be read, nothing."""
    hasher = blake3()
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(1 << 20):
                hasher.update(piece)
    except OSError:
        return b""
    return hasher.digest()
