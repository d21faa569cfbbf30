"""Requests from an open ``/dev/fuse``, and answers and notifications to it."""

from __future__ import annotations

import errno
import logging
import os
import select

from wheelmount.mount import fuseabi as abi
from wheelmount.mount.fuseabi import Notify

log = logging.getLogger("wheelmount")

ENDED = frozenset({errno.ENODEV, errno.ECONNABORTED})
"""What reading and writing say once the file system is unmounted, or its connection aborted."""

TRIES = 50
"""How often to look for the next request before going to sleep, about 0.1 ms: one seldom comes
alone, and waking up on another processor costs several times what answering does."""


class Wire:
    """Safe to be used by several threads, but for ``receive``.

    Args:
        fd: the open ``/dev/fuse`` of a mount; stays open.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._requests = select.poll()
        self._requests.register(fd, select.POLLIN)
        os.set_blocking(fd, False)

    def receive(self, buffer: bytearray) -> bool:
        """Wait for a request and put it into ``buffer``; False when there will be none any more."""
        tries = TRIES
        while True:
            try:
                return os.readv(self._fd, [buffer]) > 0
            except BlockingIOError:
                tries -= 1
                if tries <= 0:
                    self._requests.poll()
            except OSError as error:
                if error.errno in ENDED:
                    return False
                if error.errno != errno.ENOENT:  # it was taken back meanwhile
                    raise

    def answer(self, unique: int, *parts: bytes | memoryview, error: int = 0) -> bool:
        """Answer a request.

        Args:
            unique: which.
            parts: one after the other, the answer.
            error: 0, or the number of the error that is the answer.

        Returns:
            False if nobody waits for it any more.
        """
        length = abi.OUT_HEADER.size + sum(map(len, parts))
        try:
            os.writev(self._fd, [abi.OUT_HEADER.pack(length, -error, unique), *parts])
        except OSError as failure:
            if failure.errno not in (errno.ENOENT, *ENDED):
                raise
            return False
        return True

    def fail(self, unique: int, error: OSError) -> None:
        """Answer with an error."""
        self.answer(unique, error=error.errno or errno.EIO)

    def drop_entry(self, directory: int, name: bytes) -> None:
        """Make the kernel drop a name, whether it leads somewhere or not.

        Waits for the lock of the directory: not for threads that answer requests.

        Args:
            directory: node id.
            name: of the entry.
        """
        message = abi.INVAL_ENTRY_OUT.pack(directory, len(name), 0)
        self._notify(Notify.INVAL_ENTRY, message, name, b"\0")

    def drop_inode(self, node: int, *, pages: bool) -> None:
        """Make the kernel drop attributes, and ``pages``: of a directory, its listing.

        Waits for users of these pages.
        """
        self._notify(Notify.INVAL_INODE, abi.INVAL_INODE_OUT.pack(node, 0 if pages else -1, 0))

    def resend(self) -> None:
        """Have all requests sent again that were received and not answered."""
        try:
            self._notify(Notify.RESEND)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            log.warning("what the last server did not answer stays so: Linux is older than 6.9")

    def _notify(self, code: Notify, *parts: bytes) -> None:
        length = abi.OUT_HEADER.size + sum(map(len, parts))
        try:
            os.writev(self._fd, [abi.OUT_HEADER.pack(length, code, 0), *parts])
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, *ENDED):  # not known: fine
                raise
