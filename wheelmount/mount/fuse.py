"""The mounted tree through pyfuse3: an adapter that translates and adds nothing."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable

import pyfuse3

from wheelmount.mount.layout import PAGE
from wheelmount.mount.vfs import Vfs

FOREVER = 1e8
"""Seconds the kernel may keep names and attributes: a mount does not change by itself."""

TASKS = 1024
"""Requests that may wait for bytes at once; pyfuse3's own 99 would let waiting reads stop others.
"""

Read = Callable[[int, int, int], Awaitable[memoryview]]
"""Gives bytes of (inode, offset, size) when they are there, or raises ``OSError``."""


class FuseOperations(pyfuse3.Operations):  # type: ignore[misc]
    """What the kernel asks of the mount. FUSE numbers the root 1, the tree 0."""

    enable_writeback_cache = False

    def __init__(self, vfs: Vfs, read: Read, uid: int, gid: int) -> None:
        super().__init__()
        self._vfs = vfs
        self._read = read
        self._owner = uid, gid

    def _attributes(self, number: int) -> pyfuse3.EntryAttributes:
        inode = self._vfs.inode(number)
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = number + pyfuse3.ROOT_INODE
        entry.st_mode = inode.mode
        entry.st_nlink = inode.nlink
        entry.st_uid, entry.st_gid = self._owner
        entry.st_size = inode.size
        entry.st_blksize = PAGE
        entry.st_blocks = -(-inode.size // 512)
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = inode.mtime_ns
        entry.entry_timeout = entry.attr_timeout = FOREVER
        return entry

    async def lookup(
        self, parent: int, name: bytes, _context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        try:
            number = self._vfs.lookup(parent - pyfuse3.ROOT_INODE, name)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
        if number is not None:
            return self._attributes(number)
        absent = pyfuse3.EntryAttributes()  # inode 0: the kernel may remember that it is not there
        absent.st_ino = 0
        absent.entry_timeout = FOREVER
        return absent

    async def getattr(
        self, inode: int, _context: pyfuse3.RequestContext | None = None
    ) -> pyfuse3.EntryAttributes:
        return self._attributes(inode - pyfuse3.ROOT_INODE)

    async def readlink(self, inode: int, _context: pyfuse3.RequestContext) -> bytes:
        try:
            return self._vfs.readlink(inode - pyfuse3.ROOT_INODE)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None

    async def opendir(self, inode: int, _context: pyfuse3.RequestContext) -> int:
        return inode

    async def readdir(self, handle: int, start: int, token: pyfuse3.ReaddirToken) -> None:
        entries = self._vfs.entries(handle - pyfuse3.ROOT_INODE)
        for place in range(start, len(entries)):
            name, number = entries[place]
            if not pyfuse3.readdir_reply(token, name, self._attributes(number), place + 1):
                return

    async def open(
        self, inode: int, _flags: int, _context: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(self, handle: int, offset: int, size: int) -> memoryview:
        try:
            return await self._read(handle - pyfuse3.ROOT_INODE, offset, size)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None

    async def statfs(self, _context: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        usage = self._vfs.usage()
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = PAGE
        data.f_blocks = usage.bytes // PAGE
        data.f_bfree = data.f_bavail = data.f_ffree = data.f_favail = 0
        data.f_files = usage.inodes
        data.f_namemax = 255
        return data

    # Answered with ENOSYS once, these are never sent again: fewer trips for every file.
    async def flush(self, _handle: int) -> None:
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def access(self, _inode: int, _mode: int, _context: pyfuse3.RequestContext) -> bool:
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def getxattr(self, _inode: int, _name: bytes, _context: pyfuse3.RequestContext) -> bytes:
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def listxattr(self, _inode: int, _context: pyfuse3.RequestContext) -> list[bytes]:
        raise pyfuse3.FUSEError(errno.ENOSYS)
