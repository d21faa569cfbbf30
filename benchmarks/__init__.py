"""Benchmarks: how fast a mount is, next to native tmpfs and to other ways to show a tree."""
