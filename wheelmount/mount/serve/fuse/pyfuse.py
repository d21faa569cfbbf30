"""Serves the tree through pyfuse3; only translates requests."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyfuse3
import trio

from wheelmount.mount.serve.adapters import FOREVER, Wait
from wheelmount.mount.serve.fuse.references import References
from wheelmount.mount.serve.vfs import Change, Vfs
from wheelmount.mount.snapshot.encoded import PAGE

TASKS = 1024
"""Requests that may wait for bytes at once; with pyfuse3's own 99, waiting reads stop others.
"""


class FuseOperations(pyfuse3.Operations):  # type: ignore[misc]
    """Answers the kernel's requests. FUSE numbers the root 1, the tree 0.

    Args:
        vfs: the tree that is shown.
        wait: called for a read whose bytes are missing.
        owner: user and group of all files.
        forgotten: called with the number of an inode that the kernel has forgotten.
    """

    name = "pyfuse3"
    enable_writeback_cache = False

    def __init__(
        self, vfs: Vfs, wait: Wait, owner: tuple[int, int], forgotten: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._vfs = vfs
        self._wait = wait
        self._owner = owner
        self._references = References(forgotten)
        self._timeout: float = FOREVER
        self._listings: dict[int, _Listing] = {}  # by handle
        self._handle = self._changes = 0

    async def serve(self) -> None:
        """Serve until the mount is unmounted."""
        await pyfuse3.main(max_tasks=TASKS)

    def end(self) -> None:
        """End ``serve`` although the mount is in use."""
        pyfuse3.terminate()

    def mounted(self) -> bool:
        """Return False. Only a mount that a bind mount replaced is asked for; this never is one."""
        return False

    def knows(self, number: int) -> bool:
        """Return whether the kernel holds an inode."""
        return self._references.of(number) > 0

    def drop(self, number: int) -> None:
        """Have the kernel forget a file's bytes."""
        with contextlib.suppress(OSError):  # the kernel does not know it
            pyfuse3.invalidate_inode(number + pyfuse3.ROOT_INODE)

    def drop_names(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Have the kernel forget names, as ``Adapter`` says."""
        _drop_names(entries)

    async def refresh(self, change: Change, flip: Callable[[], None]) -> None:
        """Change to a new tree at one moment for all readers, as ``Adapter`` says.

        From the first call on the kernel may not cache answers. When it has dropped
        all names and attributes that change, every reader requests them again, so that the
        moment of ``flip`` is the same for all.
        """
        self._timeout = 0
        try:
            await trio.to_thread.run_sync(_invalidate, change)
            flip()
            self._changes += 1
        finally:
            self._timeout = FOREVER
        # Answers given meanwhile were cached for no time.
        await trio.to_thread.run_sync(_invalidate, change)

    def _attributes(self, number: int, *, keep: bool = True) -> pyfuse3.EntryAttributes:
        inode = self._vfs.inode(number)
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = number + pyfuse3.ROOT_INODE
        entry.st_mode = inode.mode
        entry.st_nlink = inode.nlink
        entry.st_uid, entry.st_gid = self._owner
        entry.st_size = inode.size
        entry.st_blksize = PAGE
        entry.st_blocks = -(-inode.held // 512)
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = inode.mtime_ns
        entry.entry_timeout = entry.attr_timeout = self._timeout if keep else 0
        return entry

    async def lookup(
        self, parent: int, name: bytes, _context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with _errors():
            number = self._vfs.lookup(parent - pyfuse3.ROOT_INODE, name)
            if number is not None:
                self._references.add(number)
                return self._attributes(number)
        absent = pyfuse3.EntryAttributes()  # inode 0: the kernel may cache that the name is missing
        absent.st_ino = 0
        absent.entry_timeout = self._timeout
        return absent

    async def forget(self, inodes: Sequence[tuple[int, int]]) -> None:
        for inode, count in inodes:
            self._references.forget(inode - pyfuse3.ROOT_INODE, count)

    async def getattr(
        self, inode: int, _context: pyfuse3.RequestContext | None = None
    ) -> pyfuse3.EntryAttributes:
        with _errors():
            return self._attributes(inode - pyfuse3.ROOT_INODE)

    async def readlink(self, inode: int, _context: pyfuse3.RequestContext) -> bytes:
        with _errors():
            return self._vfs.readlink(inode - pyfuse3.ROOT_INODE)

    async def opendir(self, inode: int, _context: pyfuse3.RequestContext) -> int:
        with _errors():
            self._listings[self._handle] = self._list(inode - pyfuse3.ROOT_INODE)
        self._handle += 1
        return self._handle - 1

    def _list(self, number: int) -> _Listing:
        return _Listing(number, self._changes, self._vfs.entries(number))

    async def releasedir(self, handle: int) -> None:
        del self._listings[handle]

    async def readdir(self, handle: int, start: int, token: pyfuse3.ReaddirToken) -> None:
        with _errors():
            listing = self._listings[handle]
            if start == 0 and listing.changes != self._changes:  # it begins again
                listing = self._listings[handle] = self._list(listing.number)
            # Listed to the end as it was at the beginning; but the kernel must not cache names of
            # another generation, which would hide those of this one.
            keep = listing.changes == self._changes
            for place in range(start, len(listing.entries)):
                name, number = listing.entries[place]
                try:
                    attributes = self._attributes(number, keep=keep)
                except OSError:  # removed since
                    continue
                if not pyfuse3.readdir_reply(token, name, attributes, place + 1):
                    return
                self._references.add(number)

    async def open(
        self, inode: int, _flags: int, _context: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(self, handle: int, offset: int, size: int) -> bytes | memoryview:
        number = handle - pyfuse3.ROOT_INODE
        with _errors():
            data = self._vfs.read(number, offset, size)
            return await self._wait(number, offset, size) if data is None else data

    async def statfs(self, _context: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        usage = self._vfs.usage()
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = PAGE
        data.f_blocks = usage.bytes // PAGE
        data.f_bfree = data.f_bavail = data.f_ffree = data.f_favail = 0
        data.f_files = usage.inodes
        data.f_namemax = 255
        return data

    async def getxattr(self, inode: int, name: bytes, _context: pyfuse3.RequestContext) -> bytes:
        # Never ENOSYS: the kernel would not ask again, whatever a refresh brings.
        with _errors():
            value = self._vfs.xattrs(inode - pyfuse3.ROOT_INODE).get(name)
        if value is None:
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        return value

    async def listxattr(self, inode: int, _context: pyfuse3.RequestContext) -> list[bytes]:
        with _errors():
            return list(self._vfs.xattrs(inode - pyfuse3.ROOT_INODE))

    # Answered with ENOSYS once, these are never sent again: fewer requests for every file.
    async def flush(self, _handle: int) -> None:
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def access(self, _inode: int, _mode: int, _context: pyfuse3.RequestContext) -> bool:
        raise pyfuse3.FUSEError(errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class _Listing:
    """A directory as it is listed to a process that opened it.

    Attributes:
        number: of its inode.
        changes: number of changes of the tree until then.
        entries: names and inodes.
    """

    number: int
    changes: int
    entries: list[tuple[bytes, int]]


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise pyfuse3.FUSEError(error.errno or errno.EIO) from None


def _drop_names(entries: Iterable[tuple[int, bytes]]) -> None:
    for directory, name in entries:
        with contextlib.suppress(OSError):  # the kernel does not know it
            pyfuse3.invalidate_entry(directory + pyfuse3.ROOT_INODE, name)


def _invalidate(change: Change) -> None:
    _drop_names(change.entries)
    for directory in change.directories:
        with contextlib.suppress(OSError):
            pyfuse3.invalidate_inode(directory + pyfuse3.ROOT_INODE, attr_only=True)
