"""The version of Linux that this machine runs."""

from __future__ import annotations

import os
import re

BENEATH = 6, 5
"""First version that can mount beneath another mount, and so replace a mount in one step."""


def version() -> tuple[int, int]:
    """Return the first two numbers of the version; zeros if it has an unknown form."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))
