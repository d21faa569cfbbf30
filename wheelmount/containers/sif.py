"""Check and identify the file of an image."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from blake3 import blake3

from wheelmount.errors import SourceError

NONE = "0" * 32
"""The identifier of a reproducible build."""

_EDGE = 1 << 20
"""Bytes of the beginning and of the end of an image that tell it from another."""

_BLOCK, _BLOCKS = 16 << 10, 64
"""Size and number of the blocks between them that do so, too."""


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
        32 digits: the identifier in the head of a SIF, or, of a reproducible build, which has none,
        a hash of the file's size, beginning and end and of blocks between them, which nearly always
        differs; None if it is no SIF that can be read.
    """
    try:
        with image.open("rb") as file:
            head = file.read(64)
            # https://github.com/sylabs/sif, pkg/sif/sif.go: 32 bytes to start it, 10 of magic,
            # version and architecture of 3 each, then a UUID.
            if head[32:41] != b"SIF_MAGIC" or len(head) < 64:
                return None
            if any(head[48:64]):
                return head[48:64].hex()
            # All of it would take too long where it is large. Sizes and places of what it holds
            # are at the beginning; at the end are those of files in its file system (squashfs). The
            # blocks between tell files of the same compressed size apart, if they are large.
            digest = blake3(head + file.read(_EDGE))
            size = file.seek(0, os.SEEK_END)
            for number in range(_BLOCKS):
                file.seek(size * (number + 1) // (_BLOCKS + 1))
                digest.update(file.read(_BLOCK))
            file.seek(max(0, size - _EDGE))
            return digest.update(b"%d " % size + file.read()).hexdigest(16)
    except OSError:
        return None
