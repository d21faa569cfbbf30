"""wheelmount: a package cache and container launcher for clusters."""

from wheelmount.mount.remote import RemoteMount, remotemount

__all__ = ["RemoteMount", "__version__", "remotemount"]
__version__ = "0.1.0"
