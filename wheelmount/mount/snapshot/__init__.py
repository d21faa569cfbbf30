"""Snapshots of the source directory: scanning, the tree, its blocks, and what changed since."""
