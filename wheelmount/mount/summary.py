"""What there is to say about a generation of a store without its tree."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from wheelmount.mount.layout import Layout
from wheelmount.mount.tree import Inode

PAGE = mmap.PAGESIZE
"""What tmpfs gives memory by, bytes."""


def pages(size: int) -> int:
    """Bytes of the pages that so many bytes lie in."""
    return -(-size // PAGE) * PAGE


def holes(inode: Inode) -> int:
    """Bytes of the pages that a file has no bytes in (up to a page too many for each piece)."""
    return pages(inode.size) - inode.held if inode.pieces is not None else 0


@dataclass(frozen=True, slots=True)
class Summary:
    """What there is to say about a generation without its tree.

    Attributes:
        files: number of its files.
        inodes: number of files, directories and symlinks.
        size: bytes of the files, holes not counted.
        room: bytes of them in whole pages, holes included.
        blocks: number of the blocks that travelled for it.
        predecessor: number of the generation that it was made from; 0 for none.
        follows: bytes at the beginning of its description that are those of the one before.
        whole: bytes of the last description of a whole tree in it.
        holes: bytes of the files' holes, in whole pages: part of ``room``.
    """

    files: int
    inodes: int
    size: int
    room: int
    blocks: int
    predecessor: int
    follows: int
    whole: int
    holes: int

    @classmethod
    def of(cls, layout: Layout, predecessor: int, follows: int, whole: int) -> Summary:
        """Sum up a layout; the other arguments are attributes."""
        inodes = layout.tree.inodes.values()
        files = [inode for inode in inodes if inode.is_file]
        return cls(
            len(files),
            len(inodes),
            sum(inode.held for inode in files),
            sum(pages(inode.size) for inode in files),
            layout.blocks,
            predecessor,
            follows,
            whole,
            sum(map(holes, files)),
        )
