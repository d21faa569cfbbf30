"""Limit which users may enter a mount: by default those that may enter its source.

All users of a host can reach root's mounts, and the modes of the files say what each user may read.
At the source, a directory above it may keep other users out. That directory is not part of the
tree, so the mode of the mount's root directory keeps them out instead.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from wheelmount.mount.snapshot.tree import ROOT, Tree

SOURCE, PRIVATE, PUBLIC = "source", "private", "public"

OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Permission bits of all users but the owner. Those of the group are taken away too: its number may
mean another group on a host."""


def closed(source: str | Path) -> Path | None:
    """Return the nearest directory above a source that other users may not pass; None if none."""
    for directory in Path(source).resolve().parents:
        if not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None


def limit(tree: Tree, source: str, access: str, before: Tree | None) -> None:
    """Set the mode of a tree's root so that only permitted users may enter.

    Args:
        tree: the scanned tree; its root is changed.
        source: the scanned directory.
        access: ``source`` (users that may enter the source), ``private`` (the owner) or ``public``
            (all users).
        before: the tree that the mount shows now, if any; its permission is kept.
    """
    if before is not None:
        private = _is_private(before)
    else:
        private = access == PRIVATE or (access == SOURCE and closed(source) is not None)
    mode = os.stat(source).st_mode  # noqa: PTH116 - as the scan does
    wanted = mode & ~OTHERS if private else mode
    if tree.inodes[ROOT].mode != wanted:
        tree.inodes[ROOT] = tree.inodes[ROOT]._replace(mode=wanted)
    if before is not None and tree.inodes[ROOT] == before.inodes[ROOT]:
        tree.inodes[ROOT] = before.inodes[ROOT]  # one object for equal values


def differs(tree: Tree, source: str, access: str) -> bool:
    """Return whether a mount lets in other users than it would if it were made now.

    Args:
        tree: what it shows.
        source: its directory.
        access: as of ``limit``; with ``source``, nothing is asked for.
    """
    if access == SOURCE:
        return False
    mode = os.stat(source).st_mode  # noqa: PTH116 - as the scan does
    return _is_private(tree) != (access == PRIVATE or not mode & OTHERS)


def _is_private(tree: Tree) -> bool:
    return not tree.inodes[ROOT].mode & OTHERS
