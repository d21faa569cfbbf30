"""The source: the client's end of a mount, which reads blocks from the directory."""

from __future__ import annotations

import os

from blake3 import blake3

from wheelmount.mount.layout import Extent, Layout
from wheelmount.mount.turn import Turn

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Source:
    """Blocks of a directory, for a ``Ring``.

    Args:
        root: the directory.
        layout: its snapshot.
    """

    def __init__(self, root: bytes, layout: Layout) -> None:
        self._folder = os.path.join(root, b"")
        self.layout = layout
        self.changed: set[int] = set()
        """Files that are no longer what the snapshot says."""
        self._digests: dict[int, bytes] = {}
        self._turn = Turn()

    def fill(self, block: int, view: memoryview) -> tuple[bytes, tuple[int, ...]]:
        """Read a block.

        Returns:
            blake3 of it, and the files in it that changed, whose bytes are zeros instead.
        """
        extents = list(self.layout.extents(block))
        with self._turn.at(len(extents)):
            changed = self._read_all(extents, view)
        digest = blake3(view).digest()
        if self._digests.setdefault(block, digest) != digest and not changed:
            # Same size and time as in the tree, other bytes than the hosts before got.
            changed = [extent.inode for extent in extents]
        self.changed.update(changed)
        return digest, tuple(changed)

    def _read_all(self, extents: list[Extent], view: memoryview) -> list[int]:
        changed = []
        for number, offset, begin, length in extents:
            piece = view[begin : begin + length]
            if number in self.changed or not self._read(number, offset, piece):
                piece[:] = bytes(length)
                changed.append(number)
        return changed

    def _read(self, number: int, offset: int, piece: memoryview) -> bool:
        """Read a piece of a file; False if the file is not what the tree says (or not there)."""
        inode = self.layout.tree.inodes[number]
        try:
            fd = os.open(self._folder + inode.path, _FLAGS)
        except OSError:
            return False
        try:
            while piece:
                count = os.preadv(fd, (piece,), offset)
                if not count:
                    return False
                piece, offset = piece[count:], offset + count
            status = os.fstat(fd)  # after the read: an edit before or during it shows here
        except OSError:
            return False
        finally:
            os.close(fd)
        stamp = self.layout.tree.stamps[number]
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
