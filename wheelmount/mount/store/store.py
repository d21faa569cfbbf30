"""The store: a host's copy of the source directory.

A store has generations, numbered from 1. Each is a directory of its own, and a file that is the
same in two generations is one file with two names. A number is never used twice, so that a late
block of a deleted generation is not written to another one. Next to the directory of generation
``N`` are ``N.tree``, the encoded layout; ``N.summary``, a few totals; ``N.have``, one byte for each
block, and one that tells whether ``finish`` has ended; and ``N.changed``, one byte for each file
that is sent for this generation. The last two are mapped by the receiving and the serving process,
so both see immediately which blocks have arrived, and a restarted serving process finds them
unchanged. Both hold a shared lock on the directory of the store, as ``in_use`` finds out.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import mmap
import os
import shutil
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from blake3 import blake3

from wheelmount import disk, shared
from wheelmount.errors import StoreError, TransferError
from wheelmount.lock import NO_LOCKS, try_lock
from wheelmount.mount.kernel import syscalls
from wheelmount.mount.snapshot.bursts import BurstLock
from wheelmount.mount.snapshot.encoded import Mapped, Summary
from wheelmount.mount.snapshot.layout import Cut, Extent, Layout, described
from wheelmount.mount.snapshot.tree import TreeView, many_objects
from wheelmount.mount.store import capacity, proofs
from wheelmount.mount.store.capacity import Need
from wheelmount.mount.store.files import Files, NewFiles
from wheelmount.owned import delete_tree

LAST = "last"
"""Name of the file in a store that contains the highest generation number used so far."""

CURRENT = "current"
"""Name of the file in a store that contains the number of the current generation. Without this
file, the first one is current."""

LOCK = "lock"
"""Name of the file in a store that ``growing`` locks."""

LOCKED, LOCK_INTERVAL = 5.0, 0.05
"""Seconds that ``growing`` waits for the lock of a store, and between its attempts. The serving
process has it for some moments, to ``trim`` the store after a refresh."""

LEAVE = 10.0
"""Seconds that ``forget`` waits for the writers of a generation before it deletes the files."""


class Store:
    """One generation of a mount's files on this host.

    Args:
        directory: directory of the store, as given to ``create``.
        generation: number of the generation.
        layout: the tree and its blocks; by default read when it is needed.
        previous: the generation before; if its layout is in memory, only the differences are read.
        set_attributes: give arriving files the attributes that they have at the source, so that
            the kernel can show the files directly.
    """

    def __init__(
        self,
        directory: Path,
        generation: int,
        layout: Layout | None = None,
        previous: Store | None = None,
        *,
        set_attributes: bool = False,
    ) -> None:
        self.directory = directory
        self.generation = generation
        self.root = directory / str(generation)
        """The directory of the files."""
        self.description = directory / f"{generation}.tree"
        """The encoded layout."""
        self.summary = Summary(**json.loads((directory / f"{generation}.summary").read_text()))
        self._layout = layout
        self._mapped: Mapped | None = None
        self._previous = previous
        self._sets_attributes = set_attributes
        self._bursts = BurstLock()
        self._have = _map(directory / f"{generation}.have")
        self._changed = _map(directory / f"{generation}.changed")
        self._complete = False  # whether ``missing`` has found that all blocks have arrived
        self._unchanged = False  # whether also none of the files is marked as changed
        self._access = threading.Condition()
        self._writers = 0
        self._forgotten = False
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, held)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)

    @property
    def layout(self) -> Layout:
        """The tree and its blocks."""
        if self._layout is None:
            description, before = self.description.read_bytes(), None
            if self._previous is not None and self.summary.follows:
                description = description[self.summary.follows :]
                before = self._previous.layout
            self._layout, self._previous = Layout.decode(description, before), None
        return self._layout

    @property
    def cut(self) -> Cut:
        """The layout for reading: encoded, unless it is in memory already."""
        if self._layout is not None:
            return self._layout
        if self._mapped is None:
            before = self._previous._mapped if self._previous is not None else None
            self._mapped = Mapped(self.description, self.summary.follows, before)
            self._previous = None
        return self._mapped

    @property
    def tree(self) -> TreeView:
        """The tree, for reading."""
        return self.cut.tree

    def rest(self) -> None:
        """Free the memory of the layout, which is read again when it is needed."""
        self._layout = self._mapped = self._previous = None
        self.__dict__.pop("_files", None)
        gc.collect()
        syscalls.give_back_memory()

    @classmethod
    def create(
        cls, directory: Path, description: bytes, *, mounted: bool, set_attributes: bool = False
    ) -> Store:
        """Make a store with its first generation, whose files have no bytes yet.

        Args:
            directory: directory to make; its parent must exist.
            description: encoded layout, from ``Layout.encode``.
            mounted: keep the bytes in a new tmpfs that is mounted at ``directory``, not in the
                file system of its parent.
            set_attributes: give arriving files the attributes that they have at the source.

        Raises:
            StoreError: the bytes do not fit.
            TransferError: the description is malformed.
        """
        layout = Layout.decode(description)
        with described():
            need = Need.of(layout, len(description), copied=set_attributes)
            if len(layout.fresh) != layout.tree.files:
                raise ValueError("files without bytes")
        capacity.check(directory.parent, need.stored(memory=mounted), memory=mounted)
        directory.mkdir(mode=0o700)
        if mounted:
            syscalls.mount_tmpfs(directory, need.file_system)
        store = cls._begin(directory, 1, layout, description, set_attributes=set_attributes)
        shared.mark(directory)
        return store

    @classmethod
    def open(cls, directory: Path, generation: int | None = None) -> Store:
        """Open an existing generation, by default the current one."""
        return cls(directory, current(directory) if generation is None else generation)

    def reopen(self, generation: int) -> Store:
        """Open another generation.

        This is faster than ``open`` if the generation was made from this one and the layout of
        this one is in memory.
        """
        opened = Store(self.directory, generation)
        known = self._layout is not None or self._mapped is not None
        if known and opened.summary.predecessor == self.generation:
            opened._previous = self
        return opened

    def next(self, description: bytes, *, set_attributes: bool = False) -> Store:
        """Make the next generation, with links to all unchanged files; new files are empty.

        Args:
            description: encoded differences to this generation, from ``Layout.encode``.
            set_attributes: give arriving files the attributes that they have at the source.

        Raises:
            StoreError: the bytes do not fit.
            TransferError: the description does not fit this generation.
        """
        layout = Layout.decode(description, self.layout)
        earlier = self.description.read_bytes()
        if len(earlier) + len(description) > 2 * self.summary.whole:
            earlier, description = b"", layout.encode()
        with described():
            need = Need.of(layout, len(earlier) + len(description), copied=set_attributes)
        capacity.check(self.directory, need.stored(memory=self.owned), memory=self.owned)
        if set_attributes and self.bindable:  # the kernel may show the files directly
            capacity.check_holes(self.directory, layout, owned=self.owned)
        self._resize(need.file_system)
        number = self._new_number()
        return self._begin(
            self.directory,
            number,
            layout,
            description,
            earlier,
            previous=self,
            set_attributes=set_attributes,
        )

    def _new_number(self) -> int:
        """Return an unused number; delete what interrupted refreshes left."""
        shown = max(self.generation, current(self.directory))
        present = [int(path.name.partition(".")[0]) for path in self.directory.glob("[1-9]*")]
        last = self.directory / LAST
        highest = int(last.read_text()) if last.exists() else 0
        number = max(shown, highest, *present) + 1
        disk.write(last, str(number))  # half of it would hinder all later refreshes
        for interrupted in {each for each in present if each > shown}:
            _delete(self.directory, interrupted)
        return number

    @classmethod
    @many_objects()
    @described()
    def _begin(
        cls,
        directory: Path,
        generation: int,
        layout: Layout,
        description: bytes,
        earlier: bytes = b"",
        previous: Store | None = None,
        *,
        set_attributes: bool,
    ) -> Store:
        sizes = {"have": layout.blocks + 1, "changed": layout.places}
        whole = previous.summary.whole if previous is not None and earlier else len(description)
        predecessor = previous.generation if previous is not None else 0
        summary = Summary.of(layout, predecessor, len(earlier), whole)
        try:
            (directory / f"{generation}.tree").write_bytes(earlier + description)
            (directory / f"{generation}.summary").write_text(json.dumps(asdict(summary)))
            for name, size in sizes.items():
                with (directory / f"{generation}.{name}").open("xb") as file:
                    # Allocate the file's pages now: access to a mapped page that cannot be
                    # allocated would kill the process.
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))
            store = cls(directory, generation, layout, set_attributes=set_attributes)
            if previous is None:
                store._new_files.make()
            else:
                store._new_files.follow(previous._files)
                proofs.copy(directory, generation, layout.copies)
        except BaseException as error:
            _delete(directory, generation)
            if isinstance(error, OSError):
                raise capacity.failure(directory, error) from None
            raise
        return store

    @property
    def owned(self) -> bool:
        """Whether the store has a file system of its own."""
        return os.path.ismount(self.directory)

    @property
    def bindable(self) -> bool:
        """Whether the kernel may show the files directly.

        It may not if reads of one of them must fail, nor if readers could fill memory: the kernel
        allocates a page for each page of a hole in a tmpfs file that is read through a mapping.
        """
        if self.changed():
            return False
        if not self.summary.holes or not syscalls.in_memory(self.directory):
            return True
        return self.owned and self.summary.holes <= max(capacity.HOLES, self.summary.size)

    @cached_property
    def _files(self) -> Files:
        return Files(self.root, self.tree)

    @cached_property
    def _new_files(self) -> NewFiles:
        return NewFiles(self.root, self.layout, set_attributes=self._sets_attributes)

    def path(self, number: int) -> bytes:
        """Return the path of a file in the store."""
        return self._files.path(number)

    def write(self, block: int, data: memoryview, digest: bytes | None = None) -> None:
        """Write a block's bytes to its files, and mark them as arrived.

        Args:
            block: number of the block.
            data: bytes of the block.
            digest: blake3 of the block; computed by default.

        Raises:
            StoreError: there is no room left, or this generation was forgotten.
        """
        with self._writing():
            try:
                extents = list(self.layout.extents(block))
                with self._bursts.hold(len(extents)):
                    for extent in extents:
                        self._new_files.write(extent, data)
                digest = digest or blake3(data).digest()
                proofs.add(self.directory, self.generation, extents, data, digest)
            except OSError as error:
                raise capacity.failure(self.directory, error) from None
            self._have[block] = 1

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Count as a writer during the context: ``forget`` waits for writers, and refuses more."""
        with self._access:
            if self._forgotten:
                raise StoreError(f"generation {self.generation} of this mount was discarded")
            self._writers += 1
        try:
            yield
        finally:
            with self._access:
                self._writers -= 1
                self._access.notify_all()

    def read_block(self, block: int, view: memoryview, layout: Layout | None = None) -> None:
        """Read a block that has arrived.

        Args:
            block: number of the block.
            view: memory to read the block into.
            layout: the layout that defines the block, by default this store's. All bytes of the
                block must have arrived.

        Raises:
            StoreError: one of the block's files is missing or cut short.
        """
        try:
            extents = list((layout or self.layout).extents(block))
            with self._bursts.hold(len(extents)):
                for extent in extents:
                    self._files.read_into(extent, view)
        except OSError as error:
            raise StoreError(f"block {block} cannot be read again: {error.strerror}") from None

    def resume(self, *, set_attributes: bool = False) -> None:
        """Continue with a first generation that another process made and did not finish.

        Args:
            set_attributes: give arriving files the attributes that they have at the source.
        """
        self._sets_attributes = set_attributes
        self._new_files.resume()

    def finish(self) -> None:
        """Make the remaining names and set the remaining attributes. All bytes must have arrived.

        Raises:
            StoreError: there is no room left.
        """
        try:
            self._new_files.finish(self.changed_numbers())
        except OSError as error:
            raise capacity.failure(self.directory, error) from None
        self._have[self.summary.blocks] = 1

    @property
    def finished(self) -> bool:
        """Whether ``finish`` has ended; only then can the next generation be made from this one."""
        return self._have[self.summary.blocks] == 1

    @contextlib.contextmanager
    def growing(self, wait: float = LOCKED) -> Iterator[None]:
        """Lock the store during the context, in which a generation is made.

        Other processes can neither make a generation nor ``trim`` the store then.

        Args:
            wait: seconds that another process may hold the lock.

        Raises:
            StoreError: another process has locked the store.
        """
        deadline = time.monotonic() + wait
        while (lock := self._try_lock()) is None:
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"{self.directory.name} is being refreshed by another process",
                    hint="wait for it",
                )
            time.sleep(LOCK_INTERVAL)
        try:
            yield
        finally:
            os.close(lock)

    def _try_lock(self) -> int | None:
        """Return a descriptor that holds the lock of the store; None if another process has it."""
        try:
            return try_lock(self.directory / LOCK)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        return os.open(self.directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)  # without a lock

    def trim(self) -> None:
        """Shrink the log of hashes and the file system after generations were deleted."""
        expected = self.summary.files + self.summary.size // proofs.SMALL
        # Read ahead of the lock, which a refresh may wait for: a large tree takes seconds.
        inodes = self.tree.inodes if proofs.is_long(self.directory, expected) else None
        with contextlib.suppress(StoreError), self.growing(wait=0):
            if inodes is not None:
                self._resize(proofs.size(self.directory))
                proofs.trim(self.directory, expected, inodes)
            self._resize()

    def _resize(self, more: int = 0) -> None:
        """Leave room in the store's own file system for holes, small files and ``more`` bytes."""
        if self.owned:
            room = self._used() + self._holes() + capacity.SLACK + more
            syscalls.resize_tmpfs(self.directory, room)

    def _holes(self) -> int:
        """Return the bytes of all holes, whose pages readers can have the kernel allocate."""
        holes = 0
        for path in self.directory.glob("*.summary"):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                holes += Summary(**json.loads(path.read_text())).holes
        return holes

    def _used(self) -> int:
        """Return the bytes in use; the store must have a file system of its own."""
        usage = os.statvfs(self.directory)
        return (usage.f_blocks - usage.f_bfree) * usage.f_frsize

    def beside(self) -> int:
        """Return the bytes that other generations take in addition; 0 if unknown."""
        return max(0, self._used() - self.summary.room) if self.owned else 0

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Read bytes of a file; ``absent`` must have shown that they have arrived."""
        return self._files.read(number, offset, size)

    def files(self) -> Iterator[tuple[int, bytes, int, int]]:
        """Yield number, path, size and mtime (ns) of each file."""
        for number, inode in self.tree.inodes.items():
            if inode.is_file:
                yield number, inode.path, inode.size, inode.mtime_ns

    def copy(self, extent: Extent, data: memoryview) -> bool:
        """Read a piece of a file into its place in a block; return False if it is not there."""
        begin, end = extent.file_offset, extent.file_offset + extent.length
        try:
            if self.absent(extent.inode, begin, end) is not None:
                return False
            self._files.read_into(extent, data)
        except (OSError, KeyError):
            return False
        return True

    def has(self, block: int) -> bool:
        """Return whether a block has arrived."""
        return self._have[block] == 1

    def absent(self, number: int, offset: int, end: int) -> int | None:
        """Return the first missing block of a file's bytes ``offset`` to ``end``, or None."""
        if self._complete:
            return None
        for block in self.cut.covering(number, offset, end):
            if not self._have[block]:
                return block
        return None

    def missing(self) -> list[int]:
        """Return the numbers of the blocks that have not arrived, in order."""
        blocks = self.summary.blocks
        if self._have[:blocks].count(1) == blocks:
            # Files are marked only while blocks arrive.
            self._unchanged = self._changed.find(b"\x01") < 0
            self._complete = True
            return []
        return [block for block in range(blocks) if not self._have[block]]

    def held(self) -> int:
        """Return the number of bytes of files that have arrived."""
        missing = self.missing()
        if not missing:  # the usual case, in which the tree need not be read
            return self.summary.size
        return self.summary.size - sum(map(self.cut.length, missing))

    def mark_changed(self, inode: int) -> None:
        """Mark a file that changed at the source before it was copied; reads of it fail."""
        place = self.cut.place(inode)
        if place is not None:
            self._changed[place] = 1

    def is_changed(self, inode: int) -> bool:
        """Return whether ``mark_changed`` was called for a file."""
        if self._unchanged:
            return False
        place = self.cut.place(inode)
        return place is not None and self._changed[place] == 1

    def changed(self) -> list[bytes]:
        """Return paths of the files for which ``mark_changed`` was called."""
        return [self.tree.inodes[number].path for number in self.changed_numbers()]

    def changed_numbers(self) -> list[int]:
        """Return numbers of the files for which ``mark_changed`` was called."""
        if self._changed.find(b"\x01") < 0:
            return []
        marks = self._changed[: self.cut.places]
        return [self.cut.at(place) for place, mark in enumerate(marks) if mark]

    def free(self, number: int) -> None:
        """Delete a file of this generation; do nothing if it is no regular file, or deleted."""
        self._files.free(number)

    def forget(self, keep: Collection[str] = ()) -> None:
        """Delete this generation; files that other generations share stay there.

        Waits for writers first, and refuses later ones. A writer that is blocked by a disk for
        longer than ``LEAVE`` writes to deleted files.

        Args:
            keep: directories to empty but not to delete; paths relative to this generation.
        """
        with self._access:
            self._forgotten = True
            self._access.wait_for(lambda: not self._writers, LEAVE)
        if keep:
            _empty(self.root, {self.root / part for part in keep})
        _delete(self.directory, self.generation, files=not keep)


