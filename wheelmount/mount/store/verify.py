"""Verify a store: compare all bytes with the hashes that they arrived with, and repair damage."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from wheelmount import disk
from wheelmount.errors import StoreError
from wheelmount.mount.store import proofs
from wheelmount.mount.store.proofs import Proof
from wheelmount.mount.store.store import Store, current

FILE = "verified"
"""Name of the file in a mount's directory that contains the result of the last verification."""

BATCH = 16 << 20
"""Bytes of files that a thread verifies in one batch; each file counts as a page at least."""

PIECE = 1 << 20
"""Bytes read at a time."""

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged piece of a file.

    Attributes:
        number: number of the file.
        path: path of the file in the mount.
        offset: bytes of the file before the piece.
        length: bytes of the piece.
        digest: blake3 of the right bytes.
    """

    number: int
    path: bytes
    offset: int
    length: int
    digest: bytes


@dataclass(slots=True)
class Verified:
    """The result of a verification.

    Attributes:
        files: number of files compared.
        size: bytes compared.
        seconds: duration of the verification.
        time: end of the verification, in seconds since the epoch.
        damaged: pieces whose hashes differ.
        unknown: paths of files for which there are no hashes.
        repaired: paths of damaged files that have been repaired.
    """

    files: int = 0
    size: int = 0
    seconds: float = 0.0
    time: float = 0.0
    damaged: list[Damage] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        """Paths of the damaged files, repaired or not."""
        return sorted({os.fsdecode(each.path) for each in self.damaged})

    @property
    def wrong(self) -> list[str]:
        """Paths of the files that are still damaged."""
        return [path for path in self.paths if path not in self.repaired]

    def summary(self) -> dict[str, Any]:
        """Return the result as a mapping for JSON."""
        whole = asdict(self)
        return whole | {"damaged": self.paths, "wrong": self.wrong}


def verify(store: Path, *, rate: float = 0) -> Verified:
    """Compare all bytes that a store shows with the hashes they arrived with.

    Args:
        store: its directory.
        rate: maximum of bytes per second, which one thread reads; 0: no maximum, and a thread for
            each processor.

    Raises:
        StoreError: the store was refreshed again during each attempt.
    """
    for _ in range(3):
        shown = Store.open(store)
        found = _verify(shown, rate)
        if current(store) == shown.generation:  # else a refresh deleted files meanwhile
            return found
    raise StoreError(f"{store.name} was refreshed during its verification", hint="verify it later")


def _verify(store: Store, rate: float) -> Verified:
    began = time.monotonic()
    found = Verified()
    known = proofs.read(store.directory)
    numbers, lock = iter(list(store.tree.inodes)), threading.Lock()

    def batch() -> list[tuple[int, bytes, int, bytes, list[Proof]]]:
        taken, size = [], 0
        with lock:  # a tree is not thread-safe
            for number in numbers:
                inode = store.tree.inodes[number]
                if not inode.is_file or store.is_changed(number):
                    continue
                pieces = known.get(number, [])
                found.files += 1
                if sum(each.length for each in pieces) != sum(n for _, n in inode.data):
                    found.unknown.append(os.fsdecode(inode.path))
                    continue
                taken.append((number, inode.path, inode.size, store.path(number), pieces))
                size += inode.size + 4096
                found.size += sum(each.length for each in pieces)
                if size > BATCH:
                    break
        return taken

    def work() -> None:
        buffer = memoryview(bytearray(PIECE))
        while files := batch():
            for number, path, size, place, pieces in files:
                for wrong in _differing(place, size, pieces, buffer):
                    found.damaged.append(Damage(number, path, *wrong))
                if rate:
                    ahead = began + found.size / rate - time.monotonic()
                    time.sleep(max(0.0, ahead))

    threads = 1 if rate else len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        for each in [pool.submit(work) for _ in range(threads)]:
            each.result()
    found.damaged.sort(key=lambda each: (each.path, each.offset))
    found.unknown.sort()
    found.seconds, found.time = time.monotonic() - began, time.time()
    return found


def _differing(place: bytes, size: int, pieces: list[Proof], buffer: memoryview) -> Iterator[Proof]:
    """Yield the pieces of a file whose hashes differ; all if the file is missing or resized."""
    try:
        fd = os.open(place, _FLAGS)
    except OSError:
        yield from pieces
        return
    try:
        if os.fstat(fd).st_size != size:
            yield from pieces
            return
        for piece in pieces:
            with contextlib.suppress(OSError):  # an error of the disk counts as damage
                if _digest(fd, piece.offset, piece.length, buffer) == piece.digest:
                    continue
            yield piece
    finally:
        os.close(fd)


def _digest(fd: int, offset: int, length: int, buffer: memoryview) -> bytes:
    hasher = blake3()
    while length > 0:
        count = os.preadv(fd, [buffer[:length]], offset)
        if not count:
            break
        hasher.update(buffer[:count])
        offset, length = offset + count, length - count
    return hasher.digest()


def piece(store: Path, wanted: Damage) -> bytes | None:
    """Return the bytes of a piece from a store, or None if their hash is wrong."""
    shown = Store.open(store)
    if wanted.number not in shown.tree.inodes:
        return None
    return right(shown.path(wanted.number), wanted)


def right(path: bytes, wanted: Damage) -> bytes | None:
    """Return the bytes of a piece from a file, or None if their hash is wrong."""
    try:
        fd = os.open(path, _FLAGS | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        data = os.pread(fd, wanted.length, wanted.offset)
    except OSError:
        return None
    finally:
        os.close(fd)
    return data if blake3(data).digest() == wanted.digest else None


def repair(store: Path, damage: Damage, data: bytes, *, set_attributes: bool) -> None:
    """Replace a damaged piece by the right bytes.

    The bytes are written in place, so that they are also right under the file's other names, in
    other generations, and for processes that have the file open or mapped. Attributes do not
    change.

    Args:
        store: directory of the store.
        damage: the damaged piece.
        data: bytes to write; they are compared with the hash first.
        set_attributes: whether files have the attributes of the source.

    Raises:
        StoreError: the bytes have another hash, or cannot be written.
    """
    if blake3(data).digest() != damage.digest:
        raise StoreError(f"{os.fsdecode(damage.path)}: the bytes for its repair have a wrong hash")
    shown = Store.open(store)
    inode = shown.tree.inodes[damage.number]
    path = shown.path(damage.number)
    try:
        with _writable(path) as fd:
            if os.fstat(fd).st_size != inode.size:
                os.ftruncate(fd, inode.size)
            if set_attributes:
                os.fchmod(fd, inode.mode & 0o7777)
            view, offset = memoryview(data), damage.offset
            while view:
                count = os.pwrite(fd, view, offset)
                view, offset = view[count:], offset + count
            if inode.mtime_ns != os.fstat(fd).st_mtime_ns:
                os.utime(fd, ns=(inode.mtime_ns, inode.mtime_ns))
    except OSError as error:
        raise StoreError(
            f"{os.fsdecode(damage.path)} cannot be repaired: {error.strerror}",
            hint="mount it again",
        ) from None


@contextlib.contextmanager
def _writable(path: bytes) -> Iterator[int]:
    """Open a file for writing during the context; make it if it is missing."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except PermissionError:  # read-only even for its owner, as at the source
        place = Path(os.fsdecode(path))
        mode = place.lstat().st_mode & 0o7777
        place.chmod(mode | 0o200)
        try:
            fd = os.open(path, flags)
        finally:
            place.chmod(mode)
    try:
        yield fd
    finally:
        os.close(fd)


def note(directory: Path, found: Verified) -> None:
    """Write the result of a verification to a mount's directory, unless that is full or gone."""
    with contextlib.suppress(OSError):
        disk.write(directory / FILE, json.dumps(found.summary()))


def last(directory: Path) -> dict[str, Any] | None:
    """Return the result of a mount's last verification; None if there was none.

    Args:
        directory: directory of the mount.
    """
    try:
        found: dict[str, Any] = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        return None
    return found
