"""Check and identify the file of an image."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from wheelmount.errors import SourceError


def check(image: Path) -> None:
    """Check that an image exists and can be read.

    Raises:
        SourceError: it is missing or unreadable.
    """
    if not os.access(image, os.R_OK):
        raise SourceError(
            f"image {image} is missing or cannot be read",
            hint=f"build it: wheelmount image build python {shlex.quote(str(image))}",
        )


def identity(image: Path) -> str | None:
    """Return an id of an image that also differs between builds of one definition.

    Returns:
        The identifier in the head of a SIF, 32 digits; None if it is no SIF that can be read.
    """
    try:
        with image.open("rb") as file:
            head = file.read(64)
    except OSError:
        return None
    # https://github.com/sylabs/sif, pkg/sif/sif.go: 32 bytes to start it, 10 of magic, version and
    # architecture of 3 each, then a UUID.
    return head[48:64].hex() if head[32:41] == b"SIF_MAGIC" and len(head) == 64 else None
