"""System calls for mounts that Python's standard library lacks.

Numbers are those of ``include/uapi/linux/mount.h`` and, for system calls added since Linux 5.2, of
``include/uapi/asm-generic/unistd.h``: the same on all architectures.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MOUNT_SETATTR, _OPEN_TREE, _MOVE_MOUNT = 442, 428, 429
_OPEN_TREE_CLONE, _RECURSIVE = 1, 0x8000
_MOVE_EMPTY_PATH, _MOVE_BENEATH = 0x4, 0x200
_AT_FDCWD, _AT_EMPTY_PATH, _AT_NOFOLLOW = -100, 0x1000, 0x100
_AT_STATX_DONT_SYNC = 0x4000
_STATX_TYPE, _STATX_INO, _STATX_MNT_ID = 0x1, 0x100, 0x1000
_STATX_ATTR_MOUNT_ROOT = 0x2000
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_RDONLY, _NOSUID, _NODEV, _REMOUNT = 1, 2, 4, 32
_FLAGS = {"noexec": 0x8, "nosymfollow": 0x200000}
_MS_PRIVATE = 1 << 18
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_PR_SET_PDEATHSIG = 1
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_MEMORY = frozenset({0x01021994, 0x858458F6})  # TMPFS_MAGIC, RAMFS_MAGIC

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Found:
    """Attributes of a file that the kernel knows without asking the file system.

    Attributes:
        mount: id of the mount that the file is in, as in ``mountinfo`` of proc(5).
        top: whether the file is the root of that mount.
        device: device number, as ``st_dev``.
        inode: inode number; 0 where this user may not see it.
        mode: the file's type as in ``st_mode``, without permissions; 0 likewise.
    """

    mount: int
    top: bool
    device: int
    inode: int
    mode: int


def look(path: str | Path, *, follow: bool = False) -> Found:
    """Call ``statx(2)`` such that it returns even if a file server or a network hangs.

    Args:
        path: path of a file of any kind.
        follow: follow a symlink in the last component.
    """
    return _statx(_AT_FDCWD, os.fsencode(path), 0 if follow else _AT_NOFOLLOW)


def _statx(fd: int, path: bytes, flags: int) -> Found:
    buffer = ctypes.create_string_buffer(256)
    flags |= _AT_STATX_DONT_SYNC
    try:
        mask = _STATX_TYPE | _STATX_INO | _STATX_MNT_ID
        _check(_libc.statx(fd, path, flags, mask, buffer), os.fsdecode(path))
    except PermissionError:  # another user's FUSE mount, which refuses other users
        _check(_libc.statx(fd, path, flags, 0, buffer), os.fsdecode(path))  # the mount alone
    (attributes,) = struct.unpack_from("=Q", buffer, 8)
    (mode,) = struct.unpack_from("=H", buffer, 28)
    (inode,) = struct.unpack_from("=Q", buffer, 32)
    major, minor, mount = struct.unpack_from("=IIQ", buffer, 136)
    top = bool(attributes & _STATX_ATTR_MOUNT_ROOT)
    return Found(mount, top, os.makedev(major, minor), inode, mode)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Make a range of a file, in bytes, read as zeros, and free the pages that lie wholly in it."""
    mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
    _check(_libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)), "")


def in_memory(path: Path) -> bool:
    """Return whether the file system of a path keeps its files in memory (tmpfs, ramfs)."""
    status = (ctypes.c_long * 64)()  # struct statfs begins with the type of the file system
    _check(_libc.statfs(os.fsencode(path), status), path)
    return status[0] & 0xFFFFFFFF in _MEMORY


