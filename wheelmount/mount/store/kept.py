"""Blocks that stay on a host's disk, for the mounts of later jobs.

The directory has one file for each block, named by the block's blake3: the block's bytes, then a
table of the pieces of files that they are, with paths and sizes. So each file stands for itself:
any of them may be damaged or deleted at any time, and no index has to follow. Nothing is believed:
the client's hash of a block decides whether bytes from here are that block.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import threading
import time
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import msgpack
from blake3 import blake3

from wheelmount.config import Settings
from wheelmount.errors import ConfigError
from wheelmount.mount.snapshot.layout import Extent
from wheelmount.mount.snapshot.tree import Inode

log = logging.getLogger("wheelmount")

SHARE = 10
"""By default, kept blocks take this part of the disk at most: a tenth."""

FREE = 20
"""Blocks are kept only while this part of the disk stays free: a twentieth."""

STEP = 16
"""A process looks again at what is kept after it has written this part of the bound, because
others write too."""

STALE = 600.0
"""Age in seconds after which an unfinished file belongs to a process that was killed."""

NEW = "new-"
"""Beginning of the name of an unfinished file."""

_NAME = re.compile("[0-9a-f]{64}")

_TAIL = Struct("=32sI")
"""The end of a file: blake3 of the table, and its length."""

_END = 4096
"""Bytes that are read of the end of a file at once: most tables are shorter."""

FILE_CLOCK = 5
"""The clock that dates files, CLOCK_REALTIME_COARSE of linux/time.h: up to 10 ms behind."""

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_FULL = (errno.ENOSPC, errno.EDQUOT)

Row = tuple[bytes, int, int, int, int, int]
"""A piece of a file: the file's path, size and mtime (ns), offset in the file and in the block,
length."""


class Kept:
    """The blocks that stay on this host, of this user.

    Several processes may use one directory at the same time. If it is deleted, nothing more is kept
    until it is opened again.

    Args:
        directory: the private directory.
        bound: bytes that the blocks may take; 0 for a share of the disk.

    Raises:
        OSError: the directory cannot be opened.
        ConfigError: it belongs to another user, or is open to others.
    """

    def __init__(self, directory: Path, bound: int) -> None:
        # From here on the directory is known by its descriptor: its path may come to mean another.
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        weakref.finalize(self, os.close, self._fd)
        state = os.fstat(self._fd)
        if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
            raise ConfigError(f"{directory} was exchanged", hint="set WHEELMOUNT_STORE_KEEP")
        self._directory = directory
        disk = os.fstatvfs(self._fd)
        size = disk.f_blocks * disk.f_frsize
        self._bound, self._margin = bound or size // SHARE, size // FREE
        self._began = time.clock_gettime_ns(FILE_CLOCK)
        self._needed: set[str] = set()  # blocks that this process may still use
        self._room = 0  # bytes that may be written before this process looks again
        self._begun = 0  # bytes of blocks that are being written
        self._total = 0  # bytes of all blocks when it looked last
        self._lock = threading.Lock()
        self._ended = False

    @classmethod
    def open(cls, settings: Settings) -> Kept | None:
        """Open this user's directory; None if ``store_keep`` names none, or its disk is full.

        Raises:
            ConfigError: the directory cannot be made or used, or is not private.
        """
        if not settings.store_keep:
            return None
        try:
            return cls(settings.private_kept(), settings.store_keep_size)
        except OSError as error:
            if error.errno in _FULL:
                return None
            raise ConfigError(
                f"{settings.store_keep} cannot be used to keep blocks: {error.strerror}",
                hint="set WHEELMOUNT_STORE_KEEP to a directory that you may write to, or unset it",
            ) from None

    def put(
        self, digest: bytes, data: memoryview, extents: list[Extent], inodes: dict[int, Inode]
    ) -> None:
        """Keep a block, if there is room, or can be made by removing those not used for longest.

        Failures are logged only: the delivery goes on without.

        Args:
            digest: blake3 of the block.
            data: the block.
            extents: its pieces of files.
            inodes: the files by number.
        """
        if self._ended:
            return
        rows = [
            (inodes[n].path, inodes[n].size, inodes[n].mtime_ns, at, start, length)
            for n, at, start, length in extents
        ]
        table: bytes = msgpack.packb(rows)
        end = table + _TAIL.pack(blake3(table).digest(), len(table))
        try:
            if not self.use(digest.hex()):
                if self._reserve(len(data) + len(end)):
                    self._write(digest.hex(), data, end)
                else:
                    self._ended = True
        except OSError as error:
            if error.errno in _FULL:  # by a quota, which says nothing ahead
                with self._lock:
                    self._look(0)
                    self._bound, self._room = min(self._bound, self._total * 15 // 16), 0
            else:
                self._ended = True
                log.info("no more blocks are kept in %s: %s", self._directory, error.strerror)

    def _reserve(self, size: int) -> bool:
        """Reserve room for ``size`` bytes, which ``_write`` uses; return False if there is none."""
        with self._lock:
            if self._room < size:
                self._room = self._look(max(size, self._bound // STEP))
            if self._room < size:
                return False
            self._room -= size
            self._begun += size
            return True

    def _write(self, name: str, data: memoryview, end: bytes) -> None:
        """Write a block for which room is reserved."""
        new, size = f"{NEW}{secrets.token_hex(8)}", len(data) + len(end)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(new, flags, 0o600, dir_fd=self._fd)
            try:
                for part in (data, memoryview(end)):
                    left = part
                    while left:
                        left = left[os.write(fd, left) :]
            finally:
                os.close(fd)
            with self._lock:  # ``_look`` counts the block once: as begun, or by its name
                os.rename(new, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                self._begun -= size
        except BaseException:
            self._remove(new)
            with self._lock:
                self._begun -= size
            raise

    def use(self, name: str) -> bool:
        """Note that a block is used now; return whether it is there."""
        try:
            os.utime(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:  # a disk that became read-only: its blocks can still be read
            return os.access(name, os.R_OK, dir_fd=self._fd, follow_symlinks=False)
        return True

    def _remove(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)
            return True
        return False

    def _look(self, wanted: int) -> int:
        """Remove blocks until there is room for ``wanted`` bytes; return how much there is.

        Blocks that this delivery uses or kept stay: if it alone exceeds the bound, a later one
        finds its first blocks instead of none.
        """
        blocks = sorted(self._blocks())
        self._total = sum(size for _, size, _ in blocks) + self._begun
        disk = os.fstatvfs(self._fd)
        free = disk.f_bavail * disk.f_frsize - self._begun
        room = min(self._bound - self._total, free - self._margin)
        for used, size, name in blocks:
            if room >= wanted or used >= self._began:
                break
            if name not in self._needed and self._remove(name):
                room += size
                self._total -= size
        return min(room, wanted)

    def _blocks(self) -> Iterator[tuple[int, int, str]]:
        """Yield time of last use (ns), size and name of each block; remove what was not finished.

        Nothing that has another name is touched.
        """
        with os.scandir(self._fd) as entries:
            for entry in entries:
                new = entry.name.startswith(NEW)
                if not new and not _NAME.fullmatch(entry.name):
                    continue
                try:
                    state = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed by another process
                    continue
                if not new:
                    yield state.st_mtime_ns, state.st_size, entry.name
                elif state.st_mtime < time.time() - STALE:
                    self._remove(entry.name)

    def read(self, name: str, begin: int, view: memoryview) -> None:
        """Read a part of a block into memory.

        Raises:
            OSError: it is not there, or shorter.
        """
        fd = os.open(name, _READ, dir_fd=self._fd)
        try:
            while view:
                if not (count := os.preadv(fd, [view], begin)):
                    raise OSError(errno.EIO, "a kept block is too short", name)
                view, begin = view[count:], begin + count
        finally:
            os.close(fd)

    def take(self, digest: bytes, view: memoryview) -> bool:
        """Read the block of a hash into memory; return False if it is not there."""
        name = digest.hex()
        if not self.use(name):
            return False
        try:
            self.read(name, 0, view)
        except OSError:
            self.check(name)
            return False
        return True

    def check(self, name: str) -> None:
        """Remove a block if it is damaged."""
        try:
            size = self._size(name)
            data = bytearray(size)
            self.read(name, 0, memoryview(data))
            sound = blake3(data).hexdigest() == name
        except FileNotFoundError:
            return
        except (OSError, ValueError):
            sound = False
        if not sound:
            log.info("a kept block was damaged: %s in %s", name, self._directory)
            self._remove(name)

    def _size(self, name: str) -> int:
        """Return the size of a block without its table."""
        fd = os.open(name, _READ, dir_fd=self._fd)
        try:
            return _table(fd)[0]
        finally:
            os.close(fd)

    def files(self, wanted: Callable[[bytes, int], object]) -> KeptFiles:
        """Search for files; blocks that have pieces of them stay as long as this object.

        Args:
            wanted: whether a file of that path and size is searched.
        """
        found = KeptFiles(self)
        for _, _, name in sorted(self._blocks(), reverse=True):  # the last used first
            try:
                fd = os.open(name, _READ, dir_fd=self._fd)
            except OSError:
                continue
            try:
                _, rows = _table(fd)
                pieces = [row for row in rows if wanted(row[0], row[1])]
                for row in pieces:
                    found.add(row, name)
            except (OSError, ValueError, TypeError, msgpack.UnpackException):
                self._remove(name)
                continue
            finally:
                os.close(fd)
            if pieces:
                self._needed.add(name)
        return found


def _table(fd: int) -> tuple[int, tuple[Row, ...]]:
    """Return the size of an open block without its table, and the table.

    Raises:
        ValueError, TypeError, msgpack.UnpackException: the file is damaged.
    """
    size = os.fstat(fd).st_size
    end = os.pread(fd, _END, max(size - _END, 0))
    if len(end) < _TAIL.size:
        raise ValueError("too short")
    digest, length = _TAIL.unpack(end[-_TAIL.size :])
    whole = length + _TAIL.size
    if whole > size:
        raise ValueError("too short")
    if whole > len(end):
        end = os.pread(fd, whole, size - whole)
    table = end[-whole : -_TAIL.size]
    if blake3(table).digest() != digest:
        raise ValueError("another hash")
    return size - whole, msgpack.unpackb(table, use_list=False)


class _Piece(NamedTuple):
    """A piece of a file in a kept block.

    Attributes:
        offset: of the piece in the file.
        rank: lower if the block was used more recently.
        length: bytes.
        name: of the block.
        start: offset in the block.
    """

    offset: int
    rank: int
    length: int
    name: str
    start: int


class KeptFiles:
    """Files, or parts of them, in kept blocks; read as those of a ``Store``."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._pieces: defaultdict[tuple[bytes, int], list[_Piece]] = defaultdict(list)
        self._longest = 0
        self._count = 0
        self._listed: list[tuple[bytes, int]] = []
        self._times: dict[tuple[bytes, int], int] = {}

    def add(self, row: Row, name: str) -> None:
        """Add a piece of a file that is in a block. Those in blocks last used must come first."""
        path, size, mtime, at, start, length = row
        self._times.setdefault((path, size), mtime)
        self._count += 1
        self._longest = max(self._longest, length)
        self._pieces[path, size].append(_Piece(at, self._count, length, name, start))

    def files(self) -> Iterator[tuple[int, bytes, int, int]]:
        """Yield number, path, size and mtime of each file. Nothing may be added afterwards."""
        for pieces in self._pieces.values():
            pieces.sort()
        self._listed = list(self._pieces)
        for number, (path, size) in enumerate(self._listed):
            yield number, path, size, self._times[path, size]

    def copy(self, extent: Extent, data: memoryview) -> bool:
        """Read a piece of a file into its place in a block; return False if it is not there."""
        at, block_offset, left = extent.file_offset, extent.block_offset, extent.length
        while left:
            piece = self._find(extent.inode, at)
            if piece is None:
                return False
            inside = at - piece.offset
            length = min(left, piece.length - inside)
            view = data[block_offset : block_offset + length]
            try:
                self._kept.read(piece.name, piece.start + inside, view)
                self._kept.use(piece.name)
            except OSError:
                self._kept.check(piece.name)
                return False
            at, block_offset, left = at + length, block_offset + length, left - length
        return True

    def check(self, extent: Extent) -> None:
        """Remove damaged blocks among those that ``copy`` reads."""
        at, end = extent.file_offset, extent.file_offset + extent.length
        while at < end and (piece := self._find(extent.inode, at)) is not None:
            self._kept.check(piece.name)
            at = piece.offset + piece.length

    def _find(self, number: int, at: int) -> _Piece | None:
        """Return the piece with a byte of a file, of several the last used; None if none has it."""
        pieces, found = self._pieces[self._listed[number]], None
        for place in range(bisect_right(pieces, (at + 1,)) - 1, -1, -1):
            piece = pieces[place]
            if piece.offset + self._longest <= at:
                break
            if piece.offset + piece.length > at and (found is None or piece.rank < found.rank):
                found = piece
        return found
