"""The source of a mount: reads blocks from the client's directory, and finds files that changed."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections import Counter

from blake3 import blake3

from wheelmount.mount.snapshot.bursts import BurstLock
from wheelmount.mount.snapshot.layout import Extent, Layout
from wheelmount.mount.snapshot.scan import data_pieces
from wheelmount.mount.snapshot.tree import Stamp, Tree

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

RESTLESS = 16
"""Most changes of a file's ctime while one block is read. A file with more counts as changed,
because the block would be read again without end."""


class Source:
    """Reads the blocks of a directory, for a ``Ring``.

    A file is unchanged as long as its device, inode number, size, mtime and ctime are those of the
    snapshot. If only the ctime differs, the file may have been edited with its mtime put back, or
    only have got another mode or name. Then every block of the file that was read before is read
    again. If all blocks are equal, the file counts as unchanged under its new ctime, and hosts get
    the bytes that the file had at one moment. Where hosts have bytes that another ``Source`` read,
    those cannot be compared, and a file whose ctime differs counts as changed.

    Args:
        root: the directory.
        layout: its snapshot.
        read_before: whether hosts have bytes of these files from another ``Source``.
    """

    def __init__(self, root: bytes, layout: Layout, *, read_before: bool = False) -> None:
        self._folder = os.path.join(root, b"")
        self.layout = layout
        self.changed: set[int] = set()
        """Numbers of files that differ from the snapshot."""
        # For each block: its blake3 at the first read, and the files that had changed by then.
        self._first_reads: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._ctimes: dict[int, int] = {}  # of files whose ctime is no longer the snapshot's
        self._settling = threading.RLock()
        self._read_before = read_before
        self._bursts = BurstLock()

    def edited(self) -> list[bytes]:
        """Return paths of the changed files that were edited; the other ones are unreadable."""
        tree, root = self.layout.tree, self._folder
        files = sorted(self.changed)
        return [tree.inodes[n].path for n in files if not unreadable(root, tree, n)]

    def fill(self, block: int, view: memoryview) -> tuple[bytes, tuple[int, ...]]:
        """Read a block.

        Returns:
            blake3 of the block, 32 bytes, and the numbers of its files that changed. The bytes of
            these are zeros in the block.
        """
        extents = list(self.layout.extents(block))
        numbers = [extent.inode for extent in extents]
        moves: Counter[int] = Counter()
        while True:
            ctimes = [self._ctimes.get(number) for number in numbers]
            with self._bursts.hold(len(extents)):
                changed = self._read_all(extents, view)
            digest = blake3(view).digest()
            with self._settling:
                seen = zip(numbers, ctimes, strict=True)
                moved = {number for number, ctime in seen if ctime != self._ctimes.get(number)}
                if not moved and self.changed.isdisjoint({*numbers}.difference(changed)):
                    # From now on, ``_settle`` compares this block if a ctime changes.
                    before, _ = self._first_reads.setdefault(block, (digest, tuple(changed)))
                    break
                moves.update(moved)
                self.changed.update(number for number in moved if moves[number] > RESTLESS)
        if before != digest and not changed:
            # Size and times are the snapshot's, but the bytes differ from those sent before.
            changed = numbers
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
        """Read a piece of a file; return False if the file is missing or differs from the tree."""
        status = self._read_any(number, offset, piece)
        if status is None:
            return False
        if not self._same(number, status):
            return False
        if status.st_ctime_ns == self._ctime(number):
            return True
        return not self._read_before and self._settle(number, status)

    def _same(self, number: int, status: os.stat_result) -> bool:
        """Return whether a file's attributes are those of the snapshot, its ctime aside."""
        inode, stamp = self.layout.tree.inodes[number], self.layout.tree.stamps[number]
        found = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        return found == (stamp.device, stamp.inode, inode.size, inode.mtime_ns)

    def _ctime(self, number: int) -> int:
        """Return the ctime under which a file counts as unchanged."""
        return self._ctimes.get(number, self.layout.tree.stamps[number].ctime_ns)

    def _read_any(self, number: int, offset: int, piece: memoryview) -> os.stat_result | None:
        """Read a piece at a file's path, whichever file has that path now.

        Returns the attributes of that file, or None if the piece cannot be read.
        """
        try:
            fd = os.open(self._folder + self.layout.tree.inodes[number].path, _FLAGS)
        except OSError:
            return None
        try:
            while piece:
                count = os.preadv(fd, (piece,), offset)
                if not count:
                    return None
                piece, offset = piece[count:], offset + count
            return os.fstat(fd)  # after the read, so that an edit before or during it shows
        except OSError:
            return None
        finally:
            os.close(fd)

    def _settle(self, number: int, status: os.stat_result) -> bool:
        """Check whether a file with another ctime still has the bytes that were read before."""
        inode = self.layout.tree.inodes[number]
        with self._settling:
            self._ctimes[number] = status.st_ctime_ns  # threads in ``fill`` read the file again
            blocks = self.layout.covering(number, 0, inode.size)
            same = data_pieces(self._folder + inode.path, status) == inode.pieces and all(
                self._holds(block) for block in blocks if block in self._first_reads
            )
            if not same:
                self.changed.add(number)
            return same

    def _holds(self, block: int) -> bool:
        """Return whether a block still has the bytes of the first read.

        If so, this holds for all its files, and those that are in no other block count as
        unchanged under their new ctimes: otherwise the block would be read again for each.
        """
        digest, changed = self._first_reads[block]
        view = memoryview(bytearray(self.layout.length(block)))
        ctimes: dict[int, int] = {}
        for number, offset, begin, length in self.layout.extents(block):
            if number in changed:
                continue
            inode = self.layout.tree.inodes[number]
            if length == inode.size:
                with contextlib.suppress(OSError):
                    # Ahead of the read, so that an edit before or during it has a later ctime.
                    status = os.lstat(self._folder + inode.path)
                    if status.st_ctime_ns != self._ctime(number) and self._same(number, status):
                        ctimes[number] = status.st_ctime_ns
            self._read_any(number, offset, view[begin : begin + length])
        if blake3(view).digest() != digest:
            return False
        self._ctimes.update(ctimes)
        return True


def unreadable(root: bytes, tree: Tree, number: int) -> bool:
    """Return whether a file cannot be read in full although its attributes are unchanged.

    Examples are a file that this user may not read, and a file of ``/sys`` that ends before its
    size.
    """
    inode = tree.inodes[number]
    path = os.path.join(root, inode.path)
    try:
        status = os.lstat(path)
    except OSError:
        return False
    found = Stamp(status.st_dev, status.st_ino, status.st_ctime_ns)
    if found != tree.stamps[number] or status.st_size != inode.size:
        return False
    view = memoryview(bytearray(1 << 20))
    try:
        with open(os.open(path, _FLAGS), "rb", buffering=0) as file:
            for offset, length in inode.data:
                while length:
                    count = os.preadv(file.fileno(), (view[:length],), offset)
                    if not count:
                        return True
                    offset, length = offset + count, length - count
    except OSError:
        return True
    return False


def file_digest(path: bytes) -> bytes:
    """Return the blake3 of a regular file, 32 bytes; no bytes if it cannot be read or is none."""
    hasher = blake3()
    try:
        with open(os.open(path, _FLAGS), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return b""
            while piece := file.read(1 << 20):
                hasher.update(piece)
    except OSError:
        return b""
    return hasher.digest()
