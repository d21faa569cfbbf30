"""Slow hosts, which other hosts should not wait for.

A host is an inner node of one tree (``topology``). If bytes come to it slowly, they come as slowly
to all hosts below it in that tree. The hosts above it can send to these as well, and the slow host
is then a leaf of all trees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

SLOWER = 3
"""Least ratio between the bytes that other hosts have and those of a slow host. Hosts that differ
less lose less time than the links of the hosts above would, which have more to send then."""

LEAST_BLOCKS = 16
"""Fewest blocks of most hosts from which on others may count as slow. Before that, a host may have
started a moment later."""


STANDSTILL = 15
"""Number of calls in a row at which no byte had arrived on a host that is stuck: its disk may hang.
What such a host has is not missed, and a host that is only slow is avoided earlier."""


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
        self._arrived: Mapping[str, int] = {}
        self._stood: Counter[str] = Counter()  # calls since the last byte arrived

    def find(self, arrived: Mapping[str, int], incomplete: Set[str]) -> set[str]:
        """Return hosts that have become slow; to be called about once a second.

        A host is slow if three quarters of the others had ``SLOWER`` times as many bytes at two
        calls in a row, or at more, and more bytes arrived on it since the first of these, or none
        at ``STANDSTILL`` calls although it lacks some. None arrive on a host that has all, although
        it may have had most of them before the delivery.

        Args:
            arrived: number of bytes that have arrived on each host, by name.
            incomplete: hosts that lack bytes.
        """
        ordered = sorted(arrived.values())
        others = ordered[1 + (len(ordered) - 1) // 4] if len(ordered) > 1 else 0
        behind = {
            name
            for name, size in arrived.items()
            if others >= self._least and size * SLOWER < others
        }
        stood = {name for name in incomplete if arrived[name] == self._arrived.get(name)}
        self._stood = Counter({name: self._stood[name] + 1 for name in stood})
        self._arrived = dict(arrived)
        slow = {
            name
            for name in behind - self.found
            if arrived[name] > self._suspects.get(name, arrived[name])
            or self._stood[name] >= STANDSTILL
        }
        self._suspects = {n: self._suspects.get(n, arrived[n]) for n in behind}
        self.found |= slow
        return slow
