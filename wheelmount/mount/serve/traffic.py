"""Counts of bytes that a host received: from which host, and by which way.

Each block is counted by the way it took. For ``RDMABuffer`` only Monarch knows whether a device
carried it, and unless it is forbidden, it falls back to TCP silently. The counters of the machine's
devices are a second witness, which includes other traffic of that time.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

CLIENT = ""
"""The client, in place of a host's name."""

FILE = "delivery"
"""Name of a file in a mount's directory: traffic of its newest generation, for the status."""

RDMA, MESSAGES, TLS, TCP, LOCAL = "rdma", "messages", "tls", "tcp", "local"
"""Ways: ``RDMABuffer`` with devices at both ends, and without, when it is sent in messages of
Monarch; streams over a network, encrypted or not; streams between processes of one machine."""

SYS = Path("/sys")

WORD = 4
"""Bytes that ``port_rcv_data`` counts by: Documentation/ABI/stable/sysfs-class-infiniband."""


def rdma_received(sys: Path = SYS) -> int:
    """Return bytes received by ports of RDMA devices since the machine was started."""
    total = 0
    for counter in sys.glob("class/infiniband/*/ports/*/counters/port_rcv_data"):
        with contextlib.suppress(OSError, ValueError):  # a device without counters
            total += int(counter.read_text()) * WORD
    for counter in sys.glob("class/infiniband/*/ports/*/hw_counters/rx_bytes"):  # of EFA
        with contextlib.suppress(OSError, ValueError):
            total += int(counter.read_text())
    return total


class Traffic:
    """Counts bytes of blocks that one host received and sent, as they were on the wire.

    Args:
        certain: whether ``RDMABuffer`` has no other way than a device.
    """

    def __init__(self, *, certain: bool = False) -> None:
        self._certain = certain
        self._reasons: dict[str, str] = {}
        self.sent = 0
        """Bytes sent to other hosts."""
        self.reused = 0
        """Bytes that were copied from other mounts of the host, and not sent."""
        self._received: Counter[str] = Counter()
        self._ways: Counter[str] = Counter()
        self._before = rdma_received()

    def note(self, host: str, size: int, way: str) -> None:
        """Count bytes from a host, or from ``CLIENT``, by one of the ways above."""
        self._received[host] += size
        self._ways[way] += size

    def explain(self, host: str, reason: str) -> None:
        """Note why bytes from a host, or from ``CLIENT``, do not come by RDMA."""
        self._reasons[host] = reason

    def summary(self) -> dict[str, Any]:
        """Return ``transport`` (the way of most bytes, ``none`` if no bytes arrived),
        ``ways``, ``received`` by host, ``sent``, ``reused``, and ``devices`` (what RDMA devices of
        the machine received meanwhile), all in bytes; ``certain`` as above; and ``reasons`` by
        host, why bytes did not come by RDMA though both ends have a device."""
        most = self._ways.most_common(1)
        return {
            "transport": most[0][0] if most else "none",
            "ways": dict(self._ways),
            "received": {host or "client": size for host, size in self._received.items()},
            "sent": self.sent,
            "reused": self.reused,
            "devices": rdma_received() - self._before,
            "certain": self._certain,
            "reasons": {host or "client": why for host, why in self._reasons.items()},
        }

    def write(self, directory: Path) -> None:
        """Write the summary to a mount's directory, if that still exists."""
        new = directory / f"{FILE}.new"
        with contextlib.suppress(FileNotFoundError):
            new.write_text(json.dumps(self.summary()))
            new.replace(directory / FILE)


def read(directory: Path) -> dict[str, Any] | None:
    """Read what ``Traffic.write`` wrote; None if it wrote nothing."""
    try:
        found: dict[str, Any] = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        return None
    return found


def describe(summary: dict[str, Any]) -> str:
    """Describe for users by which ways bytes arrived, the most used first."""
    ways: dict[str, int] = summary["ways"]
    words = sorted(ways, key=lambda way: -ways[way])
    if RDMA in ways and not summary.get("certain") and summary["devices"] < ways[RDMA]:
        words[words.index(RDMA)] = f"{RDMA}, not counted by any device: Monarch may use TCP"
    text = " and ".join(words) or "none"
    if reasons := summary.get("reasons"):
        text += f" (no rdma from {'; '.join(': '.join(each) for each in reasons.items())})"
    return text
