"""Serving a store at a mount point: the serving process, its generations and its adapters."""
