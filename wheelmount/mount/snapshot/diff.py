"""Compare two trees of a directory: find the files that are unchanged.

A scan keeps the number of a file with the same stamp at the same path. A file that is new there may
have been renamed: it is recognized by device and inode number. If its size and both times are
equal, the file is unchanged. If only its ctime differs (a rename, a chmod, or an edit with the
mtime put back), or another file of the same size and mtime took its path, its bytes must be
compared with the old bytes, which only hosts have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter

from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.tree import Inode, Tree

_SHOWN = attrgetter(*(name for name in Inode._fields if name != "path"))
"""Attributes of a file that a mount shows: all but the path at the source."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A file that may have the same bytes as a file of the old tree.

    Attributes:
        number: its number in the new tree, before ``Succession.settle``.
        earlier: number of the other file in the old tree.
    """

    number: int
    earlier: int


class Succession:
    """The comparison of a tree with its successor.

    Args:
        old: the tree that hosts have.
        new: the tree that was just scanned, with ``old`` given as ``before``; changed by
            ``settle``.
        lost: numbers of files in ``old`` whose bytes hosts do not have.
    """

    def __init__(self, old: Tree, new: Tree, lost: Collection[int] = ()) -> None:
        self._old, self._new = old, new
        self._moved: dict[int, int] = {}  # number in the new tree -> number in the old tree
        self._fresh: list[int] = []
        self.doubts: list[Doubt] = []
        """Files whose bytes must be compared."""
        gone = [
            number
            for number in old.inodes.keys() - new.inodes.keys()
            if old.inodes[number].is_file and number not in lost
        ]
        keys = {(old.stamps[n].device, old.stamps[n].inode): n for n in gone}
        paths = {old.inodes[n].path: n for n in gone}
        for number in sorted(new.inodes.keys() - old.inodes.keys()):
            inode, stamp = new.inodes[number], new.stamps[number]
            if not inode.is_file:
                continue
            earlier = keys.get((stamp.device, stamp.inode), paths.get(inode.path))
            if earlier is None:
                self._fresh.append(number)
            elif stamp == old.stamps[earlier] and self._alike(number, earlier):
                self._moved[number] = earlier
            elif self._may_be(inode, old.inodes[earlier]):
                self.doubts.append(Doubt(number, earlier))
            else:
                self._fresh.append(number)

    def _alike(self, number: int, earlier: int) -> bool:
        """Return whether two files are equal in all attributes that a mount shows."""
        return bool(_SHOWN(self._new.inodes[number]) == _SHOWN(self._old.inodes[earlier]))

    @staticmethod
    def _may_be(inode: Inode, old: Inode) -> bool:
        return (inode.size, inode.mtime_ns, inode.pieces) == (old.size, old.mtime_ns, old.pieces)

    def __bool__(self) -> bool:
        """Return whether the trees differ in any inode or name."""
        old, new = self._old, self._new
        return (
            old.inodes.keys() != new.inodes.keys()
            or any(inode is not old.inodes[n] for n, inode in new.inodes.items())
            or any(names is not old.names[n] for n, names in new.names.items())
        )

    def path(self, doubt: Doubt) -> bytes:
        """Return the path of the file, relative to the source."""
        return self._new.inodes[doubt.number].path

    def settle(self, same: Iterable[Doubt], block_size: int) -> Layout:
        """Give unchanged files their old numbers, and lay out the others for delivery. Call once.

        Args:
            same: the members of ``doubts`` whose bytes were found equal.
            block_size: bytes of a block.

        Returns:
            The new tree, with the blocks of the files that hosts lack.
        """
        moved, copies = dict(self._moved), {}
        taken = set(moved.values())
        fresh = {doubt.number for doubt in self.doubts}.union(self._fresh)
        for doubt in same:
            if doubt.earlier not in taken and self._alike(doubt.number, doubt.earlier):
                moved[doubt.number] = doubt.earlier
                taken.add(doubt.earlier)
            elif self._new.inodes[doubt.number].pieces is None:
                copies[doubt.number] = doubt.earlier
            else:
                continue
            fresh.discard(doubt.number)
        self._new.renumber(moved)
        return Layout(self._new, block_size, fresh, copies)
