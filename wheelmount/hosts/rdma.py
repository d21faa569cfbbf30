"""RDMA devices of this machine, as Monarch sees them."""

from __future__ import annotations

import functools
from pathlib import Path

CLAIMED = {"mlx5_core", "efa"}
"""Drivers of the devices that Monarch takes."""

SYS = Path("/sys")


def devices(sys: Path = SYS) -> dict[str, str]:
    """Devices by name, each with its driver."""
    return {path.name: _driver(path) for path in sorted(sys.glob("class/infiniband/*"))}


@functools.cache
def usable() -> bool:
    """Whether Monarch has a device here for its transfers, as it says itself."""
    if not devices():
        return False
    from monarch.rdma import is_ibverbs_available

    return bool(is_ibverbs_available())


def _driver(device: Path) -> str:
    link = device / "device" / "driver"
    return link.resolve().name if link.exists() else "no hardware"
