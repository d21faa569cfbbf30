"""RDMA devices of this machine, as Monarch sees them."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

CLAIMED = {"mlx5_core", "efa"}
"""Drivers of the devices that Monarch uses; beside others it goes over TCP without a word."""

LIBRARIES = "libibverbs.so.1", "libmlx5.so.1"
"""What it loads for that."""

SYS = Path("/sys")


def devices(sys: Path = SYS) -> dict[str, str]:
    """Devices by name, each with its driver."""
    return {path.name: _driver(path) for path in sorted(sys.glob("class/infiniband/*"))}


def missing() -> list[str]:
    """Libraries that are not installed."""
    return [name for name in LIBRARIES if not _loads(name)]


@functools.cache
def usable(sys: Path = SYS) -> bool:
    """Whether Monarch's transfers use a device here."""
    return bool(CLAIMED.intersection(devices(sys).values())) and not missing()


def _driver(device: Path) -> str:
    link = device / "device" / "driver"
    return link.resolve().name if link.exists() else "no hardware"


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
