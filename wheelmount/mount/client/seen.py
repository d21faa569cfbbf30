"""What a mount shows, and what its directory holds now, without any of its hosts.

A standing mount of this machine has its description in its store, where a process of the same user
reads it. Where nothing has changed, a refresh then needs no host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.errors import MountError, TransferError
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task
from wheelmount.mount.snapshot import access
from wheelmount.mount.snapshot.diff import Succession
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan, stamp_of
from wheelmount.mount.snapshot.tree import Tree
from wheelmount.progress import Progress, number_of

log = logging.getLogger("wheelmount")


@dataclass(frozen=True, slots=True)
class Seen:
    """What all hosts of a mount showed at one moment, and the directory after it.

    Attributes:
        shown: the layout that hosts showed, with all bytes of all its files.
        tree: the directory's tree, scanned with the tree of ``shown`` as ``before``.
        generations: number of the generation that had this layout, of each host.
    """

    shown: Layout
    tree: Tree
    generations: tuple[int, ...]

    @property
    def changed(self) -> bool:
        """Whether the directory differs from what hosts showed."""
        return bool(Succession(self.shown.tree, self.tree))

    def holds(self, source: str) -> bool:
        """Return whether the files that differ from what hosts showed are still as scanned.

        Args:
            source: the directory.
        """
        folder, tree = os.fsencode(source) + b"/", self.tree
        for number in tree.inodes.keys() - self.shown.tree.inodes.keys():
            inode, stamp = tree.inodes[number], tree.stamps[number]
            if inode.is_file:
                try:
                    status = os.lstat(folder + inode.path)
                except OSError:
                    return False
                if stamp_of(status) != stamp or status.st_size != inode.size:
                    return False
        return True


def look(directories: Sequence[Path], settings: Settings, progress: Progress) -> Seen | None:
    """Compare a standing mount with its directory.

    Args:
        directories: private directories of the mount, one for each host, all on this machine.
        settings: in force.
        progress: told about the scan.

    Returns:
        None if a host has to be asked: one does not answer, lacks bytes or files, or shows
        another tree than the others.

    Raises:
        SourceError: the directory cannot be read.
    """
    try:
        shown, generations = _shown(directories)
        source = Task.read(directories[0]).source
    except (OSError, ValueError, MountError, TransferError) as error:
        log.debug("hosts are asked what they show: %s", error)
        return None
    if shown is None:
        return None
    return Seen(shown, read(source, settings, progress, shown.tree), generations)


def _shown(directories: Sequence[Path]) -> tuple[Layout | None, tuple[int, ...]]:
    """Return the layout that all hosts show in full, None if they do not; and its generations."""
    descriptions, generations = set(), []
    for directory in directories:
        status = processes.status(directory)
        if status["changed"] or not status["finished"]:
            return None, ()
        # The store may be mounted where only the serving process sees it.
        store = Path(f"/proc/{status['pid']}/root{Task.read(directory).store}")
        descriptions.add((store / f"{status['generation']}.tree").read_bytes())
        generations.append(status["generation"])
    shown = Layout.decode(descriptions.pop()) if len(descriptions) == 1 else None
    return shown, tuple(generations)


def read(
    source: str,
    settings: Settings,
    progress: Progress,
    before: Tree | None = None,
    to_send: Set[int] = frozenset(),
) -> Tree:
    """Read the tree of a directory; warn of what a mount cannot show.

    Args:
        source: the directory.
        settings: in force.
        progress: told about the scan.
        before: the tree that hosts show, whose numbers unchanged files keep.
        to_send: numbers of files in it that are to be sent even if they did not change.

    Raises:
        SourceError: the directory cannot be read.
    """
    with progress.task("scan", unit="file") as task:
        tree = scan(os.fsencode(source), before, to_send)
        access.limit(tree, source, settings.access, before)
        task.advance(tree.files)
        task.note(f"{number_of(tree.files, 'file')}, {tree.size >> 20} MiB")
    for path in tree.skipped:
        log.warning("not mounted, a socket, pipe or device: %s", os.fsdecode(path))
    return tree
