"""Bytes that a host has already, in other mounts of the same user.

Which files of those may be the same is guessed from their names and sizes. Whether they are is told
by the client's hash of the block that is made of them: a guess that was wrong costs some reading,
and the block travels as any other.
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
"""Bytes; fewer have arrived sooner than they are found."""


class LocalCopies:
    """Finds blocks of a layout among the files of other stores.

    A file is looked for by its size and, in this order, by its path, the last two parts of that,
    and its name alone.

    Args:
        layout: whose blocks.
        stores: where to look; those that go away, or on to another generation, are of no use any
            more, which does no harm.
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
        """Whether anything may be found."""
        return bool(self._places)

    def covers(self, block: int) -> bool:
        """Whether there may be a file for every piece of a block."""
        return all(extent.inode in self._places for extent in self._layout.extents(block))

    def read(self, block: int, view: memoryview) -> bool:
        """Read what may be a block that is covered; False if some of it is not there."""
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
    """What a file is looked for by; hashes of it, which take less memory."""
    parts = path.rsplit(b"/", 2)
    return hash((size, path)), hash((size, *parts[-2:])), hash((size, parts[-1]))


def find(settings: Settings, own: Path, store: Store) -> LocalCopies | None:
    """Look for the files of a store that is to be filled.

    Takes about a second for 100,000 files in other mounts.

    Args:
        settings: say where mounts lie.
        own: directory of the mount. What belongs to the same mount on other hosts is left out:
            those may share a machine, and are hosts of their own all the same.
        store: of that mount.

    Returns:
        None if there is nothing to be found.
    """
    if store.layout.size < LEAST:
        return None
    others = []
    for directory in processes.find(settings):
        if directory == own or processes.identity(directory) != processes.identity(own):
            # Being made or going, of another version, in a namespace that is not this one: whatever
            # is wrong with another mount, this one does without.
            with contextlib.suppress(Exception):
                other = Store.open(Path(Task.read(directory).store))
                if (other.directory, other.generation) != (store.directory, store.generation):
                    other.missing()  # what is whole need not be asked for each block
                    _ = other.tree  # stays readable from here on, whatever becomes of the mount
                    others.append(other)
    if not others:
        return None
    others.sort(key=lambda other: len(other.missing()))
    found = LocalCopies(store.layout, others)
    return found if found else None
