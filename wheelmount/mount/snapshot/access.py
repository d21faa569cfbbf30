"""Which users may enter a mount: by default those that may enter its source.

Root's mounts are for all users of a host to see, and the modes of files say what each may read. At
the source a directory above may keep others out, which is not part of the tree: so the mount's own
root does.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from wheelmount.mount.snapshot.tree import ROOT, Tree

SOURCE, PRIVATE, PUBLIC = "source", "private", "public"

OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""All but the owner. A group is not asked for: its number may mean another one on a host."""


def closed(source: str | Path) -> Path | None:
    """The directory above a source by which others may not pass; None if they may come there."""
    for directory in Path(source).resolve().parents:
        if not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None


def limit(tree: Tree, source: str, access: str, before: Tree | None) -> None:
    """Set the mode of a tree's root so that only permitted users may enter.

    Args:
        tree: as it was scanned.
        source: its directory.
        access: which users may enter: ``source``, ``private`` (the owner) or ``public`` (all).
        before: the tree that is shown, if any: its permission stays.
    """
    if before is not None:
        private = not before.inodes[ROOT].mode & OTHERS
    else:
        private = access == PRIVATE or (access == SOURCE and closed(source) is not None)
    mode = os.stat(source).st_mode  # noqa: PTH116 - as the scan does
    wanted = mode & ~OTHERS if private else mode
    if tree.inodes[ROOT].mode != wanted:
        tree.inodes[ROOT] = tree.inodes[ROOT]._replace(mode=wanted)
    if before is not None and tree.inodes[ROOT] == before.inodes[ROOT]:
        tree.inodes[ROOT] = before.inodes[ROOT]  # one object for equal values
