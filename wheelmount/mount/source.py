"""The source: the client's end of a mount, which reads blocks from the directory."""

from __future__ import annotations

import os
import threading

from blake3 import blake3

from wheelmount.mount.layout import Extent, Layout

MANY = 16
"""Files in a block from which on it is read by one thread at a time: several would do little else
than take the interpreter from each other."""

PATIENCE = 0.02
"""Seconds to wait for that thread; who takes longer waits for a disk, where several are faster."""


class Source:
    """Blocks of a directory, for a ``Ring``.

    Args:
        root: the directory.
        layout: its snapshot.
    """

    def __init__(self, root: bytes, layout: Layout) -> None:
        self.root = root
        self.layout = layout
        self.changed: set[int] = set()
        """Files that are no longer what the snapshot says."""
        self._digests: dict[int, bytes] = {}
        self._turn = threading.Lock()

    def fill(self, block: int, view: memoryview) -> tuple[bytes, tuple[int, ...]]:
        """Read a block.

        Returns:
            blake3 of it, and the files in it that changed, whose bytes are zeros instead.
        """
        extents = list(self.layout.extents(block))
        turn = len(extents) > MANY and self._turn.acquire(timeout=PATIENCE)
        try:
            changed = self._read_all(extents, view)
        finally:
            if turn:
                self._turn.release()
        digest = blake3(view).digest()
        if self._digests.setdefault(block, digest) != digest and not changed:
            # Same size and time as in the tree, other bytes than the hosts before got.
            changed = [extent.inode for extent in extents]
        self.changed.update(changed)
        return digest, tuple(changed)

    def _read_all(self, extents: list[Extent], view: memoryview) -> list[int]:
        changed = []
        for extent in extents:
            piece = view[extent.block_offset : extent.block_offset + extent.length]
            if extent.inode in self.changed or not self._read(extent, piece):
                piece[:] = bytes(len(piece))
                changed.append(extent.inode)
        return changed

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
