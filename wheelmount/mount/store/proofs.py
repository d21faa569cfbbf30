"""A log of the hashes with which a store's bytes arrived, for later verification.

One log serves all generations of a store: a file keeps its number from one generation to the next,
and arrives in one of them. Each piece of a file in a block has a record with its blake3. If a block
contains a single piece, this is the hash that the client sent. Otherwise it is computed from the
block's bytes after they were compared with the client's hash, and before readers see them.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from wheelmount.mount.snapshot.layout import Extent

LOG = "proofs"
"""Name of the log in a store."""

RECORD = struct.Struct("<QQQQ32s")
"""Format of a record: generation, number of the file, offset, length, blake3."""

_COPY = (1 << 64) - 1
"""Value of ``length`` in the record of a copied file, whose ``offset`` is the original's number."""

SMALL = 64 << 10
"""Bytes of a small block, from which the number of records that a store needs is estimated."""

_MIN_SIZE = 1 << 16
"""Size of a log, in bytes, up to which it is not shortened."""

_appending = threading.Lock()


class Proof(NamedTuple):
    """The blake3 of a piece of a file; offset and length are in bytes."""

    offset: int
    length: int
    digest: bytes


def add(
    store: Path, generation: int, extents: Iterable[Extent], block: memoryview, digest: bytes
) -> None:
    """Record the hashes of a block's pieces.

    Args:
        store: directory of the store.
        generation: the generation that the block arrived for.
        extents: the pieces of files in the block.
        block: bytes of the block, already verified.
        digest: blake3 of the block.
    """
    records = []
    for number, offset, begin, length in extents:
        if length != len(block):
            digest = blake3(block[begin : begin + length]).digest()
        records.append(RECORD.pack(generation, number, offset, length, digest))
    _append(store, records)


def copy(store: Path, generation: int, copies: Mapping[int, int]) -> None:
    """Record which files of a generation are copies.

    Args:
        store: directory of the store.
        generation: number of the generation.
        copies: numbers of the originals by numbers of the copies.
    """
    zeros = bytes(32)
    _append(store, [RECORD.pack(generation, n, old, _COPY, zeros) for n, old in copies.items()])


def _append(store: Path, records: list[bytes]) -> None:
    data = b"".join(records)
    fd = os.open(store / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with _appending:
            written = os.write(fd, data)
            if written < len(data):  # later records could not be read behind a part of one
                os.ftruncate(fd, os.fstat(fd).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def read(store: Path) -> dict[int, list[Proof]]:
    """Return the proofs of all files by the files' numbers; empty files have none."""
    found = {}
    files = _read(store)
    for number in files:
        origin, seen = number, set()
        while origin in files and files[origin][1] is None and origin not in seen:
            seen.add(origin)
            origin = files[origin][2]
        proofs = files[origin][1] if origin in files else None
        if proofs is not None:
            found[number] = [Proof(*each) for each in sorted(proofs.values())]
    return found


_File = tuple[int, "dict[int, tuple[int, int, bytes]] | None", int]
"""Generation of a file, and its pieces by offset; or, for a copy, the number of its original."""


def _read(store: Path) -> dict[int, _File]:
    try:
        log = (store / LOG).read_bytes()
    except FileNotFoundError:
        return {}
    files: dict[int, _File] = {}
    whole = memoryview(log)[: len(log) - len(log) % RECORD.size]
    for generation, number, offset, length, digest in RECORD.iter_unpack(whole):
        known = files.get(number)
        if length == _COPY:
            files[number] = generation, None, offset
        elif known is None or known[0] != generation or known[1] is None:
            # If the file is known, an abandoned generation used its number for another file.
            files[number] = generation, {offset: (offset, length, digest)}, 0
        else:
            known[1][offset] = offset, length, digest
    return files


def size(store: Path) -> int:
    """Return the bytes of a log."""
    log = store / LOG
    return log.stat().st_size if log.exists() else 0


def is_long(store: Path, expected: int) -> bool:
    """Return whether most records of a log are of deleted files, so that ``trim`` shortens it.

    Args:
        store: directory of the store.
        expected: number of records that one generation may need.
    """
    return size(store) > max(_MIN_SIZE, 2 * expected * RECORD.size)


def trim(store: Path, expected: int, numbers: Container[int]) -> None:
    """Shorten a log in which most records are of deleted files.

    Args:
        store: directory of the store; no block may arrive during the call.
        expected: number of records that one generation may need.
        numbers: numbers of the files that still exist.
    """
    if not is_long(store, expected):
        return
    new = store / f"{LOG}.new"
    try:
        with new.open("wb") as file:
            for number, proofs in read(store).items():
                if number in numbers:
                    for offset, length, digest in proofs:
                        file.write(RECORD.pack(0, number, offset, length, digest))
        new.replace(store / LOG)
    except OSError:
        new.unlink(missing_ok=True)
        raise
