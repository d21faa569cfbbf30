"""The store: a host's copy of the files, as a directory that looks like the source's.

A store has generations, numbered from 1; each is a directory of its own, and a file that is the
same in two of them is one file with two names. A number is never given twice, so that what comes
too late for a generation that is gone finds no other in its place. Beside generation ``N`` lie
``N.tree``, its description, and ``N.summary``, a few numbers of that; ``N.have``, one byte a block,
and ``N.changed``, one byte a file whose bytes travel for it. The latter two are mapped by the
process that receives and by the one that serves, so what has arrived is seen by both at once, and a
serving process that is started again finds everything as it was.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import shutil
import threading
from collections.abc import Collection, Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import filelock
from blake3 import blake3

from wheelmount.errors import StoreError, TransferError
from wheelmount.mount.kernel import syscalls
from wheelmount.mount.snapshot.bursts import BurstLock
from wheelmount.mount.snapshot.encoded import Mapped, Summary
from wheelmount.mount.snapshot.layout import Cut, Extent, Layout, described
from wheelmount.mount.snapshot.tree import TreeView, many_objects
from wheelmount.mount.store import capacity, proofs
from wheelmount.mount.store.capacity import Need
from wheelmount.mount.store.files import Files, NewFiles

LAST = "last"
"""Name of a file in a store: the highest number that a generation was given."""

CURRENT = "current"
"""Name of a file in a store: the generation that is shown; the first where there is none."""

LEAVE = 10.0
"""Seconds that writers of a generation have to come to an end before it is deleted."""


class Store:
    """One generation of a mount's files on this host.

    Args:
        directory: of the store, where ``create`` made it.
        generation: its number.
        layout: the tree, and what of it arrives in which block; default read where it is needed.
        previous: the generation before, from whose layout this one's is made if that is known.
        dress: of one whose bytes are to arrive: whether files get the attributes of the source, to
            be shown as they are.
    """

    def __init__(
        self,
        directory: Path,
        generation: int,
        layout: Layout | None = None,
        previous: Store | None = None,
        *,
        dress: bool = False,
    ) -> None:
        self.directory = directory
        self.generation = generation
        self.root = directory / str(generation)
        """Directory of the files."""
        self.description = directory / f"{generation}.tree"
        """The encoded layout."""
        self.summary = Summary(**json.loads((directory / f"{generation}.summary").read_text()))
        self._layout = layout
        self._mapped: Mapped | None = None
        self._previous = previous
        self._dress = dress
        self._bursts = BurstLock()
        self._have = _map(directory / f"{generation}.have")
        self._changed = _map(directory / f"{generation}.changed")
        self._complete = self._sound = False
        self._access = threading.Condition()
        self._writers = 0
        self._forgotten = False

    @property
    def layout(self) -> Layout:
        """The tree, and what of it arrives in which block."""
        if self._layout is None:
            description, before = self.description.read_bytes(), None
            if self._previous is not None and self.summary.follows:
                description = description[self.summary.follows :]
                before = self._previous.layout
            self._layout, self._previous = Layout.decode(description, before), None
        return self._layout

    @property
    def cut(self) -> Cut:
        """The same, to be read: as it is described, unless it is here in full."""
        if self._layout is not None:
            return self._layout
        if self._mapped is None:
            before = self._previous._mapped if self._previous is not None else None
            self._mapped = Mapped(self.description, self.summary.follows, before)
            self._previous = None
        return self._mapped

    @property
    def tree(self) -> TreeView:
        """The tree, to be read."""
        return self.cut.tree

    def rest(self) -> None:
        """Give back the memory of what can be read again."""
        self._layout = self._mapped = self._previous = None
        self.__dict__.pop("_files", None)
        gc.collect()
        syscalls.give_back_memory()

    @classmethod
    def create(
        cls, directory: Path, description: bytes, *, mounted: bool, dress: bool = False
    ) -> Store:
        """Make the first generation, without its bytes.

        Args:
            directory: is made; its parent is there.
            description: of what it is for; see ``Layout.encode``.
            mounted: whether to keep the bytes in a file system of their own, in memory; else they
                are kept in ``directory`` as it is.
            dress: see ``Store``.

        Raises:
            StoreError: the bytes cannot fit there.
            TransferError: the tree is none.
        """
        layout = Layout.decode(description)
        with described():
            need = Need.of(layout, len(description), copied=dress)
            if len(layout.fresh) != layout.tree.files:
                raise ValueError("files without bytes")
        capacity.check(directory.parent, need.stored(memory=mounted), memory=mounted)
        directory.mkdir(mode=0o700)
        if mounted:
            syscalls.mount_tmpfs(directory, need.file_system)
        return cls._begin(directory, 1, layout, description, dress=dress)

    @classmethod
    def open(cls, directory: Path, generation: int | None = None) -> Store:
        """Find a generation again; default the one that is shown."""
        return cls(directory, current(directory) if generation is None else generation)

    def reopen(self, generation: int) -> Store:
        """Find another generation; quicker than ``open`` for one made from one that is known."""
        found = Store(self.directory, generation)
        known = self._layout is not None or self._mapped is not None
        if known and found.summary.predecessor == self.generation:
            found._previous = self
        return found

    def next(self, description: bytes, *, dress: bool = False) -> Store:
        """Make the next generation: with all files that are not fresh in it, but without a byte.

        Args:
            description: what is other than in this one; see ``Layout.encode``.
            dress: see ``Store``.

        Raises:
            StoreError: the bytes cannot fit.
            TransferError: it cannot be what follows.
        """
        layout = Layout.decode(description, self.layout)
        earlier = self.description.read_bytes()
        if len(earlier) + len(description) > 2 * self.summary.whole:
            earlier, description = b"", layout.encode()
        with described():
            need = Need.of(layout, len(earlier) + len(description), copied=dress)
        capacity.check(self.directory, need.stored(memory=self.owned), memory=self.owned)
        if dress and self.bindable:  # nothing else may be there any more that could show it
            capacity.check_holes(self.directory, layout, owned=self.owned)
        if self.owned:
            syscalls.resize_tmpfs(self.directory, self._used() + self._holes() + need.file_system)
        number = self._new_number()
        return self._begin(
            self.directory, number, layout, description, earlier, previous=self, dress=dress
        )

    def _new_number(self) -> int:
        """A number that no generation ever had; what refreshes left that were cut short goes."""
        shown = max(self.generation, current(self.directory))
        found = [int(path.name.partition(".")[0]) for path in self.directory.glob("[1-9]*")]
        last = self.directory / LAST
        given = int(last.read_text()) if last.exists() else 0
        number = max(shown, given, *found) + 1
        last.write_text(str(number))
        for left in {each for each in found if each > shown}:
            _delete(self.directory, left)
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
        dress: bool,
    ) -> Store:
        sizes = {"have": layout.blocks, "changed": layout.places}
        whole = previous.summary.whole if previous is not None and earlier else len(description)
        predecessor = previous.generation if previous is not None else 0
        summary = Summary.of(layout, predecessor, len(earlier), whole)
        try:
            (directory / f"{generation}.tree").write_bytes(earlier + description)
            (directory / f"{generation}.summary").write_text(json.dumps(asdict(summary)))
            for name, size in sizes.items():
                with (directory / f"{generation}.{name}").open("xb") as file:
                    # With its memory: a mapping that finds none later ends the process.
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))
            store = cls(directory, generation, layout, dress=dress)
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
        """Whether the store is a file system of its own."""
        return os.path.ismount(self.directory)

    @property
    def bindable(self) -> bool:
        """Whether the kernel may show the files as they are.

        Not where one is an error to readers, nor where readers could fill memory: whoever
        maps a hole of a file in tmpfs and reads it is given a page, which stays.
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
        return NewFiles(self.root, self.layout, dress=self._dress)

    def path(self, number: int) -> bytes:
        """Where a file's bytes are."""
        return self._files.path(number)

    def write(self, block: int, data: memoryview, digest: bytes | None = None) -> None:
        """Put a block's bytes into its files, and say that they are there.

        Args:
            block: which.
            data: its bytes.
            digest: blake3 of them; default it is made.

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
        """While bytes are written: ``forget`` waits for that, and allows no more of it."""
        with self._access:
            if self._forgotten:
                raise StoreError(f"generation {self.generation} of this mount was given up")
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
            block: which.
            view: where to.
            layout: whose block it is; default this store's. All its bytes must be here.

        Raises:
            StoreError: a file of it is gone or damaged.
        """
        try:
            extents = list((layout or self.layout).extents(block))
            with self._bursts.hold(len(extents)):
                for extent in extents:
                    self._files.read_into(extent, view)
        except OSError as error:
            raise StoreError(f"block {block} cannot be read again: {error.strerror}") from None

    def resume(self, *, dress: bool = False) -> None:
        """Go on with a first generation that another process made, and did not finish.

        Args:
            dress: see ``Store``.
        """
        self._dress = dress
        self._new_files.resume()

    def finish(self) -> None:
        """Make the files complete once all bytes are there; see ``NewFiles.finish``.

        Raises:
            StoreError: there is no room left.
        """
        try:
            self._new_files.finish(self.changed_numbers())
        except OSError as error:
            raise capacity.failure(self.directory, error) from None

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
                syscalls.resize_tmpfs(self.directory, self._used() + self._holes())
            summary = self.summary
            expected = summary.files + summary.size // proofs.SMALL
            proofs.trim(self.directory, expected, self.tree.inodes)

    def _holes(self) -> int:
        """Bytes that readers may yet take: whoever maps a hole and reads it is given a page."""
        holes = 0
        for path in self.directory.glob("*.summary"):
            with contextlib.suppress(FileNotFoundError):  # it is deleted at this moment
                holes += Summary(**json.loads(path.read_text())).holes
        return holes

    def _used(self) -> int:
        """Bytes that all generations take, where the store is a file system of its own."""
        usage = os.statvfs(self.directory)
        return (usage.f_blocks - usage.f_bfree) * usage.f_frsize

    def beside(self) -> int:
        """Bytes that other generations take beside this one; 0 where that is not known."""
        return max(0, self._used() - self.summary.room) if self.owned else 0

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Bytes of a file. Ask ``absent`` first."""
        return self._files.read(number, offset, size)

    def read_into(self, extent: Extent, data: memoryview) -> None:
        """Get a piece of a file that is there into its place in a block.

        Raises:
            OSError: it is not, or shorter.
        """
        self._files.read_into(extent, data)

    def has(self, block: int) -> bool:
        """Whether a block may be read."""
        return self._have[block] == 1

    def absent(self, number: int, offset: int, end: int) -> int | None:
        """The first block with bytes ``offset`` to ``end`` of a file that has not arrived."""
        if self._complete:
            return None
        for block in self.cut.covering(number, offset, end):
            if not self._have[block]:
                return block
        return None

    def missing(self) -> list[int]:
        """Blocks that have not arrived, in order."""
        blocks = self.summary.blocks
        if self._have[:blocks].count(1) == blocks:
            self._sound = self._changed.find(b"\x01") < 0  # no more is marked now
            self._complete = True
            return []
        return [block for block in range(blocks) if not self._have[block]]

    def held(self) -> int:
        """Bytes of the files that are here."""
        missing = self.missing()
        if not missing:  # the usual case, which needs no tree
            return self.summary.size
        return self.summary.size - sum(map(self.cut.length, missing))

    def mark_changed(self, inode: int) -> None:
        """Say that a file changed at the source before it was copied: it is not to be read."""
        place = self.cut.place(inode)
        if place is not None:
            self._changed[place] = 1

    def is_changed(self, inode: int) -> bool:
        """Whether ``mark_changed`` was called for a file."""
        if self._sound:
            return False
        place = self.cut.place(inode)
        return place is not None and self._changed[place] == 1

    def changed(self) -> list[bytes]:
        """Paths of the files for which ``mark_changed`` was called."""
        return [self.tree.inodes[number].path for number in self.changed_numbers()]

    def changed_numbers(self) -> list[int]:
        """Numbers of the files for which ``mark_changed`` was called."""
        if self._changed.find(b"\x01") < 0:
            return []
        marks = self._changed[: self.cut.places]
        return [self.cut.at(place) for place, mark in enumerate(marks) if mark]

    def free(self, number: int) -> None:
        """Delete one file of this generation; harmless if it is none or gone."""
        self._files.free(number)

    def forget(self, keep: Collection[str] = ()) -> None:
        """Delete this generation; files that others have too stay theirs.

        Args:
            keep: directories of it, as paths in it, that stay, empty.

        First what is being written is waited for, and nothing is written any more. Where a disk
        keeps a writer for longer than ``LEAVE``, it writes to files without a name.
        """
        with self._access:
            self._forgotten = True
            self._access.wait_for(lambda: not self._writers, LEAVE)
        if keep:
            _empty(self.root, {self.root / part for part in keep})
        _delete(self.directory, self.generation, files=not keep)


def _empty(directory: Path, keep: set[Path]) -> None:
    """Delete what is in a directory, but no directory of ``keep`` and none on the way to one."""
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


def note_current(directory: Path, generation: int) -> None:
    """Say which generation is shown, at once for whoever reads that at the moment."""
    new = directory / f"{CURRENT}.new"
    new.write_text(str(generation))
    new.replace(directory / CURRENT)


def current(directory: Path) -> int:
    """Number of the generation that is shown."""
    note = directory / CURRENT
    return int(note.read_text()) if note.exists() else 1


def earlier(directory: Path, generation: int) -> list[int]:
    """Numbers of the generations in a store that were before one, newest first."""
    numbers = (int(path.stem) for path in directory.glob("*.tree"))
    return sorted((number for number in numbers if number < generation), reverse=True)


def remove(directory: Path) -> None:
    """Delete a store; what is open or mapped keeps its memory until it is closed."""
    with contextlib.suppress(OSError):
        syscalls.unmount(directory, detach=True)
    shutil.rmtree(directory, ignore_errors=True)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


class ReblockedStore:
    """All of a store that is whole, to be given to hosts that are added later.

    What ``Receiver`` asks of a ``Store``, but nothing is ever missing.

    Args:
        store: has the files.
        block_size: bytes of a block.
    """

    def __init__(self, store: Store, block_size: int) -> None:
        layout = store.layout
        self.layout = Layout(layout.tree, block_size, identity=layout.identity)
        self._store = store

    def missing(self) -> list[int]:
        """See ``Store.missing``."""
        return []

    def has(self, _block: int) -> bool:
        """See ``Store.has``."""
        return True

    def read_block(self, block: int, view: memoryview) -> None:
        """See ``Store.read_block``."""
        self._store.read_block(block, view, self.layout)

    def write(self, _block: int, _data: memoryview, _digest: bytes) -> None:
        """Nothing is ever brought."""
        raise TransferError("this host has all blocks")

    def mark_changed(self, inode: int) -> None:
        """See ``write``."""
