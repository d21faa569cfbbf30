"""The tree of a mount: a snapshot of a directory's names and attributes, without its bytes.

This is the one definition of what a mount shows. It knows nothing of FUSE, of hosts or of where
bytes lie; a path is bytes, as the kernel has it, so names need not be UTF-8.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from wheelmount.errors import SourceError

ROOT = 0
"""Number of the root directory; inodes are numbered by their place in ``Tree.inodes``."""


@dataclass(frozen=True, slots=True)
class Inode:
    """Attributes of one file, directory or symlink.

    Attributes:
        mode: type and permission bits, as in ``st_mode``.
        size: bytes of a file, length of a symlink's target, 0 for a directory.
        mtime_ns: time of the last change, nanoseconds since the epoch.
        nlink: names it has inside the tree (for a directory: 2 and one a subdirectory).
        path: of a file, its first path below the source; of a symlink, its target.
    """

    mode: int
    size: int
    mtime_ns: int
    nlink: int = 1
    path: bytes = b""

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)


@dataclass(slots=True)
class Tree:
    """Inodes, and the names that lead to them.

    Attributes:
        inodes: all of them; the first is the root.
        names: for every directory's number, its entries: name to inode number, sorted by name.
        keys: device and inode number at the source, by inode; stays on the client.
        skipped: paths that are not shown (sockets, pipes, devices), for the user to know.
    """

    inodes: list[Inode] = field(default_factory=list)
    names: dict[int, dict[bytes, int]] = field(default_factory=dict)
    keys: list[tuple[int, int]] = field(default_factory=list)
    skipped: list[bytes] = field(default_factory=list)

    @property
    def files(self) -> int:
        """Number of regular files (hardlinked names counted once)."""
        return sum(inode.is_file for inode in self.inodes)

    @property
    def size(self) -> int:
        """Bytes of all regular files together."""
        return sum(inode.size for inode in self.inodes if inode.is_file)


def scan(source: bytes) -> Tree:
    """Take the snapshot of ``source``.

    Symlinks are kept, not followed; names of one inode stay hardlinks; directories of other file
    systems mounted below are descended into, as ``cp -r`` does.

    Raises:
        SourceError: it is missing, not a directory, or part of it cannot be read.
    """
    try:
        status = os.stat(source)
        if not stat.S_ISDIR(status.st_mode):
            raise SourceError(
                f"{os.fsdecode(source)} is not a directory",
                hint="mount a directory; a single file can be put into one",
            )
    except FileNotFoundError:
        raise SourceError(
            f"there is no directory {os.fsdecode(source)}", hint="check the path"
        ) from None
    except OSError as error:
        raise _unreadable(error) from None
    tree = Tree()
    links: dict[tuple[int, int], int] = {}  # (device, inode) -> number, for names beyond the first
    tree.inodes.append(Inode(status.st_mode, 0, status.st_mtime_ns, 2))
    tree.keys.append((status.st_dev, status.st_ino))
    pending = [(ROOT, b"")]
    while pending:
        number, path = pending.pop()
        names: dict[bytes, int] = {}
        below: list[tuple[int, bytes]] = []
        try:
            with os.scandir(os.path.join(source, path)) as entries:
                found = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
        except OSError as error:
            raise _unreadable(error) from None
        for name, status in found:
            child = os.path.join(path, name)
            inode = _inode(source, child, status)
            if inode is None:
                tree.skipped.append(child)
                continue
            key = (status.st_dev, status.st_ino)
            known = links.get(key) if status.st_nlink > 1 and not inode.is_directory else None
            if known is not None:
                first = tree.inodes[known]
                tree.inodes[known] = Inode(
                    first.mode, first.size, first.mtime_ns, first.nlink + 1, first.path
                )
                names[name] = known
                continue
            names[name] = links[key] = len(tree.inodes)
            tree.inodes.append(inode)
            tree.keys.append(key)
            if inode.is_directory:
                below.append((names[name], child))
        tree.names[number] = names
        directory = tree.inodes[number]
        tree.inodes[number] = Inode(directory.mode, 0, directory.mtime_ns, 2 + len(below))
        pending.extend(reversed(below))
    return tree


def _inode(source: bytes, path: bytes, status: os.stat_result) -> Inode | None:
    if stat.S_ISREG(status.st_mode):
        return Inode(status.st_mode, status.st_size, status.st_mtime_ns, 1, path)
    if stat.S_ISDIR(status.st_mode):
        return Inode(status.st_mode, 0, status.st_mtime_ns, 2)
    if stat.S_ISLNK(status.st_mode):
        try:
            target = os.readlink(os.path.join(source, path))
        except OSError as error:
            raise _unreadable(error) from None
        return Inode(status.st_mode, len(target), status.st_mtime_ns, 1, target)
    return None


def _unreadable(error: OSError) -> SourceError:
    name = os.fsdecode(error.filename) if error.filename else "the source"
    return SourceError(
        f"cannot read {name}: {error.strerror}",
        hint="mount a directory that you may read in full and that holds still meanwhile",
    )
