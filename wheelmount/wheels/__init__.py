"""Wheels: targets, resolution, download, the wheelhouse, and the redirection of pip and uv to it."""
