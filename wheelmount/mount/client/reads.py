"""What programs read first of a directory: remembered, and delivered first the next time.

Hosts tell which parts of files were read while bytes arrived. These come ahead of all others in the
next delivery of the directory, in the order of the reads: their files lie together in the layout,
and hosts fetch their blocks first. Without a record, or with a wrong one, a delivery takes longer
and is as right as ever. So nothing here raises an error, and nothing that a host tells is trusted:
it can name files of the tree only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgpack

from wheelmount import disk
from wheelmount.config import Settings, private_directory
from wheelmount.errors import ConfigError, StoreError
from wheelmount.mount.serve.trace import MOST, PART
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.tree import Tree

log = logging.getLogger("wheelmount")

PLACE = "reads"
"""Directory of the records in the cache."""

KEPT = 100
"""Number of records that are kept, those used last."""

LARGEST = 16 << 20
"""Bytes of a record above which it is not read; ``MOST`` paths of 800 bytes."""

MOST_BLOCKS = 4096
"""Number of blocks that are fetched first; the list goes to each host by itself."""

LEAST = 4 << 20
"""Bytes of a tree below which it has no record: it arrives at once."""

_Parts = dict[tuple[bytes, int], None]
"""Path of a file and index of a part, in the order in which they are wanted."""


class Record:
    """The parts of a directory's files that programs read first.

    Args:
        settings: whose cache keeps it.
        source: absolute path of the directory.
    """

    def __init__(self, settings: Settings, source: bytes) -> None:
        self._settings = settings
        self._source = source

    @functools.cached_property
    def _parts(self) -> _Parts:
        if (Path(self._settings.cache_dir) / PLACE).exists():
            try:
                return self._load()
            except FileNotFoundError:
                pass
            except (OSError, ConfigError, StoreError, LookupError, ValueError, TypeError) as error:
                log.debug("what is read of %r first is unknown: %s", self._source, error)
        return {}

    def _file(self) -> Path:
        place = private_directory(self._settings.own_cache() / PLACE)
        return place / sha256(self._source).hexdigest()

    def _load(self) -> _Parts:
        file = self._file()
        if file.stat().st_size > LARGEST:
            raise ValueError("it is too large")
        paths, parts = msgpack.unpackb(file.read_bytes())
        if not ({*map(type, paths)} <= {bytes} and {type(part) for _, part in parts} <= {int}):
            raise TypeError("it is no record")
        os.utime(file)
        return {(paths[place], part): None for place, part in parts}

    def pack(self, tree: Tree) -> None:
        """Number the files of a new tree so that wanted ones lie together, as they are wanted."""
        if self._parts and tree.size >= LEAST:
            found = (tree.find(path) for path, _ in self._parts)
            files = (n for n in found if n is not None and tree.inodes[n].is_file)
            tree.take_as_new(dict.fromkeys(files))

    def blocks(self, layout: Layout) -> tuple[int, ...]:
        """Return the blocks that hold the wanted parts, as they are wanted."""
        found: dict[int, None] = {}
        for path, part in self._parts:
            number = layout.tree.find(path)
            if number is not None:
                blocks = layout.covering(number, part * PART, (part + 1) * PART)
                found.update(dict.fromkeys(blocks))
        return tuple(found)[:MOST_BLOCKS]

    def add(self, tree: Tree, answers: Iterable[Any]) -> None:
        """Put what hosts have read ahead of what was known, and keep the record.

        Args:
            tree: the tree that they read.
            answers: of the agents, whose numbers of files are those of the tree.
        """
        if tree.size < LEAST:
            return
        read: _Parts = {}
        for answer in answers:
            read.update(_named(tree, answer))
        if not read:
            return
        parts = list(read | self._parts)[:MOST]
        self._parts = dict.fromkeys(parts)
        try:
            self._keep()
        except (OSError, ConfigError, StoreError) as error:
            log.debug("what was read of %r first is not kept: %s", self._source, error)

    def _keep(self) -> None:
        file = self._file()
        places = {
            path: place for place, path in enumerate(dict.fromkeys(p for p, _ in self._parts))
        }
        parts = [(places[path], part) for path, part in self._parts]
        disk.write(file, msgpack.packb((list(places), parts)), mode=0o600)
        for old in sorted(file.parent.iterdir(), key=_used)[:-KEPT]:
            old.unlink(missing_ok=True)


def _used(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _named(tree: Tree, answer: Any) -> _Parts:
    """Return the parts that a host names, by path, without those that cannot be."""
    named: _Parts = {}
    for entry in answer[:MOST] if isinstance(answer, list) else ():
        number, part = entry if isinstance(entry, list | tuple) and len(entry) == 2 else (None, 0)
        inode = tree.inodes.get(number) if type(number) is int and type(part) is int else None
        if inode is not None and inode.is_file and 0 <= part * PART < inode.size:
            named.setdefault((inode.path, part))
    return named
