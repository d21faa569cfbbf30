"""Images of registries: pulled once, and kept as files."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from wheelmount.containers import apptainer
from wheelmount.containers.image import lock
from wheelmount.progress import Progress
from wheelmount.wheels.scratch import scratch, write_whole

SCHEMES = "docker://", "library://", "oras://"
"""What references to images of registries begin with, as apptainer takes them."""

FILE = "img.sif"
"""The image in a directory of its own."""

_NOTE = "reference"


def folder_of(reference: str, place: Path) -> Path:
    """The directory of a pulled image.

    Args:
        reference: what it was pulled by.
        place: directory of all of them.
    """
    return place / blake3(reference.encode()).hexdigest(16)


def pull(reference: str, place: Path, progress: Progress, *, anew: bool = False) -> Path:
    """Have an image of a registry here.

    Args:
        reference: what apptainer calls it: ``docker://python:3.12-slim``.
        place: directory of all that were pulled.
        progress: told about it, if it is not there.
        anew: pull it although it is there: a tag may have come to mean another image.

    Returns:
        The file.

    Raises:
        ContainerError: it cannot be had; one that was there before still is.
        UnavailableError: apptainer is missing.
    """
    folder = folder_of(reference, place)
    sif = folder / FILE
    with lock(folder, progress):
        if sif.is_file() and not anew:
            return sif
        with (
            progress.task("pull", unit="lines") as task,
            scratch(place) as fresh,
            scratch() as temporary,
        ):
            apptainer.pull(
                reference, fresh / FILE, scratch=temporary, on_line=lambda: task.advance(1)
            )
            folder.mkdir(exist_ok=True)
            write_whole(folder / _NOTE, reference.encode())
            (fresh / FILE).replace(sif)
            task.note(f"{reference}, {sif.stat().st_size / 1e6:.0f} MB")
    return sif
