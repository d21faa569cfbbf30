"""The store: a host's copy of the files, as a directory that looks like the source's.

A store has generations, numbered from 1; each is a directory of its own, and a file that is the
same in two of them is one file with two names. Beside generation ``N`` lie ``N.tree``, its
description, and ``N.summary``, a few numbers of that; ``N.have``, one byte a block, and
``N.changed``, one byte an inode number. The latter two are mapped by the process that receives and
by the one that serves, so what has arrived is seen by both at once, and a serving process that is
started again finds everything as it was.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import mmap
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import filelock
import psutil

from wheelmount.errors import StoreError
from wheelmount.mount import kernel
from wheelmount.mount.layout import Layout
from wheelmount.mount.tree import Inode

PAGE = 4096
"""What tmpfs gives memory by, bytes (more on some machines, which then use a little more)."""

SLACK = 64 << 20
"""Bytes a tmpfs may hold beyond the files themselves: tables, and what rounding missed."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What there is to say about a generation without its tree.

    Attributes:
        files: number of its files.
        size: bytes of them all, holes not counted.
        blocks: number of the blocks that travelled for it.
    """

    files: int
    size: int
    blocks: int


class Store:
    """One generation of a mount's files on this host.

    Args:
        directory: of the store, where ``create`` made it.
        generation: its number.
        layout: the tree, and what of it arrives in which block; default read where it is needed.
    """

    def __init__(self, directory: Path, generation: int, layout: Layout | None = None) -> None:
        self.directory = directory
        self.generation = generation
        self.root = directory / str(generation)
        """Directory of the files."""
        self.description = directory / f"{generation}.tree"
        """The encoded layout."""
        self.summary = Summary(**json.loads((directory / f"{generation}.summary").read_text()))
        self._layout = layout
        self._have = _map(directory / f"{generation}.have")
        self._changed = _map(directory / f"{generation}.changed")
        self._complete = False

    @property
    def layout(self) -> Layout:
        """The tree, and what of it arrives in which block."""
        if self._layout is None:
            self._layout = Layout.decode(self.description.read_bytes())
        return self._layout

    def rest(self) -> None:
        """Give back the memory of what can be read again."""
        self._layout = None
        self.__dict__.pop("_paths", None)
        gc.collect()
        kernel.give_back_memory()

    @classmethod
    def create(cls, directory: Path, layout: Layout, *, mounted: bool) -> Store:
        """Make the first generation, without its bytes.

        Args:
            directory: is made; its parent is there.
            layout: what it is for.
            mounted: whether to keep the bytes in a file system of their own, in memory; else they
                are kept in ``directory`` as it is.

        Raises:
            StoreError: the bytes cannot fit there.
            TransferError: the tree is none.
        """
        _check_room(directory.parent, layout.size, memory=mounted)
        directory.mkdir(mode=0o700)
        if mounted:
            kernel.mount_tmpfs(directory, _footprint(layout))
        return cls._begin(directory, layout, 1, None)

    @classmethod
    def open(cls, directory: Path, generation: int | None = None) -> Store:
        """Find a generation again; default the one that is shown."""
        if generation is None:
            current = directory / "current"
            generation = int(current.read_text()) if current.exists() else 1
        return cls(directory, generation)

    def next(self, layout: Layout) -> Store:
        """Make the next generation: with all files that are not fresh in it, but without a byte.

        Raises:
            StoreError: the bytes cannot fit.
        """
        if self.owned:
            _check_room(self.directory, layout.size, memory=True)
            kernel.resize_tmpfs(self.directory, self._used() + _footprint(layout))
        else:
            _check_room(self.directory, layout.size, memory=False)
        _delete(self.directory, self.generation + 1)  # of a refresh that was cut short
        return self._begin(self.directory, layout, self.generation + 1, self)

    @classmethod
    def _begin(
        cls, directory: Path, layout: Layout, generation: int, previous: Store | None
    ) -> Store:
        sizes = {"have": layout.blocks, "changed": layout.tree.limit}
        try:
            (directory / f"{generation}.tree").write_bytes(layout.encode())
            summary = Summary(layout.tree.files, layout.tree.size, layout.blocks)
            (directory / f"{generation}.summary").write_text(json.dumps(asdict(summary)))
            for name, size in sizes.items():
                with (directory / f"{generation}.{name}").open("xb") as file:
                    # With its memory: a mapping that finds none later ends the process.
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))
            store = cls(directory, generation, layout)
            store._lay_out(previous)
        except OSError as error:
            _delete(directory, generation)
            raise _store_error(directory, error) from None
        return store

    @property
    def owned(self) -> bool:
        """Whether the store is a file system of its own."""
        return os.path.ismount(self.directory)

    @cached_property
    def _paths(self) -> dict[int, list[bytes]]:
        """Names of each inode below ``root``."""
        paths: dict[int, list[bytes]] = defaultdict(list)
        for path, number in self.layout.tree.walk():
            paths[number].append(path)
        return paths

    def path(self, number: int) -> bytes:
        """Where a file's bytes are."""
        return os.path.join(os.fsencode(self.root), self._paths[number][0])

    def _lay_out(self, previous: Store | None) -> None:
        """Make directories, symlinks, files without bytes, and names of files that are there."""
        self.root.mkdir(mode=0o700)
        with _directory(self.root) as here, _directory((previous or self).root) as there:
            inodes = self.layout.tree.inodes
            for number, paths in self._paths.items():  # parents before what is in them
                if inodes[number].is_directory:
                    os.mkdir(paths[0], 0o700, dir_fd=here)
            for number, paths in self._paths.items():
                inode = inodes[number]
                if inode.is_directory:
                    continue
                if inode.is_symlink:
                    for path in paths:
                        os.symlink(inode.path, path, dir_fd=here)
                elif number in self.layout.fresh:
                    if not inode.data:
                        self._write_into(self.path(number), inode.size, None, 0)
                elif previous is not None and number in self.layout.copies:
                    shutil.copyfile(previous.path(self.layout.copies[number]), self.path(number))
                elif previous is not None:
                    source = previous._paths[number][0]
                    for path in paths:
                        os.link(source, path, src_dir_fd=there, dst_dir_fd=here)

    def write(self, block: int, data: memoryview) -> None:
        """Put a block's bytes into its files, and say that they are there.

        Raises:
            StoreError: there is no room left.
        """
        try:
            for extent in self.layout.extents(block):
                piece = data[extent.block_offset : extent.block_offset + extent.length]
                size = self.layout.tree.inodes[extent.inode].size
                self._write_into(self.path(extent.inode), size, piece, extent.file_offset)
        except OSError as error:
            raise _store_error(self.directory, error) from None
        self._have[block] = 1

    @staticmethod
    def _write_into(path: bytes, size: int, piece: memoryview | None, offset: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            if piece is None or len(piece) < size:
                # At once its full size: what tmpfs decides by whether to give huge pages.
                os.ftruncate(fd, size)
            while piece:
                count = os.pwrite(fd, piece, offset)
                piece, offset = piece[count:], offset + count
        finally:
            os.close(fd)

    def finish(self) -> None:
        """Give everything its names and attributes, once all bytes are there.

        Raises:
            StoreError: there is no room left.
        """
        root = os.fsencode(self.root)
        inodes = self.layout.tree.inodes
        try:
            for number in self.layout.fresh | self.layout.copies.keys():
                first, *others = self._paths[number]
                for other in others:
                    os.link(os.path.join(root, first), os.path.join(root, other))
                if inodes[number].pieces is not None:
                    _punch(os.path.join(root, first), inodes[number])
                self._dress(number, os.path.join(root, first))
            # Directories last and from below: what is made in one changes its time.
            for number, (path, *_) in reversed(self._paths.items()):
                if not inodes[number].is_file:
                    self._dress(number, os.path.join(root, path))
            self._dress(0, root)
        except OSError as error:
            raise _store_error(self.directory, error) from None

    def _dress(self, number: int, path: bytes) -> None:
        inode = self.layout.tree.inodes[number]
        for name, value in inode.xattrs:
            # Where the store's file system has none, they are not shown.
            with contextlib.suppress(OSError):
                os.setxattr(path, name, value, follow_symlinks=False)
        if not inode.is_symlink:
            os.chmod(path, inode.mode & 0o7777)
        os.utime(path, ns=(inode.mtime_ns, inode.mtime_ns), follow_symlinks=False)

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """While another generation is being made: keeps others from ``trim``.

        Raises:
            StoreError: somebody else is making one.
        """
        lock = filelock.FileLock(self.directory / "lock")
        try:
            with lock.acquire(timeout=0):
                yield
        except filelock.Timeout:
            raise StoreError(
                f"{self.directory.name} is being refreshed by somebody else", hint="wait for it"
            ) from None

    def trim(self) -> None:
        """Give up the room that was for bytes of other generations."""
        with contextlib.suppress(StoreError), self.growing():
            if self.owned:
                kernel.resize_tmpfs(self.directory, self._used())

    def _used(self) -> int:
        """Bytes that all generations take, where the store is a file system of its own."""
        usage = os.statvfs(self.directory)
        return (usage.f_blocks - usage.f_bfree) * usage.f_frsize

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Bytes of a file. Ask ``has`` first."""
        fd = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def has(self, block: int) -> bool:
        """Whether a block may be read."""
        return self._have[block] == 1

    def absent(self, number: int, offset: int, end: int) -> int | None:
        """The first block with bytes ``offset`` to ``end`` of a file that has not arrived."""
        if self._complete:
            return None
        for block in self.layout.covering(number, offset, end):
            if not self._have[block]:
                return block
        return None

    def missing(self) -> list[int]:
        """Blocks that have not arrived, in order."""
        blocks = self.summary.blocks
        if self._have[:blocks].count(1) == blocks:
            self._complete = True
            return []
        return [block for block in range(blocks) if not self._have[block]]

    def held(self) -> int:
        """Bytes of the files that are here."""
        return self.summary.size - sum(map(self.layout.length, self.missing()))

    def mark_changed(self, inode: int) -> None:
        """Say that a file changed at the source before it was copied: it is not to be read."""
        self._changed[inode] = 1

    def is_changed(self, inode: int) -> bool:
        """Whether ``mark_changed`` was called for a file."""
        return self._changed[inode] == 1

    def changed(self) -> list[bytes]:
        """Paths of the files for which ``mark_changed`` was called."""
        if self._changed.find(b"\x01") < 0:
            return []
        return [i.path for n, i in self.layout.tree.inodes.items() if self._changed[n]]

    def free(self, number: int) -> None:
        """Delete one file of this generation; harmless if it is none or gone."""
        for path in self._paths.get(number, ()):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(os.fsencode(self.root), path))

    def forget(self) -> None:
        """Delete this generation; files that others have too stay theirs."""
        _delete(self.directory, self.generation)


def _delete(directory: Path, generation: int) -> None:
    shutil.rmtree(directory / str(generation), ignore_errors=True)
    for name in ("tree", "summary", "have", "changed"):
        (directory / f"{generation}.{name}").unlink(missing_ok=True)


def _punch(path: bytes, inode: Inode) -> None:
    """Make the holes of a sparse file holes again: a huge page may have covered them."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        end = 0
        for offset, length in (*inode.data, (inode.size, 0)):
            if offset > end:
                with contextlib.suppress(OSError):  # a file system without: it only costs memory
                    kernel.punch_hole(fd, end, offset - end)
            end = offset + length
    finally:
        os.close(fd)


def earlier(directory: Path, generation: int) -> list[int]:
    """Numbers of the generations in a store that were before one, newest first."""
    numbers = (int(path.stem) for path in directory.glob("*.tree"))
    return sorted((number for number in numbers if number < generation), reverse=True)


def remove(directory: Path) -> None:
    """Delete a store; what is open or mapped keeps its memory until it is closed."""
    with contextlib.suppress(OSError):
        kernel.unmount(directory, detach=True)
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int]:
    """A directory, open: what is below it is reached with less work than by its whole path."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _footprint(layout: Layout) -> int:
    """Bytes of memory that the files may take which a layout adds to a store."""
    added = (layout.tree.inodes[n] for n in layout.fresh | layout.copies.keys())
    return sum(-(-inode.size // PAGE) * PAGE for inode in added) + SLACK


def _free(directory: Path, *, memory: bool) -> int:
    if memory:
        return int(psutil.virtual_memory().available)
    return shutil.disk_usage(directory).free


def _check_room(directory: Path, needed: int, *, memory: bool) -> None:
    free = _free(directory, memory=memory)
    if needed > free:
        raise _full("memory" if memory else str(directory), needed, free)


def _store_error(directory: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return _full(str(directory.parent), 0, _free(directory, memory=False))
    return StoreError(f"cannot write to {directory}: {error.strerror}")


def _full(where: str, needed: int, free: int) -> StoreError:
    what = f"{needed >> 20} MiB" if needed else "the files"
    return StoreError(
        f"{what} do not fit into {where}, which has {free >> 20} MiB free",
        hint="free memory there, or set WHEELMOUNT_STORE to a directory with more room",
    )
