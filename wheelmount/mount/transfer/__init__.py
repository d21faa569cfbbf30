"""Blocks between hosts: offered, fetched, compressed, passed on."""
