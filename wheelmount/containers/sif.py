"""The file that an image is."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from wheelmount.errors import SourceError


def check(image: Path) -> None:
    """Make sure that an image is there.

    Raises:
        SourceError: it is not, or cannot be read.
    """
    if not os.access(image, os.R_OK):
        raise SourceError(
            f"image {image} is missing or cannot be read",
            hint=f"build it: wheelmount image build images/python.def {shlex.quote(str(image))}",
        )
