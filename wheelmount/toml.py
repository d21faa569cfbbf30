"""Python's reader of TOML, which the package tomli is before Python 3.11."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from wheelmount import trust

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


def read(path: Path) -> dict[str, Any] | None:
    """Read a file as TOML; return None if there is no file.

    It is read as ``trust.read`` reads it: a pipe of another user is not waited for.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not TOML, or not UTF-8.
    """
    found = trust.read(path)
    return loads(found.content.decode()) if found else None
