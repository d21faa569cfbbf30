"""Reads requests from an open ``/dev/fuse``, writes answers and notifications to it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from wheelmount.mount.serve.fuse import abi
from wheelmount.mount.serve.fuse.abi import Flag, Notify

log = logging.getLogger("wheelmount")

ENDED = frozenset({errno.ENODEV, errno.ECONNABORTED})
"""Errors of reads and writes after the file system is unmounted, or its connection aborted."""

TRIES = 50
"""Polls for the next request before going to sleep, about 0.1 ms: requests seldom come
alone, and waking up on another processor costs several times more than an answer."""


class Wire:
    """The open ``/dev/fuse`` of a mount. Thread-safe, except for ``receive``.

    Args:
        fd: the open ``/dev/fuse`` of a mount; stays open.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._requests = select.poll()
        self._requests.register(fd, select.POLLIN)
        os.set_blocking(fd, False)

    def receive(self, buffer: bytearray) -> bool:
        """Wait for a request and write it to ``buffer``; return False if the mount has ended."""
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
                if error.errno != errno.ENOENT:  # it was withdrawn meanwhile
                    raise

    def connected(self) -> bool:
        """Return whether the kernel still has the file system."""
        state = select.poll()
        state.register(self._fd, 0)
        return not state.poll(0)

    def answer(self, unique: int, *parts: bytes | memoryview, error: int = 0) -> bool:
        """Answer a request.

        Args:
            unique: the request's id.
            parts: the answer, in parts.
            error: 0, or the error number to answer with.

        Returns:
            False if no process waits for it any more.
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
        """Make the kernel drop a name, existing or cached as missing.

        Waits for the lock of the directory, so it must not run on threads that answer requests.

        Args:
            directory: node id.
            name: of the entry.
        """
        message = abi.INVAL_ENTRY_OUT.pack(directory, len(name), 0)
        self._notify(Notify.INVAL_ENTRY, message, name, b"\0")

    def drop_inode(self, node: int, *, pages: bool) -> None:
        """Make the kernel drop attributes and, with ``pages``, bytes or the listing of a directory.

        Waits for users of these pages.
        """
        self._notify(Notify.INVAL_INODE, abi.INVAL_INODE_OUT.pack(node, 0 if pages else -1, 0))

    def resend(self) -> None:
        """Have the kernel send all unanswered requests again."""
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
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, *ENDED):  # already unknown: fine
                raise


Task = Callable[..., Awaitable[object]]
"""Answers a request, whose ``unique`` is its first argument."""


class Pending:
    """Requests that tasks answer. Make it in trio's thread; call ``start`` and ``end`` in any.

    Args:
        wire: where an error is sent if a task fails.
        nursery: runs the tasks.
    """

    def __init__(self, wire: Wire, nursery: trio.Nursery) -> None:
        self._wire = wire
        self._nursery = nursery
        self._token = trio.lowlevel.current_trio_token()
        self._waiting: dict[int, trio.CancelScope] = {}

    def start(self, task: Task, unique: int, *arguments: Any) -> None:
        """Start a task that answers a request."""
        self._soon(self._start, task, unique, *arguments)

    def end(self, unique: int) -> None:
        """Answer a waiting request with EINTR: its process does not wait for it any more."""
        # In the order of arrival: a read that this interrupts is among those that wait by then.
        self._soon(self._end, unique)

    def _soon(self, function: Callable[..., object], *arguments: Any) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function, *arguments)

    def _start(self, task: Task, unique: int, *arguments: Any) -> None:
        scope = self._waiting[unique] = trio.CancelScope()
        self._nursery.start_soon(self._run, scope, task, unique, *arguments)

    def _end(self, unique: int) -> None:
        if unique in self._waiting:
            self._waiting[unique].cancel()

    async def _run(self, scope: trio.CancelScope, task: Task, unique: int, *arguments: Any) -> None:
        try:
            with scope:
                await task(unique, *arguments)
        except OSError as error:
            self._wire.fail(unique, error)
        except Exception:
            log.exception("cannot answer what waited")
            self._wire.answer(unique, error=errno.EIO)
        finally:
            del self._waiting[unique]
        if scope.cancelled_caught:
            self._wire.answer(unique, error=errno.EINTR)


WAITING = 4096
"""Reads ahead that may wait for bytes at once; with the kernel's own 12 they stop other reads."""

PAGES = 256
"""Pages of the longest read: 1 MiB."""

WANTED = (
    Flag.INIT_EXT
    | Flag.ASYNC_READ  # several reads of one file at once; ending a reader does not wait for them
    | Flag.DO_READDIRPLUS
    | Flag.READDIRPLUS_AUTO  # attributes with the names, where they are used
    | Flag.PARALLEL_DIROPS  # look-ups and listings of one directory need not queue
    | Flag.MAX_PAGES
    | Flag.CACHE_SYMLINKS
    | Flag.EXPLICIT_INVAL_DATA  # an inode's bytes never change, whatever its attributes
    | Flag.NO_EXPORT_SUPPORT  # a forgotten inode cannot be found again by a file handle
)
"""Not asked for: ASYNC_DIO, with which a killed reader with O_DIRECT stays until its bytes come;
AUTO_INVAL_DATA, which compares times before each read; DIRECT_IO_ALLOW_MMAP and PASSTHROUGH, which
are for opened files; everything about writing."""

Session = dict[str, int]
"""State for a server that takes over: the kernel's ``flags``, ``generation``."""


class Agreement:
    """The result of INIT: features that the kernel and the server both support.

    Args:
        session: the state that an earlier server stored; None if there was none.
        store: called with the state to store, whenever it changes.
    """

    def __init__(self, session: Session | None, store: Callable[[Session], None]) -> None:
        self.session = session
        self._store = store

    def init(self, body: memoryview, generation: int) -> bytes:
        """Make the answer to INIT.

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
        self.change(generation)  # a server that takes over needs it
        return abi.INIT_OUT.pack(
            abi.MAJOR, min(minor, abi.MINOR), ahead, agreed & 0xFFFFFFFF, WAITING, WAITING,
            abi.GREATEST_WRITE, 1, PAGES, 0, agreed >> 32, 0, 0,
        )  # fmt: skip

    def change(self, generation: int) -> None:
        """Store which generation is current, counted from 1."""
        self.session = {**(self.session or {}), "generation": generation}
        self._store(self.session)

    def offered(self, flag: Flag) -> bool:
        """Return whether the kernel supports a feature."""
        return bool((self.session or {}).get("flags", 0) & flag)
