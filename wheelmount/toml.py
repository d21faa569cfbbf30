"""Python's reader of TOML, which the package tomli is before Python 3.11."""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def loads(text: str) -> dict[str, Any]:
    """Read a text as TOML.

    Raises:
        tomllib.TOMLDecodeError: it is not TOML, or nested too deeply to be read.
    """
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from None
    return table
