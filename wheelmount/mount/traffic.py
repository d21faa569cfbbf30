"""What a host received and from whom, and which transport it came by.

The transport is told from what the machine itself counted meanwhile, not from what was meant to be
used: Monarch falls back from verbs to TCP without a word. The counters are those of the whole
machine (of its network namespace, for TCP), so what else travels at that time counts too.
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

SYS = Path("/sys")
PROC = Path("/proc")

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


def network_received(proc: Path = PROC) -> int:
    """Bytes that came in at network interfaces, the loopback's among them; see proc_net(5)."""
    lines = (proc / "net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[0]) for line in lines)


class Traffic:
    """Bytes of blocks that one host got and gave; compressed ones as they travelled."""

    def __init__(self) -> None:
        self.sent = 0
        """Bytes given to other hosts."""
        self.reused = 0
        """Bytes that need not travel: other mounts had them here."""
        self._received: Counter[str] = Counter()
        self._before = rdma_received(), network_received()

    def note(self, host: str, size: int) -> None:
        """So many bytes came from a host, or from ``CLIENT``."""
        self._received[host] += size

    def summary(self) -> dict[str, Any]:
        """For people and programs: ``transport``, ``received`` by host, ``sent``, ``reused``, and
        what the machine counted meanwhile; all in bytes."""
        rdma = rdma_received() - self._before[0]
        network = network_received() - self._before[1]
        return {
            "transport": transport(sum(self._received.values()), rdma, network),
            "received": {host or "client": size for host, size in self._received.items()},
            "sent": self.sent,
            "reused": self.reused,
            "counted": {"rdma": rdma, "network": network},
        }

    def write(self, directory: Path) -> None:
        """Leave the summary in a mount's directory, if that is still there."""
        new = directory / f"{FILE}.new"
        with contextlib.suppress(FileNotFoundError):
            new.write_text(json.dumps(self.summary()))
            new.replace(directory / FILE)


def transport(received: int, rdma: int, network: int) -> str:
    """By what bytes came, judged by what the machine counted meanwhile.

    Args:
        received: bytes that came.
        rdma: bytes that came in at RDMA devices.
        network: bytes that came in at network interfaces.

    Returns:
        ``rdma``, ``tcp``, ``local`` (sockets of one machine, which nothing counts), or ``none``.
    """
    if not received:
        return "none"
    if rdma >= received:
        return "rdma"
    return "tcp" if network >= received else "local"


def read(directory: Path) -> dict[str, Any] | None:
    """What ``Traffic.write`` left, if anything."""
    try:
        found: dict[str, Any] = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        return None
    return found
