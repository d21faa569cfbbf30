"""Reuse of bytes that a host has in other mounts of the same user.

Names and sizes suggest which files may be equal. The client's hash of a block decides whether
the files make that block: a wrong guess costs some reading,
and the block is sent like any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.store.store import Store

LEAST = 64 << 10
"""Bytes of a tree below which sending is faster than searching."""


class LocalCopies:
    """Finds blocks of a layout among the files of other stores.

    A file is searched by its size and, in this order, by its path, the last two parts of it,
    or its name alone.

    Args:
        layout: whose blocks are wanted.
        stores: where to search. A store that is deleted or refreshed meanwhile does no harm: its
            files are not found any more.
    """

    def __init__(self, layout: Layout, stores: Sequence[Store]) -> None:
        self._layout = layout
        self._places: dict[int, tuple[Store, int]] = {}
        inodes = layout.tree.inodes
        fresh = {n: _keys(inodes[n].path, inodes[n].size) for n in layout.fresh if inodes[n].size}
        wanted = {key for keys in fresh.values() for key in keys}
        found: dict[int, tuple[Store, int]] = {}
        for store in stores:
            for number, inode in store.tree.inodes.items():
                if inode.is_file:
                    for key in _keys(inode.path, inode.size):
                        if key in wanted:
                            found.setdefault(key, (store, number))
        for number, keys in fresh.items():
            place = next((found[key] for key in keys if key in found), None)
            if place is not None:
                self._places[number] = place

    def __bool__(self) -> bool:
        """Whether any block may be found."""
        return bool(self._places)

    def covers(self, block: int) -> bool:
        """Return whether there is a candidate for every piece of a block."""
        return all(extent.inode in self._places for extent in self._layout.extents(block))

    def read(self, block: int, view: memoryview) -> bool:
        """Read the candidate for a covered block; return False if a piece is missing."""
        for extent in self._layout.extents(block):
            store, number = self._places[extent.inode]
            begin, end = extent.file_offset, extent.file_offset + extent.length
            try:
                if store.absent(number, begin, end) is not None:
                    return False
                store.read_into(extent._replace(inode=number), view)
            except (OSError, KeyError):
                return False
        return True


def _keys(path: bytes, size: int) -> tuple[int, int, int]:
    """Return the keys that a file is searched by; hashes, which take less memory than names."""
    parts = path.rsplit(b"/", 2)
    return hash((size, path)), hash((size, *parts[-2:])), hash((size, parts[-1]))


def find(settings: Settings, own: Path, store: Store) -> LocalCopies | None:
    """Search other mounts for the files of a store that is to be filled.

    Takes about a second for 100,000 files in other mounts.

    Args:
        settings: which directories mounts are in.
        own: directory of the mount. The same mount on other hosts is left out:
            hosts may share a machine, and still count as separate.
        store: the store of that mount.

    Returns:
        None if no file may be found.
    """
    if store.layout.size < LEAST:
        return None
    others = []
    for directory in processes.find(settings):
        if directory == own or processes.identity(directory) != processes.identity(own):
            # Just being made or removed, of another version, in another namespace: whatever
            # is wrong with another mount, this one does without.
            with contextlib.suppress(Exception):
                other = Store.open(Path(Task.read(directory).store))
                if (other.directory, other.generation) != (store.directory, store.generation):
                    other.missing()  # a complete store need not be asked for each block
                    _ = other.tree  # stays readable from here on, even if the mount is removed
                    others.append(other)
    if not others:
        return None
    others.sort(key=lambda other: len(other.missing()))
    found = LocalCopies(store.layout, others)
    return found if found else None
