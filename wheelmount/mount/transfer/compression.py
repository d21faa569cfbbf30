"""Compression of blocks on the wire (zstd), where it makes them faster.

Only bytes on a link are compressed; stores and hashes are of the block itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import zstandard

from wheelmount.errors import TransferError

LEVEL = 1
"""Level of zstd: higher levels cost more time than they save on any network."""

WORTH = 0.9
"""A block that does not shrink below this part of its size is sent uncompressed."""

SAMPLES, SAMPLE = 8, 8 << 10
"""Number of sample pieces that are compressed before a whole block is, and bytes of each."""

FAST = 400e6
"""Bytes a second of a link above which compression is not tried."""

TRIAL = 3
"""Blocks of each kind (compressed or not) that are measured before the first decision."""

AGAIN = 24
"""Blocks after which one of the other kind is tried again."""

MEAN_WEIGHT = 0.3
"""Weight of a new measurement in the mean."""

IDLE, IDLE_PERIOD = 0.1, 0.5
"""Part of a machine's processors that must have been idle, and seconds over which it is measured:
where none is idle, compression slows down all other work."""

_local = threading.local()


def pack(block: memoryview) -> int:
    """Compress a block in place; return the bytes it takes then, 0 if it did not shrink enough.

    May be called in several threads.
    """
    compressor = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=LEVEL)
    sample = _sample(block)
    if len(compressor.compress(sample)) > WORTH * len(sample):
        return 0
    packed = compressor.compress(block)
    if len(packed) > WORTH * len(block):
        return 0
    block[: len(packed)] = packed
    return len(packed)


def _sample(block: memoryview) -> bytes:
    """Return pieces from all over a block, to see cheaply whether it shrinks."""
    step = max(1, len(block) // SAMPLES)
    return b"".join(block[at : at + SAMPLE] for at in range(0, len(block), step))


def unpack(packed: memoryview, length: int) -> memoryview:
    """Decompress a block.

    Args:
        packed: bytes that ``pack`` made.
        length: bytes of the block; more are never written.

    Raises:
        TransferError: the bytes are damaged.
    """
    try:
        # zstd writes as much as it made room for, whatever size the data claims.
        if zstandard.frame_content_size(packed) != length:
            raise TransferError("a block arrived damaged: it has another length")
        return memoryview(zstandard.ZstdDecompressor().decompress(packed))
    except zstandard.ZstdError as error:
        raise TransferError(f"a block arrived damaged: {error}") from None


class Processors:
    """Measures whether this machine has idle processors.

    Args:
        clock: seconds of processors so far, as ``psutil.cpu_times`` returns them.
    """

    def __init__(self, clock: Callable[[], Any] = psutil.cpu_times) -> None:
        self._clock = clock
        self._looked = time.monotonic()
        self._before = self._seconds()
        self._spare = False

    def spare(self) -> bool:
        """Return whether some were idle lately; False until that is measured."""
        if time.monotonic() - self._looked >= IDLE_PERIOD:
            now = self._seconds()
            idle, total = (new - old for new, old in zip(now, self._before, strict=True))
            self._looked, self._before = time.monotonic(), now
            self._spare = idle >= IDLE * total
        return self._spare

    def _seconds(self) -> tuple[float, float]:
        times = self._clock()
        return times.idle, sum(times)


class Choice:
    """Chooses whether blocks are compressed on one link, by what was faster lately.

    Several blocks are on their way at once. The cost of one is the time from the arrival of
    the one before it to its own.

    Args:
        spare: returns whether there are idle processors.
    """

    def __init__(self, spare: Callable[[], bool]) -> None:
        self._spare = spare
        self._last: float | None = None
        self._seconds: dict[bool, float] = {}  # for a byte of the block, by kind
        self._asked = {False: 0, True: 0}
        self._since = 0

    def packed(self) -> bool:
        """Return whether to request the next block compressed."""
        kind = self._next()
        self._asked[kind] += 1
        return kind

    def _next(self) -> bool:
        plain = self._seconds.get(False)
        if plain is None or self._asked[False] < TRIAL:
            return False
        if plain < 1 / FAST or not self._spare():
            return False
        if self._asked[True] < TRIAL:
            return True
        best = self._seconds.get(True, 0.0) < plain
        self._since += 1
        if self._since >= AGAIN:
            self._since = 0
            return not best
        return best

    def note(self, kind: bool, length: int, began: float, ended: float) -> None:
        """Note a block that has arrived.

        Args:
            kind: whether it was requested compressed.
            length: its bytes.
            began: time of the request, seconds of a monotonic clock.
            ended: time of its arrival.
        """
        last, self._last = self._last, ended
        if last is None:  # the first one includes the time to connect
            return
        took = (ended - max(last, began)) / length
        before = self._seconds.get(kind, took)
        self._seconds[kind] = before + MEAN_WEIGHT * (took - before)
