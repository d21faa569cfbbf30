"""Hosts: where they come from, all through Monarch."""
