"""Offline apptainer containers: images, overlays, binds."""
