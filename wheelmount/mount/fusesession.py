"""What the kernel and a FUSE server agree on, once for a mount and all processes that serve it."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

from wheelmount.mount import fuseabi as abi
from wheelmount.mount.fuseabi import Flag

log = logging.getLogger("wheelmount")

WAITING = 4096
"""Reads ahead that may wait for bytes at once; the kernel's own 12 would let them stop others."""

PAGES = 256
"""Pages of the longest read: 1 MiB."""

WANTED = (
    Flag.INIT_EXT
    | Flag.ASYNC_READ  # several reads of one file in flight; ending a reader does not wait for them
    | Flag.DO_READDIRPLUS
    | Flag.READDIRPLUS_AUTO  # attributes with the names, where they are made use of
    | Flag.PARALLEL_DIROPS  # look-ups and listings of one directory need not queue
    | Flag.MAX_PAGES
    | Flag.CACHE_SYMLINKS
    | Flag.EXPLICIT_INVAL_DATA  # an inode's bytes never change: no attribute makes them untrue
    | Flag.NO_EXPORT_SUPPORT  # what the kernel forgot cannot be found again by a file handle
)
"""Not asked for: ASYNC_DIO, with which a killed reader with O_DIRECT stays until its bytes come;
AUTO_INVAL_DATA, which compares times before each read; DIRECT_IO_ALLOW_MMAP and PASSTHROUGH, which
are for opened files; everything about writing."""

Session = dict[str, int]
"""What a process that goes on serving has to know: ``flags`` of the kernel, ``generation``."""


class Agreement:
    """What was agreed on.

    Args:
        session: what an earlier process had stored; None where there was none.
        store: told what to store, whenever it changes.
    """

    def __init__(self, session: Session | None, store: Callable[[Session], None]) -> None:
        self.session = session
        self._store = store

    def init(self, body: memoryview, generation: int) -> bytes:
        """The answer to INIT.

        Args:
            body: of the request.
            generation: see ``change``.

        Raises:
            OSError: the kernel is too old.
        """
        major, minor, ahead, flags = abi.INIT_IN.unpack_from(body)
        if major != abi.MAJOR or minor < abi.OLDEST_MINOR:
            log.error("the kernel speaks FUSE %d.%d, too old", major, minor)
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        if flags & Flag.INIT_EXT:
            flags |= abi.INIT_IN_FLAGS2.unpack_from(body)[0] << 32
        agreed = int(WANTED & flags)
        self.session = {"flags": flags}
        self.change(generation)  # who goes on after this process needs it
        return abi.INIT_OUT.pack(
            abi.MAJOR, min(minor, abi.MINOR), ahead, agreed & 0xFFFFFFFF, WAITING, WAITING,
            abi.GREATEST_WRITE, 1, PAGES, 0, agreed >> 32, 0, 0,
        )  # fmt: skip

    def change(self, generation: int) -> None:
        """Have it stored that a tree is in force, counted from 1."""
        self.session = {**(self.session or {}), "generation": generation}
        self._store(self.session)

    def offered(self, flag: Flag) -> bool:
        """Whether the kernel can do something."""
        return bool((self.session or {}).get("flags", 0) & flag)
