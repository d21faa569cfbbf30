"""Wheels: targets, resolution, download, the wheelhouse, and pip and uv pointed at it."""
