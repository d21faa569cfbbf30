"""Compression of blocks on the wire (zstd), and when it pays.

Only the bytes on a link are compressed; what is kept, and what is hashed, is the block itself.
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
"""Of zstd: more than this costs more time than it saves at the speed of any network."""

WORTH = 0.9
"""A block that does not shrink below this part of itself travels as it is."""

SAMPLES, SAMPLE = 8, 8 << 10
"""Pieces of a block that are tried before it is, and bytes of each."""

FAST = 400e6
"""Bytes a second of a link beyond which compression is not even tried."""

TRIAL = 3
"""Blocks of each kind from which a link is judged at first."""

AGAIN = 24
"""Blocks after which the kind that is not in use is tried with one again."""

MEMORY = 0.3
"""Part of a new measurement in the mean."""

IDLE, LOOK = 0.1, 0.5
"""Part of a machine's processors that must have been idle, and seconds over which it is measured:
where none is idle, there is nothing to pay for shorter ways with."""

_local = threading.local()


def pack(block: memoryview) -> int:
    """Compress a block where it is; returns the bytes it takes there, 0 if it is not worth it.

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
    """Pieces from all over a block: whether it shrinks shows in them, at a part of the cost."""
    step = max(1, len(block) // SAMPLES)
    return b"".join(block[at : at + SAMPLE] for at in range(0, len(block), step))


def unpack(packed: memoryview, length: int) -> memoryview:
    """A block again.

    Args:
        packed: what ``pack`` made.
        length: bytes of the block; never are more made.

    Raises:
        TransferError: it is something else.
    """
    try:
        # What is written there is what zstd makes room for, whatever it is told beside it.
        if zstandard.frame_content_size(packed) != length:
            raise TransferError("a block arrived damaged: it has another length")
        return memoryview(zstandard.ZstdDecompressor().decompress(packed))
    except zstandard.ZstdError as error:
        raise TransferError(f"a block arrived damaged: {error}") from None


class Processors:
    """Whether this machine has processors to spare.

    Args:
        clock: seconds that processors had until now, by the names that ``psutil.cpu_times`` has.
    """

    def __init__(self, clock: Callable[[], Any] = psutil.cpu_times) -> None:
        self._clock = clock
        self._looked = time.monotonic()
        self._before = self._seconds()
        self._spare = False

    def spare(self) -> bool:
        """Whether some were idle lately; not before that was measured."""
        if time.monotonic() - self._looked >= LOOK:
            now = self._seconds()
            idle, total = (new - old for new, old in zip(now, self._before, strict=True))
            self._looked, self._before = time.monotonic(), now
            self._spare = idle >= IDLE * total
        return self._spare

    def _seconds(self) -> tuple[float, float]:
        times = self._clock()
        return times.idle, sum(times)


class Choice:
    """Whether to have blocks compressed on one link: whichever has been faster lately.

    Several blocks are on their way at once. What one costs the link is the time from the arrival of
    the one before it to its own.

    Args:
        spare: whether there are processors to do it.
    """

    def __init__(self, spare: Callable[[], bool]) -> None:
        self._spare = spare
        self._last: float | None = None
        self._seconds: dict[bool, float] = {}  # for a byte of the block, by kind
        self._asked = {False: 0, True: 0}
        self._since = 0

    def packed(self) -> bool:
        """Whether to have the next block compressed."""
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
        """A block has arrived.

        Args:
            kind: whether it was asked for compressed.
            length: its bytes.
            began: when it was asked for, seconds of a clock that is monotonic.
            ended: when it was there.
        """
        last, self._last = self._last, ended
        if last is None:  # the first has the connection made, too
            return
        took = (ended - max(last, began)) / length
        before = self._seconds.get(kind, took)
        self._seconds[kind] = before + MEMORY * (took - before)
