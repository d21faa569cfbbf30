"""wheelmount: a package cache and container launcher for clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wheelmount.cluster import Cluster
    from wheelmount.mount.client.remote import RemoteMount, remotemount

__version__ = "0.1.0"
__all__ = ["Cluster", "RemoteMount", "__version__", "remotemount"]


def __getattr__(name: str) -> Any:
    # Imported on first use: a serving process does not need it, and starts twice as fast without.
    if name in ("RemoteMount", "remotemount"):
        from wheelmount.mount.client import remote

        return getattr(remote, name)
    if name == "Cluster":
        from wheelmount.cluster import Cluster

        return Cluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
