"""Count the bytes that a host received, by the host that sent them and by transport.

Each block is counted by the transport that carried it. For ``RDMABuffer`` only Monarch knows
whether a device carried the block, and Monarch falls back to TCP silently unless that is forbidden.
The counters of the machine's devices are a second source; they include other traffic of that time.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from wheelmount import disk

CLIENT = ""
"""Stands for the client where the name of a host is expected."""

FILE = "delivery"
"""Name of a file in a mount's directory: traffic of its newest generation, for the status."""

RDMA, MESSAGES, TLS, TCP, LOCAL = "rdma", "messages", "tls", "tcp", "local"
"""Transports: ``RDMABuffer`` with devices at both ends; ``RDMABuffer`` without devices, sent in
messages of Monarch; encrypted streams over a network; plain streams; streams within a machine."""

SYS = Path("/sys")

WORD = 4
"""Unit of ``port_rcv_data``, in bytes: Documentation/ABI/stable/sysfs-class-infiniband."""


def rdma_received(sys: Path = SYS) -> int:
    """Return bytes received by ports of RDMA devices since the machine was started."""
    total = 0
    for counter in sys.glob("class/infiniband/*/ports/*/counters/port_rcv_data"):
        with contextlib.suppress(OSError, ValueError):  # a device without counters
            total += int(counter.read_text()) * WORD
    for counter in sys.glob("class/infiniband/*/ports/*/hw_counters/rx_bytes"):  # AWS's EFA
        with contextlib.suppress(OSError, ValueError):
            total += int(counter.read_text())
    return total


class Traffic:
    """Counts bytes of blocks that one host received and sent, as they were on the wire.

    Args:
        certain: whether bytes may travel by nothing but ``RDMABuffer`` with a device.

    Attributes:
        certain: the argument of that name.
    """

    def __init__(self, *, certain: bool = False) -> None:
        self.certain = certain
        self._reasons: dict[str, str] = {}
        self.sent = 0
        """Bytes sent to other hosts."""
        self.reused = 0
        """Bytes that were copied from other mounts of the host, and not sent."""
        self.kept = 0
        """Bytes that were copied from blocks of earlier mounts (``store_keep``), and not sent."""
        self._received: Counter[str] = Counter()
        self._ways: Counter[str] = Counter()
        self._before = rdma_received()

    def note(self, host: str, size: int, way: str) -> None:
        """Count bytes from a host, or from ``CLIENT``, by one of the transports above."""
        self._received[host] += size
        self._ways[way] += size

    def explain(self, host: str, reason: str) -> None:
        """Note why bytes from a host, or from ``CLIENT``, do not come by RDMA."""
        self._reasons[host] = reason

    def summary(self) -> dict[str, Any]:
        """Return the counts as a mapping for JSON; sizes in bytes.

        ``transport`` is the transport of most bytes (``none`` if no bytes arrived), ``ways`` the
        bytes by transport, ``received`` the bytes by host, ``sent``, ``reused`` and ``kept`` as
        above, ``devices`` the bytes that RDMA devices of the machine received meanwhile,
        ``certain`` as above, and ``reasons`` says by host why bytes did not come by RDMA though
        both ends have a device.
        """
        most = self._ways.most_common(1)
        return {
            "transport": most[0][0] if most else "none",
            "ways": dict(self._ways),
            "received": {host or "client": size for host, size in self._received.items()},
            "sent": self.sent,
            "reused": self.reused,
            "kept": self.kept,
            "devices": rdma_received() - self._before,
            "certain": self.certain,
            "reasons": {host or "client": why for host, why in self._reasons.items()},
        }

    def write(self, directory: Path) -> None:
        """Write the summary to a mount's directory, unless that is full or gone."""
        with contextlib.suppress(OSError):
            disk.write(directory / FILE, json.dumps(self.summary()))


def read(directory: Path) -> dict[str, Any] | None:
    """Read the summary from a mount's directory; None if there is none."""
    try:
        found: dict[str, Any] = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        return None
    return found


def describe(summary: dict[str, Any]) -> str:
    """Name for users the transports of the bytes, the most used first."""
    ways: dict[str, int] = summary["ways"]
    words = sorted(ways, key=lambda way: -ways[way])
    if RDMA in ways and not summary.get("certain") and summary["devices"] < ways[RDMA]:
        words[words.index(RDMA)] = f"{RDMA}, not counted by any device: Monarch may use TCP"
    text = " and ".join(words) or "none"
    if reasons := summary.get("reasons"):
        text += f" (no rdma from {'; '.join(': '.join(each) for each in reasons.items())})"
    return text
