"""The kernel's FUSE protocol: the numbers and formats that a read-only server needs.

All from ``include/uapi/linux/fuse.h`` of Linux 6.18 (protocol 7.45); in brackets the version of the
protocol that brought what is younger than 7.23 (Linux 3.15). Everything is in the byte order of the
host, without padding that is not named.
"""

from __future__ import annotations

import enum
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wheelmount.mount.snapshot.tree import Inode

MAJOR, MINOR = 7, 45
OLDEST_MINOR = 23
"""Before it, the answer to INIT had another length."""

ROOT_ID = 1
UNKNOWN_INO = 0xFFFFFFFF
"""Inode number in a listing where the true one is unknown, as libfuse has it."""

BUFFER = 64 << 10
"""Bytes to read requests into: the kernel wants 8 KiB and the greatest write beside its header."""

GREATEST_WRITE = 4096
"""Bytes; the least that the kernel takes. Nothing is ever written."""

NAME_MAX = 255
BLOCK = 512
"""Unit of ``st_blocks``, bytes."""

UNIT = 4096
"""Unit of ``statfs``, and what files are best read by, bytes."""


class Op(enum.IntEnum):
    """``enum fuse_opcode``."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    IOCTL = 39
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46  # (7.24)
    COPY_FILE_RANGE = 47  # (7.28)
    TMPFILE = 51  # (7.37)
    COPY_FILE_RANGE_64 = 53  # (7.45)


WRITING = frozenset(
    {
        Op.SETATTR,
        Op.SYMLINK,
        Op.MKNOD,
        Op.MKDIR,
        Op.UNLINK,
        Op.RMDIR,
        Op.RENAME,
        Op.LINK,
        Op.WRITE,
        Op.SETXATTR,
        Op.REMOVEXATTR,
        Op.CREATE,
        Op.FALLOCATE,
        Op.RENAME2,
        Op.COPY_FILE_RANGE,
        Op.TMPFILE,
        Op.COPY_FILE_RANGE_64,
    }
)
"""Requests that would change the tree. The kernel sends none, as the mount is read-only."""


class Notify(enum.IntEnum):
    """``enum fuse_notify_code``: notifications from the server."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    RESEND = 7  # (7.40, Linux 6.9)


class Flag(enum.IntFlag):
    """``FUSE_*`` flags of INIT; those from bit 32 on travel in ``flags2`` (7.36)."""

    ASYNC_READ = 1 << 0
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18  # (7.25)
    MAX_PAGES = 1 << 22  # (7.28)
    CACHE_SYMLINKS = 1 << 23  # (7.28)
    NO_OPENDIR_SUPPORT = 1 << 24  # (7.29)
    EXPLICIT_INVAL_DATA = 1 << 25  # (7.30)
    INIT_EXT = 1 << 30  # (7.36)
    NO_EXPORT_SUPPORT = 1 << 38  # (7.40)


KEEP_CACHE, CACHE_DIR = 1 << 1, 1 << 3
"""``FOPEN_*`` flags; the second since (7.28)."""

IN_HEADER = Struct("=IIQQIIIHH")
"""len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding"""
OUT_HEADER = Struct("=IiQ")
"""len, error (negative; of a notification its code), unique (of a notification 0)"""
INIT_IN = Struct("=IIII")
"""major, minor, max_readahead, flags; younger kernels go on with flags2 (7.36)"""
INIT_IN_FLAGS2 = Struct("=16xI")
INIT_OUT = Struct("=IIIIHHIIHHIIH22x")
"""major, minor, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran,
max_pages, map_alignment, flags2, max_stack_depth, request_timeout, unused"""
ATTR = Struct("=QQQQQQIIIIIIIIII")
"""ino, size, blocks, atime, mtime, ctime, the nanoseconds of the three, mode, nlink, uid, gid,
rdev, blksize, flags"""
ATTR_OUT = Struct("=QI4x")
"""attr_valid in seconds, and nanoseconds beyond; then ATTR"""
ENTRY_OUT = Struct("=QQQQII")
"""nodeid, generation, entry_valid and attr_valid in seconds, nanoseconds of both; then ATTR"""
OPEN_OUT = Struct("=QI4x")
"""fh, open_flags"""
READ_IN = Struct("=QQIIQII")
"""fh, offset, size, read_flags, lock_owner, flags, padding"""
DIRENT = Struct("=QQII")
"""ino, off, namelen, type; then the name, padded to 8 bytes. In READDIRPLUS an entry goes before"""
FORGET_IN = Struct("=Q")
"""nlookup"""
BATCH_FORGET_IN = Struct("=I4x")
"""count; then as often FORGET_ONE"""
FORGET_ONE = Struct("=QQ")
"""nodeid, nlookup"""
INTERRUPT_IN = Struct("=Q")
"""unique of the request that no process waits for any more"""
GETXATTR_IN = Struct("=I4x")
"""size; then, in GETXATTR, the name"""
GETXATTR_OUT = Struct("=I4x")
"""size"""
LSEEK_IN = Struct("=QQI4x")
"""fh, offset, whence"""
LSEEK_OUT = Struct("=Q")
"""offset"""
STATFS_OUT = Struct("=QQQQQIIII24x")
"""blocks, bfree, bavail, files, ffree, bsize, namelen, frsize, padding"""
INVAL_INODE_OUT = Struct("=Qqq")
"""ino, off (negative: attributes only), len (0: to the end)"""
INVAL_ENTRY_OUT = Struct("=QII")
"""parent, namelen, flags; then the name and a zero"""

NO_ENTRY = bytes(ENTRY_OUT.size + ATTR.size)
"""Entry without attributes, in READDIRPLUS."""


def attributes(number: int, inode: Inode, owner: tuple[int, int]) -> bytes:
    """Encode an inode as the kernel's ATTR.

    Args:
        number: the inode's number in the tree.
        inode: its attributes.
        owner: user and group.
    """
    seconds, nanoseconds = divmod(inode.mtime_ns, 10**9)
    seconds &= 0xFFFFFFFFFFFFFFFF  # negative before 1970
    return ATTR.pack(
        number + ROOT_ID, inode.size, -(-inode.held // BLOCK), seconds, seconds, seconds,
        nanoseconds, nanoseconds, nanoseconds, inode.mode, inode.nlink, *owner, 0, UNIT, 0,
    )  # fmt: skip


def statistics(size: int, inodes: int) -> bytes:
    """Encode STATFS_OUT of a full file system of the given bytes and inodes."""
    return STATFS_OUT.pack(-(-size // UNIT), 0, 0, inodes, 0, UNIT, NAME_MAX, UNIT, 0)
