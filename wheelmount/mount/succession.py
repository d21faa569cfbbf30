"""From one tree to the next: what of a directory is still what it was.

A file is known again by device and inode number, also under another name. If size and both times
are the same, it is the same; if only its ctime differs (a rename, a chmod, or an edit whose mtime
was put back), or another file of the same size and mtime stands at its path, only its bytes can
tell, and whoever has the old ones must be asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from operator import attrgetter

from wheelmount.mount.layout import Layout
from wheelmount.mount.tree import ROOT, Inode, Tree, many_objects

_SHOWN = attrgetter(*(field.name for field in fields(Inode) if field.name != "path"))
"""What of a file is shown in a mount: all but where it lies at the source."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A file that may have the bytes of an earlier one.

    Attributes:
        number: in the new tree, as it was scanned.
        earlier: number in the old tree.
    """

    number: int
    earlier: int


class Succession:
    """Compares a tree with its successor.

    Args:
        old: the tree that hosts have.
        new: as it was scanned just now, with numbers of its own.
        lost: numbers of files in ``old`` whose bytes hosts do not have.
    """

    @many_objects()
    def __init__(self, old: Tree, new: Tree, lost: Collection[int] = ()) -> None:
        self._old, self._new = old, new
        self._kept: dict[int, int] = {ROOT: ROOT}  # number in the new tree -> in the old
        self.doubts: list[Doubt] = []
        """Files whose bytes must be compared."""
        keys = {
            (stamp.device, stamp.inode): number
            for number, stamp in old.stamps.items()
            if old.inodes[number].is_file and number not in lost
        }
        paths = {path: number for path, number in old.walk() if number not in lost}
        for path, number in new.walk():
            if number in self._kept:
                continue
            inode, earlier = new.inodes[number], paths.get(path)
            if earlier is not None and inode is old.inodes[earlier]:
                self._kept[number] = earlier  # the scan saw that already
            elif inode.is_file:
                stamp = new.stamps[number]
                earlier = keys.get((stamp.device, stamp.inode), earlier)
                if earlier is None or not old.inodes[earlier].is_file:
                    continue
                if stamp == old.stamps[earlier] and self._alike(number, earlier):
                    self._kept[number] = earlier
                elif self._may_be(inode, old.inodes[earlier]):
                    self.doubts.append(Doubt(number, earlier))
            elif earlier is not None and (
                (inode.is_directory and old.inodes[earlier].is_directory)
                or inode == old.inodes[earlier]
            ):
                self._kept[number] = earlier

    def _alike(self, number: int, earlier: int) -> bool:
        """Whether two files differ in nothing that is shown."""
        return bool(_SHOWN(self._new.inodes[number]) == _SHOWN(self._old.inodes[earlier]))

    @staticmethod
    def _may_be(inode: Inode, old: Inode) -> bool:
        return (inode.size, inode.mtime_ns, inode.pieces) == (old.size, old.mtime_ns, old.pieces)

    def path(self, doubt: Doubt) -> bytes:
        """Where the file is, below the source."""
        return self._new.inodes[doubt.number].path

    @many_objects()
    def settle(self, same: Iterable[Doubt], block_size: int) -> Layout:
        """Number the new tree.

        Args:
            same: those of ``doubts`` that turned out to have the same bytes.
            block_size: see ``Layout``.

        Returns:
            The new tree, with the bytes that hosts do not have.
        """
        kept = dict(self._kept)
        taken = set(kept.values())
        copies: dict[int, int] = {}
        for doubt in same:
            if doubt.earlier not in taken and self._alike(doubt.number, doubt.earlier):
                kept[doubt.number] = doubt.earlier
                taken.add(doubt.earlier)
            elif self._new.inodes[doubt.number].pieces is None:
                copies[doubt.number] = doubt.earlier
        limit = self._old.limit
        number_of: dict[int, int] = {}
        for number in self._new.inodes:
            number_of[number] = kept.get(number, limit)
            limit += number not in kept
        tree = Tree(
            {number_of[n]: inode for n, inode in self._new.inodes.items()},
            {
                number_of[directory]: {name: number_of[n] for name, n in names.items()}
                for directory, names in self._new.names.items()
            },
            {number_of[n]: stamp for n, stamp in self._new.stamps.items()},
            self._new.skipped,
        )
        fresh = [number_of[n] for n in self._new.inodes if n not in kept and n not in copies]
        return Layout(
            tree, block_size, fresh, {number_of[n]: earlier for n, earlier in copies.items()}
        )

    def same_tree(self) -> bool:
        """Whether nothing at all has changed."""
        old, new = self._old, self._new
        if self.doubts or len(self._kept) != len(new.inodes) or len(old.inodes) != len(new.inodes):
            return False
        return all(
            new.inodes[n] == old.inodes[earlier]
            for n, earlier in self._kept.items()
            if new.inodes[n].is_directory
        ) and all(
            {name: self._kept[n] for name, n in names.items()} == old.names[self._kept[directory]]
            for directory, names in new.names.items()
        )