def give_back_memory() -> None:
    """Return unused memory of the C library to the kernel, where the library can do that."""
    trim = getattr(_libc, "malloc_trim", None)  # only in glibc
    if trim is not None:
        trim(0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: ``prctl(2)``."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "")


def mount_fuse(path: str, kind: str, options: str) -> None:
    """Mount a FUSE file system read-only.

    Args:
        path: absolute path of the mount point, a directory.
        kind: type of the file system, ``fuse.NAME``.
        options: options of the mount, among them ``fd=N``; see ``fuse(4)``.
    """
    flags = _RDONLY | _NOSUID | _NODEV
    _check(_mount(b"wheelmount", path, kind.encode(), flags, options), path)


def mount_tmpfs(path: Path, size: int) -> None:
    """Mount a private tmpfs; files of at least a huge page get huge pages.

    Args:
        path: the mount point, an empty directory.
        size: capacity in bytes.
    """
    options = f"size={size},nr_inodes=0,mode=0700"
    for huge in (",huge=within_size", ""):  # EINVAL on a kernel without huge pages
        if _mount(b"wheelmount", path, b"tmpfs", _NOSUID | _NODEV, options + huge) == 0:
            return
    _raise(path)


def resize_tmpfs(path: Path, size: int) -> None:
    """Set the size in bytes of a tmpfs that ``mount_tmpfs`` mounted."""
    flags = _NOSUID | _NODEV | _REMOUNT
    _check(_mount(b"wheelmount", path, b"tmpfs", flags, f"size={size}"), path)


def unmount(path: str | Path, *, detach: bool) -> None:
    """Unmount a file system; with ``detach`` also one in use, which ends with its last user."""
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if detach else 0)
    _check(_libc.umount2(os.fsencode(path), flags), path)


@contextmanager
def clone(path: str | Path, *, flags: int | None = None) -> Iterator[int]:
    """Make a detached copy of a mount, or a bind mount of a directory, for ``attach``.

    Args:
        path: the mount or directory to copy.
        flags: attributes for the copy (see ``flags_of``), which is then read-only, and without the
            mounts inside. By default the copy has the mount's own attributes, and all mounts
            inside it.

    Yields:
        A descriptor of the copy's root. When the context ends, the copy goes away unless
        ``attach`` was called.
    """
    how = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_RECURSIVE if flags is None else 0)
    tree = _call(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), how)
    try:
        if flags is not None:
            # Private, so that mounts made in the copy do not appear in the original.
            attributes = _MountAttr(
                attr_set=_RDONLY | _NOSUID | _NODEV | flags, propagation=_MS_PRIVATE
            )
            reference, size = ctypes.byref(attributes), ctypes.sizeof(attributes)
            _call(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, reference, size)
        yield tree
    finally:
        os.close(tree)


def flags_of(options: frozenset[str]) -> int:
    """Convert options of a mount, as in ``mountinfo``, to attribute flags for ``clone``."""
    return sum(flag for name, flag in _FLAGS.items() if name in options)


def mount_of(tree: int) -> int:
    """Return the id of a mount that ``clone`` made."""
    return _statx(tree, b"", _AT_EMPTY_PATH).mount


def attach(tree: int, path: str | Path, *, below: bool = False, at: int = _AT_FDCWD) -> None:
    """Attach a mount that ``clone`` made to a mount point.

    Args:
        tree: descriptor of the mount's root.
        path: the mount point.
        below: attach beneath the topmost mount that is there. Needs Linux 6.5.
        at: descriptor of the directory that a relative ``path`` starts from.
    """
    flags = _MOVE_EMPTY_PATH | (_MOVE_BENEATH if below else 0)
    _call(_MOVE_MOUNT, tree, b"", at, os.fsencode(path), flags)


def enter(namespace: int, root: int) -> None:
    """Move this thread into another mount namespace; it cannot return, and should end soon.

    Args:
        namespace: descriptor of ``/proc/PID/ns/mnt``.
        root: descriptor of ``/proc/PID/root``, which becomes the thread's root directory.
    """
    _check(_libc.unshare(_CLONE_FS), "")
    _check(_libc.setns(namespace, _CLONE_NEWNS), "")
    os.fchdir(root)
    os.chroot(".")


def _mount(source: bytes, path: str | Path, kind: bytes, flags: int, options: str) -> int:
    result: int = _libc.mount(source, os.fsencode(path), kind, flags, options.encode())
    return result


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    _check(result, "")
    return result


def _check(result: int, path: str | Path) -> None:
    if result < 0:
        _raise(path)


def _raise(path: str | Path) -> None:
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), str(path))
