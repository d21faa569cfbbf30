"""Reuse of bytes that a host has: in other mounts of the same user, and kept from earlier ones.

Names and sizes suggest which files may be equal. The client's hash of a block decides whether
the files make that block: a wrong guess costs some reading,
and the block is sent like any other. If only a small part of a block is not here, that part is sent
alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task
from wheelmount.mount.snapshot.layout import Extent, Layout
from wheelmount.mount.store.kept import Kept, KeptFiles
from wheelmount.mount.store.store import Store

FEW = 0.25
"""Part of a block that may be fetched by itself; if more of it is not here, all of it travels."""

LEAST = 64 << 10
"""Bytes of a tree below which sending is faster than searching."""

SEARCHED = 1000
"""Bytes that a link of 1 Gbit/s carries in the time in which one file of another tree is searched
(8 µs). All files of other stores are searched only if more bytes than that lack for each."""


class LocalCopies:
    """Finds blocks of a layout among the files of other stores, and among kept blocks.

    Args:
        layout: whose blocks are wanted.
        kept: blocks of earlier mounts.
    """

    def __init__(self, layout: Layout, kept: Kept | None = None) -> None:
        self._layout = layout
        self._kept = kept
        self._places: dict[int, tuple[Store | KeptFiles, int]] = {}
        self._doubtful: set[int] = set()  # files that have another time of change where they are
        inodes = layout.tree.inodes
        self._wanted = {number for number in layout.fresh if inodes[number].size}

    @property
    def lacking(self) -> int:
        """Bytes of the files that were not found."""
        inodes = self._layout.tree.inodes
        return sum(inodes[number].held for number in self._wanted - self._places.keys())

    def search_paths(self, store: Store) -> None:
        """Search a store for files of the same path and size.

        Takes time for each file of the layout only, not for those of the store.
        """
        tree = store.layout.tree
        for number in self._wanted:
            inode = self._layout.tree.inodes[number]
            earlier = tree.find(inode.path)
            if earlier is not None:
                old = tree.inodes[earlier]
                if old.is_file and old.size == inode.size:
                    self._note(number, store, earlier, old.mtime_ns)

    def search(self, stores: Sequence[Store]) -> None:
        """Search all files of stores, and of kept blocks, for those that were not found.

        A file is searched by its size and, in this order, by its path, the last two parts of it,
        or its name alone.

        Args:
            stores: where to search; kept blocks come after all complete stores. A store that is
                deleted or refreshed meanwhile does no harm: its files are not found any more.
        """
        inodes = self._layout.tree.inodes
        lacking = self._wanted - self._places.keys()
        fresh = {number: _keys(inodes[number].path, inodes[number].size) for number in lacking}
        wanted = {key for keys in fresh.values() for key in keys}
        sources: list[Store | KeptFiles] = [*stores]
        if self._kept is not None:
            behind = sum(not store.missing() for store in stores)
            sources.insert(
                behind,
                self._kept.files(lambda path, size: not wanted.isdisjoint(_keys(path, size))),
            )
        found: dict[int, tuple[Store | KeptFiles, int, int]] = {}
        for source in sources:
            for number, path, size, mtime in source.files():
                for key in _keys(path, size):
                    if key in wanted:
                        found.setdefault(key, (source, number, mtime))
        for number, keys in fresh.items():
            place = next((found[key] for key in keys if key in found), None)
            if place is not None:
                self._note(number, *place)

    def _note(self, number: int, source: Store | KeptFiles, place: int, mtime_ns: int) -> None:
        """Note where a file may be found, and the mtime that it has there."""
        self._places[number] = source, place
        if mtime_ns != self._layout.tree.inodes[number].mtime_ns:
            self._doubtful.add(number)

    def __bool__(self) -> bool:
        """Whether any block may be found."""
        return bool(self._places)

    def tries(self, block: int) -> Iterator[list[Extent]]:
        """Yield the pieces of a block to fetch, for each way to make the rest of files from here.

        Nothing is yielded if more than ``FEW`` of the block would have to be fetched. Files that
        seem to have been edited are first taken from here only if all pieces of the block are.
        """
        few = self._layout.length(block) * FEW
        absent, doubtful = [], []
        for extent in self._layout.extents(block):
            if extent.inode not in self._places:
                absent.append(extent)
            elif extent.inode in self._doubtful:
                doubtful.append(extent)
        if not absent:
            yield []
        for lacking in (absent + doubtful, absent):
            if lacking and sum(extent.length for extent in lacking) <= few:
                yield lacking
                return

    def candidates(
        self,
        block: int,
        digest: bytes,
        view: memoryview,
        lacking: Sequence[Extent] = (),
        data: bytes = b"",
    ) -> Iterator[int]:
        """Read candidates for a block, one after the other, until one is right.

        Args:
            block: number of the block.
            digest: blake3 of the right one.
            view: memory to read them into.
            lacking: pieces not to be read, as ``tries`` yielded them.
            data: the bytes of these pieces, joined.

        Yields:
            For each candidate, once it is in memory, the number of its bytes that were kept.
        """
        if self._kept is not None and self._kept.take(digest, view):
            yield len(view) - len(data)
            self._kept.check(digest.hex())
        kept, arrived, given = 0, 0, {*lacking}
        pieces = []
        for piece in lacking:
            end = piece.block_offset + piece.length
            view[piece.block_offset : end] = data[arrived : arrived + piece.length]
            arrived += piece.length
        for extent in self._layout.extents(block):
            if extent in given:
                continue
            source, number = self._places[extent.inode]
            piece = extent._replace(inode=number)
            if not source.copy(piece, view):
                return
            if isinstance(source, KeptFiles):
                pieces.append((source, piece))
                kept += extent.length
        yield kept
        for files, piece in pieces:
            files.check(piece)


def _keys(path: bytes, size: int) -> tuple[int, int, int]:
    """Return the keys that a file is searched by; hashes, which take less memory than names."""
    parts = path.rsplit(b"/", 2)
    return hash((size, path)), hash((size, *parts[-2:])), hash((size, parts[-1]))


def find(
    settings: Settings,
    own: Path,
    store: Store,
    kept: Kept | None = None,
    before: Store | None = None,
) -> LocalCopies | None:
    """Search this host for the files of a store to be filled.

    They are searched in the generation ahead, in other mounts, and in blocks of earlier ones.
    Takes about a second for 100,000 files in other mounts.

    Args:
        settings: which directories mounts are in.
        own: directory of the mount. The same mount on other hosts is left out:
            hosts may share a machine, and still count as separate.
        store: the store of that mount.
        kept: blocks of earlier mounts.
        before: the generation ahead of the store's.

    Returns:
        None if no file may be found.
    """
    if store.layout.size < LEAST:
        return None
    found = LocalCopies(store.layout, kept)
    stores = []
    if before is not None:
        found.search_paths(before)  # mostly files written again as they were
        stores.append(before)
    for directory in processes.find(settings):
        if processes.identity(directory) != processes.identity(own):
            # Just being made or removed, of another version, in another namespace: whatever
            # is wrong with another mount, this one does without.
            with contextlib.suppress(Exception):
                stores.append(Store.open(Path(Task.read(directory).store)))
    if sum(store.summary.files for store in stores) * SEARCHED > found.lacking:
        stores = []
    readable = []
    for other in stores:
        with contextlib.suppress(Exception):
            other.missing()  # a complete store need not be asked for each block
            _ = other.tree  # stays readable from here on, even if the mount is removed
            readable.append(other)
    if readable or kept is not None:
        found.search(sorted(readable, key=lambda other: len(other.missing())))
    return found if found else None
