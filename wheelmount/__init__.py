"""wheelmount: a package cache and container launcher for clusters."""

__version__ = "0.1.0"