def _empty(directory: Path, keep: set[Path]) -> None:
    """Empty a directory, except for the directories in ``keep`` and those above them."""
    for path in directory.iterdir():
        if path in keep or any(path in each.parents for each in keep):
            _empty(path, keep)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _delete(directory: Path, generation: int, *, files: bool = True) -> None:
    if files:
        shutil.rmtree(directory / str(generation), ignore_errors=True)
    for name in ("tree", "summary", "have", "changed"):
        (directory / f"{generation}.{name}").unlink(missing_ok=True)


class NextCurrent:
    """A record of which generation will be current, written before it is shown.

    ``take`` then needs no room on the disk.

    Args:
        directory: directory of the store.
        generation: number of the generation.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, directory: Path, generation: int) -> None:
        self._new, self._note = directory / f"{CURRENT}.new", directory / CURRENT
        try:
            self._new.write_text(str(generation))
        except OSError:
            self.drop()
            raise

    def take(self) -> None:
        """Have it count. The serving process knows what is shown even if this fails."""
        with contextlib.suppress(OSError):
            self._new.replace(self._note)

    def drop(self) -> None:
        """Delete it."""
        with contextlib.suppress(OSError):
            self._new.unlink(missing_ok=True)


def current(directory: Path) -> int:
    """Return the number of the current generation."""
    note = directory / CURRENT
    return int(note.read_text()) if note.exists() else 1


def earlier(directory: Path, generation: int) -> list[int]:
    """Return numbers of generations before the given one, newest first."""
    numbers = (int(path.stem) for path in directory.glob("*.tree"))
    return sorted((number for number in numbers if number < generation), reverse=True)


def in_use(directory: Path) -> bool:
    """Return whether a process has a store open, or may have.

    That is unknown of another machine's store, and where the file system has no locks.
    """
    if shared.elsewhere(directory):
        return True
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:  # deleted meanwhile
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a process holds the lock, or the file system has no locks
        return True
    finally:
        os.close(descriptor)
    return False


def remove(directory: Path) -> None:
    """Delete a store; files that are open or mapped take memory until they are closed."""
    with contextlib.suppress(OSError):
        syscalls.unmount(directory, detach=True)
    delete_tree(directory)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


class ReblockedStore:
    """A complete store, divided into blocks of another size, for hosts that are added later.

    It has the methods of ``Store`` that ``Receiver`` needs. No block is ever missing.

    Args:
        store: the store that contains the files.
        block_size: bytes of a block.
    """

    def __init__(self, store: Store, block_size: int) -> None:
        layout = store.layout
        self.layout = Layout(layout.tree, block_size, identity=layout.identity)
        self._store = store

    def missing(self) -> list[int]:
        """Return an empty list."""
        return []

    def has(self, _block: int) -> bool:
        """Return True."""
        return True

    def read_block(self, block: int, view: memoryview) -> None:
        """Read a block of the new size from the files."""
        self._store.read_block(block, view, self.layout)

    def write(self, _block: int, _data: memoryview, _digest: bytes) -> None:
        """Refuse a block: none is missing."""
        raise TransferError("this host has all blocks")

    def mark_changed(self, inode: int) -> None:
        """Do nothing: no block ever arrives."""
