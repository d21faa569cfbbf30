"""What a host received: from whom, and by which way.

Each block is counted by the way that it took. Of ``RDMABuffer`` only Monarch knows whether a device
carried it, and it falls back to TCP without a word; there the counters of the machine's devices are
a second witness, which cannot tell what else travels at that time.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

CLIENT = ""
"""Stands for the client where others have names."""

FILE = "delivery"
"""Name of a file in a mount's directory: the traffic of its newest generation, for the status."""

RDMA, MESSAGES, TLS, TCP, LOCAL = "rdma", "messages", "tls", "tcp", "local"
"""Ways: ``RDMABuffer`` where both ends have a device, and where not, which is in messages of
Monarch; streams over a network, encrypted or not; streams between processes of one machine."""

SYS = Path("/sys")

WORD = 4
"""Bytes that ``port_rcv_data`` counts by: Documentation/ABI/stable/sysfs-class-infiniband."""


def rdma_received(sys: Path = SYS) -> int:
    """Bytes that came in at ports of RDMA devices since the machine was started."""
    total = 0
    for counter in sys.glob("class/infiniband/*/ports/*/counters/port_rcv_data"):
        with contextlib.suppress(OSError, ValueError):  # a device that does not count
            total += int(counter.read_text()) * WORD
    for counter in sys.glob("class/infiniband/*/ports/*/hw_counters/rx_bytes"):  # of EFA
        with contextlib.suppress(OSError, ValueError):
            total += int(counter.read_text())
    return total


class Traffic:
    """Bytes of blocks that one host got and gave; compressed ones as they travelled."""

    def __init__(self) -> None:
        self.sent = 0
        """Bytes given to other hosts."""
        self.reused = 0
        """Bytes that need not travel: other mounts had them here."""
        self._received: Counter[str] = Counter()
        self._ways: Counter[str] = Counter()
        self._before = rdma_received()

    def note(self, host: str, size: int, way: str) -> None:
        """So many bytes came from a host, or from ``CLIENT``, by one of the ways above."""
        self._received[host] += size
        self._ways[way] += size

    def summary(self) -> dict[str, Any]:
        """For people and programs: ``transport`` (the way of most bytes, ``none`` if nothing came),
        ``ways``, ``received`` by host, ``sent``, ``reused``, and ``devices`` (what RDMA devices of
        the machine received meanwhile); all in bytes."""
        most = self._ways.most_common(1)
        return {
            "transport": most[0][0] if most else "none",
            "ways": dict(self._ways),
            "received": {host or "client": size for host, size in self._received.items()},
            "sent": self.sent,
            "reused": self.reused,
            "devices": rdma_received() - self._before,
        }

    def write(self, directory: Path) -> None:
        """Leave the summary in a mount's directory, if that is still there."""
        new = directory / f"{FILE}.new"
        with contextlib.suppress(FileNotFoundError):
            new.write_text(json.dumps(self.summary()))
            new.replace(directory / FILE)


def read(directory: Path) -> dict[str, Any] | None:
    """What ``Traffic.write`` left, if anything."""
    try:
        found: dict[str, Any] = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        return None
    return found


def describe(summary: dict[str, Any]) -> str:
    """By which ways bytes came, for people, that of most of them first."""
    ways: dict[str, int] = summary["ways"]
    words = sorted(ways, key=lambda way: -ways[way])
    if RDMA in ways and summary["devices"] < ways[RDMA]:
        words[words.index(RDMA)] = f"{RDMA}, not counted by any device: Monarch may use TCP"
    return " and ".join(words) or "none"
