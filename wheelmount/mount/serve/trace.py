"""The parts of a mount's files in the order in which programs of the host read them first."""

from __future__ import annotations

PART = 256 << 10
"""Bytes of a part of a file, the unit in which reads are noted: those of the smallest block."""

MOST = 20_000
"""Number of parts after which no more are noted."""


class Trace:
    """Notes parts of files when they are read first. May be used on any thread."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], None] = {}
        self._most = MOST

    def note(self, number: int, begin: int, end: int) -> None:
        """Note that bytes ``begin`` to ``end`` of a file are read; ``end`` is greater."""
        if len(self._parts) < self._most:
            for part in range(begin // PART, -(-end // PART)):
                self._parts.setdefault((number, part))

    def end(self) -> list[tuple[int, int]]:
        """Note no more; return number of file and index of part, in the order of first reads."""
        parts, self._parts, self._most = list(self._parts), {}, 0
        return parts
