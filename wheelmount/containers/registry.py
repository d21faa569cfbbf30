"""Pull images from registries once, and keep them as files."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from wheelmount import disk
from wheelmount.containers import apptainer
from wheelmount.containers.image import lock
from wheelmount.progress import Progress
from wheelmount.wheels.scratch import scratch

SCHEMES = "docker://", "library://", "oras://"
"""Prefixes of references to images in registries, in apptainer's notation."""

FILE = "img.sif"
"""Name of the image's file, in a directory for this image alone."""

_NOTE = "reference"


def pull(reference: str, place: Path, progress: Progress, *, anew: bool = False) -> Path:
    """Pull an image from a registry unless it is there; return its file.

    Args:
        reference: the image, in apptainer's notation: ``docker://python:3.12-slim``.
        place: directory of all pulled images.
        progress: informed of a pull.
        anew: pull even if the image is there: its tag may name another image by now.

    Raises:
        ContainerError: the image cannot be pulled; an earlier pull of it is kept.
        UnavailableError: apptainer is missing.
    """
    folder = place / blake3(reference.encode()).hexdigest(16)
    sif = folder / FILE
    with lock(folder, progress):
        if sif.is_file() and not anew:
            return sif
        with (
            progress.task("pull", unit="line") as task,
            scratch(place) as fresh,
            scratch() as temporary,
        ):
            apptainer.pull(
                reference, fresh / FILE, scratch=temporary, on_line=lambda: task.advance(1)
            )
            folder.mkdir(exist_ok=True)
            disk.write(folder / _NOTE, reference.encode())
            (fresh / FILE).replace(sif)
            task.note(f"{reference}, {sif.stat().st_size / 1e6:.0f} MB")
    return sif
