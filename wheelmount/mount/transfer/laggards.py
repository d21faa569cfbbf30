"""Find slow hosts, which other hosts stop waiting for, and silent ones, which a delivery gives up.

A host is an inner node of one tree (``topology``). If bytes come to it slowly, they come as slowly
to all hosts below it in that tree. The hosts above it can send to these as well, and the slow host
is then a leaf of all trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

SLOWER = 3
"""Least ratio between the bytes that other hosts have and those of a slow host. Hosts that differ
less lose less time than the links of the hosts above would, which have more to send then."""

LEAST_BLOCKS = 16
"""Fewest blocks of most hosts from which on others may count as slow. Before that, a host may have
started a moment later."""


STANDSTILL = 15.0
"""Seconds without a byte after which a host that lacks some counts as stuck: its disk may hang.
A host that is only slow is avoided earlier."""


class Laggards:
    """Finds slow hosts in the course of a delivery.

    Args:
        block_size: bytes of a block.

    Attributes:
        found: names of all hosts that were found to be slow.
    """

    def __init__(self, block_size: int) -> None:
        self.found: set[str] = set()
        self._least = LEAST_BLOCKS * block_size
        self._suspects: dict[str, int] = {}
        self._last: dict[str, tuple[int, float]] = {}  # bytes, and when that number was new

    def find(self, arrived: Mapping[str, int], incomplete: Set[str], now: float) -> set[str]:
        """Return hosts that have become slow; to be called about once a second.

        A host is slow if three quarters of the others had ``SLOWER`` times as many bytes at two
        calls in a row, or at more, and more bytes arrived on it since the first of these, or none
        for ``STANDSTILL`` although it lacks some. None arrive on a host that has all, although it
        may have had most of them before the delivery.

        Args:
            arrived: number of bytes that have arrived on each host, by name.
            incomplete: hosts that lack bytes.
            now: seconds on any clock.
        """
        ordered = sorted(arrived.values())
        others = ordered[1 + (len(ordered) - 1) // 4] if len(ordered) > 1 else 0
        behind = {
            name
            for name, size in arrived.items()
            if others >= self._least and size * SLOWER < others
        }
        for name, size in arrived.items():
            if self._last.get(name, (-1, now))[0] != size:
                self._last[name] = size, now
        slow = {
            name
            for name in behind - self.found
            if arrived[name] > self._suspects.get(name, arrived[name])
            or (name in incomplete and now >= self._last[name][1] + STANDSTILL)
        }
        self._suspects = {n: self._suspects.get(n, arrived[n]) for n in behind}
        self.found |= slow
        return slow


class Silence:
    """Measures for how long each host of a delivery has reported nothing.

    Only the time between two looks counts, as a client may be stopped for long.

    Args:
        names: of the hosts.
        now: seconds on any clock.
    """

    def __init__(self, names: Iterable[str], now: float) -> None:
        self._seconds = dict.fromkeys(names, 0.0)
        self._reported: dict[str, float] = {}
        self._looked = now

    def look(
        self, reported: Mapping[str, float], now: float, most: float, *, reading: bool
    ) -> dict[str, float]:
        """Return the seconds for which each host has been silent.

        Args:
            reported: when each host reported last, by name.
            now: seconds on the clock.
            most: seconds that count at most since the last look.
            reading: whether the client still reads a block, for which hosts may wait. The time
                since the last look does not count then.
        """
        passed = 0.0 if reading else min(now - self._looked, most)
        self._looked = now
        for name, before in self._seconds.items():
            silent = reported.get(name) == self._reported.get(name)
            self._seconds[name] = before + passed if silent else 0.0
        self._reported = dict(reported)
        return dict(self._seconds)
