"""Compare two trees of a directory: which files are unchanged.

A scan keeps what has the same stamp at the same path. What it does not know may have been
elsewhere: a file is known again by device and inode number. If size and both times are the same,
it is the same; if only its ctime differs (a rename, a chmod, or an edit whose mtime was put back),
or another file of the same size and mtime stands at its path, only its bytes can tell, and whoever
has the old ones must be asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter

from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.tree import Inode, Tree

_SHOWN = attrgetter(*(name for name in Inode._fields if name != "path"))
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
        new: as it was scanned just now, with ``old`` before it. ``settle`` changes it.
        lost: numbers of files in ``old`` whose bytes hosts do not have.
    """

    def __init__(self, old: Tree, new: Tree, lost: Collection[int] = ()) -> None:
        self._old, self._new = old, new
        self._moved: dict[int, int] = {}  # number in the new tree -> in the old
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
        """Whether two files differ in nothing that is shown."""
        return bool(_SHOWN(self._new.inodes[number]) == _SHOWN(self._old.inodes[earlier]))

    @staticmethod
    def _may_be(inode: Inode, old: Inode) -> bool:
        return (inode.size, inode.mtime_ns, inode.pieces) == (old.size, old.mtime_ns, old.pieces)

    def __bool__(self) -> bool:
        """Whether anything at all has changed."""
        old, new = self._old, self._new
        return (
            old.inodes.keys() != new.inodes.keys()
            or any(inode is not old.inodes[n] for n, inode in new.inodes.items())
            or any(names is not old.names[n] for n, names in new.names.items())
        )

    def path(self, doubt: Doubt) -> bytes:
        """Where the file is, below the source."""
        return self._new.inodes[doubt.number].path

    def settle(self, same: Iterable[Doubt], block_size: int) -> Layout:
        """Number the new tree; to be called once.

        Args:
            same: those of ``doubts`` that turned out to have the same bytes.
            block_size: see ``Layout``.

        Returns:
            The new tree, with the bytes that hosts do not have.
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
