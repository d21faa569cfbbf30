"""Serving a store at a mount point: a process of its own, its generations and its adapters."""
