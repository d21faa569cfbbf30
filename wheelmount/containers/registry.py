"""Pull images from registries once, and keep them as files."""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

from wheelmount import disk
from wheelmount.containers import apptainer
from wheelmount.containers.image import lock
from wheelmount.owned import FOLDER, make_folders
from wheelmount.progress import Progress
from wheelmount.trust import is_own
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
    folder = place / blake3(os.fsencode(reference)).hexdigest(16)
    sif = folder / FILE
    with lock(folder, progress):
        # Earlier versions made it so if the umask was 000 or 002: what is there may be of others.
        open_to_others = folder.is_dir() and not is_own(folder)
        if sif.is_file() and not anew and not open_to_others:
            return sif
        with (
            progress.task("pull", unit="line") as task,
            scratch(place) as fresh,
            scratch() as temporary,
        ):
            apptainer.pull(
                reference, fresh / FILE, scratch=temporary, on_line=lambda: task.advance(1)
            )
            make_folders(folder)
            if open_to_others:
                folder.chmod(FOLDER)
            disk.write(folder / _NOTE, os.fsencode(reference))
            (fresh / FILE).replace(sif)
            task.note(f"{reference}, {sif.stat().st_size / 1e6:.0f} MB")
    return sif
