"""What every tree must show, mounted or not, whatever serves it: what its source shows."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from wheelmount.config import Settings
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client.remote import RemoteMount, remotemount
from wheelmount.mount.serve.generations import AGAIN
from wheelmount.mount.serve.vfs import Vfs
from wheelmount.mount.snapshot.tree import ROOT


@dataclass(frozen=True, slots=True)
class Attributes:
    """What is asked of a file, as of ``os.stat_result``; ``held`` is bytes that are no holes."""

    mode: int
    size: int
    mtime_ns: int
    nlink: int
    number: int
    held: int


class Shown(Protocol):
    """A tree as it is shown; paths are below its root, and b"" is that. Failures: ``OSError``."""

    def names(self, path: bytes) -> list[bytes]: ...
    def attributes(self, path: bytes) -> Attributes: ...
    def target(self, path: bytes) -> bytes: ...
    def xattrs(self, path: bytes) -> dict[bytes, bytes]: ...
    def read(self, path: bytes, offset: int, size: int) -> bytes: ...
    def room(self) -> int: ...


class Directory:
    """A directory of the kernel's: the source, or a mount."""

    def __init__(self, root: Path) -> None:
        self._root = os.fsencode(root)

    def _path(self, path: bytes) -> bytes:
        return os.path.join(self._root, path)

    def names(self, path: bytes) -> list[bytes]:
        return os.listdir(self._path(path))

    def attributes(self, path: bytes) -> Attributes:
        its = os.lstat(self._path(path))
        held = min(its.st_blocks * 512, its.st_size)
        return Attributes(its.st_mode, its.st_size, its.st_mtime_ns, its.st_nlink, its.st_ino, held)

    def target(self, path: bytes) -> bytes:
        return os.readlink(self._path(path))

    def xattrs(self, path: bytes) -> dict[bytes, bytes]:
        path = self._path(path)
        names = (n for n in os.listxattr(path, follow_symlinks=False) if n.startswith("user."))
        return {os.fsencode(n): os.getxattr(path, n, follow_symlinks=False) for n in names}

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        fd = os.open(self._path(path), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def room(self) -> int:
        usage = os.statvfs(self._root)
        return usage.f_blocks * usage.f_frsize


class Bare:
    """The tree itself, without a mount."""

    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs

    def _number(self, path: bytes) -> int:
        number: int | None = ROOT
        for name in path.split(b"/") if path else ():
            assert number is not None
            number = self._vfs.lookup(number, name)
            if number is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        assert number is not None
        return number

    def names(self, path: bytes) -> list[bytes]:
        return [name for name, _ in self._vfs.entries(self._number(path))]

    def attributes(self, path: bytes) -> Attributes:
        number = self._number(path)
        its = self._vfs.inode(number)
        return Attributes(its.mode, its.size, its.mtime_ns, its.nlink, number, its.held)

    def target(self, path: bytes) -> bytes:
        return self._vfs.readlink(self._number(path))

    def xattrs(self, path: bytes) -> dict[bytes, bytes]:
        return self._vfs.xattrs(self._number(path))

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        data = self._vfs.read(self._number(path), offset, size)
        assert data is not None, "not all bytes are there"
        return data

    def room(self) -> int:
        return self._vfs.usage().bytes


def assert_shown(source: Path, shown: Shown) -> None:
    """All names, attributes and bytes of ``source`` are shown, and nothing else."""
    true = Directory(source)
    files: dict[int, int] = {}
    room, pending = 0, [b""]
    while pending:
        path = pending.pop()
        expected, found = true.attributes(path), shown.attributes(path)
        assert (found.mode, found.mtime_ns, found.nlink) == (
            (expected.mode, expected.mtime_ns, expected.nlink)
        ), path
        if stat.S_ISDIR(expected.mode):
            names = true.names(path)
            assert sorted(shown.names(path)) == sorted(names), path
            pending += [path + b"/" + name if path else name for name in names]
        else:
            assert found.size == expected.size, path
        if stat.S_ISLNK(expected.mode):
            assert shown.target(path) == true.target(path), path
        else:
            assert shown.xattrs(path) == true.xattrs(path), path
        if stat.S_ISREG(expected.mode):
            size = expected.size + 1
            assert shown.read(path, 0, size) == true.read(path, 0, size), path
            if expected.number not in files:
                room += expected.held
            assert files.setdefault(expected.number, found.number) == found.number, path
    assert len(set(files.values())) == len(files), "two files have one number"
    assert shown.read(b"blocks", 200_000, 1 << 20) == true.read(b"blocks", 200_000, 1 << 20)
    assert shown.read(b"blocks", 1 << 40, 10) == b""
    sparse = shown.attributes(b"sparse")
    assert sparse.held < sparse.size // 2
    assert shown.room() >= room
    failures: dict[int, Callable[[], object]] = {
        errno.ENOENT: lambda: shown.attributes(b"package/nothing"),
        errno.ENOTDIR: lambda: shown.attributes(b"page/nothing"),
        errno.EINVAL: lambda: shown.target(b"page"),
        errno.EISDIR: lambda: shown.read(b"package", 0, 1),
    }
    for number, call in failures.items():
        try:
            call()
        except OSError as error:
            assert error.errno == number, error
        else:
            raise AssertionError(f"not {errno.errorcode[number]}")


def await_last(stores: Iterable[Path]) -> None:
    """Wait until stores hold one generation each: till then names of others are counted too."""
    deadline = time.monotonic() + 2 * AGAIN + 60
    while any(len(list(store.glob("*.tree"))) > 1 for store in stores):
        assert time.monotonic() < deadline, "an earlier generation stays"
        time.sleep(0.05)


def assert_same(source: Path, mount: Path) -> None:
    """The same of a mount, with what only a mount can do."""
    assert_shown(source, Directory(mount))
    program = subprocess.run([mount / "program"], capture_output=True, check=True, timeout=30)
    assert program.stdout == b"ran\n"
    assert os.statvfs(mount).f_flag & os.ST_RDONLY


WRITES: dict[str, Callable[[Path], object]] = {
    "open to write": lambda m: (m / "page").open("r+b"),
    "create": lambda m: (m / "new").open("xb"),
    "append": lambda m: (m / "page").open("ab"),
    "truncate": lambda m: os.truncate(m / "page", 0),
    "mkdir": lambda m: (m / "new").mkdir(),
    "rmdir": lambda m: (m / "empty-directory").rmdir(),
    "unlink": lambda m: (m / "page").unlink(),
    "rename": lambda m: (m / "page").rename(m / "new"),
    "link": lambda m: (m / "new").hardlink_to(m / "page"),
    "symlink": lambda m: (m / "new").symlink_to("page"),
    "mknod": lambda m: os.mkfifo(m / "new"),
    "chmod": lambda m: (m / "page").chmod(0o600),
    "chown": lambda m: os.chown(m / "page", 1, 1),
    "utime": lambda m: os.utime(m / "page"),
    "setxattr": lambda m: os.setxattr(m / "page", "user.a", b"b"),
    "removexattr": lambda m: os.removexattr(m / "page", "user.a"),
}


def assert_read_only(mount: Path) -> None:
    """Every call that would change something fails with EROFS."""
    for name, write in WRITES.items():
        try:
            write(mount)
        except OSError as error:
            assert error.errno == errno.EROFS, f"{name}: {error}"
        else:
            raise AssertionError(f"{name} went through")


@contextlib.contextmanager
def mounted_on_two(source: Path, workplace: Path, settings: Settings) -> Iterator[RemoteMount]:
    """A mount of a directory on two hosts of this machine, with all its bytes, in the context."""
    with LocalHosts(2, settings, namespaces=False) as hosts:
        made = remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings)
        with made:
            made.wait(30)
            yield made
