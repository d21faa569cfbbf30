"""Decode JSON into dataclasses, each value of the type that its field names.

What is read may be damaged, or written by another program, or come from a host. ``msgspec``
compares the types: a constructor would take any value, and fail where the value is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def decode(text: str | bytes, kind: type[T]) -> T:
    """Decode JSON.

    Args:
        text: the JSON. Lone surrogates are kept: they are bytes of paths that are not UTF-8.
        kind: a dataclass, or another type that ``msgspec`` knows. Unknown fields are ignored.

    Raises:
        ValueError: the text is not JSON, or a value is missing or has another type.
    """
    try:
        return convert(json.loads(text), kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def convert(data: Any, kind: type[T]) -> T:
    """Make an object of what ``json.loads`` returned; see ``decode``."""
    try:
        return msgspec.convert(data, kind, dec_hook=_from_text)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _from_text(kind: type, value: Any) -> Path:
    if kind is not Path:
        raise NotImplementedError(f"{kind} in JSON")
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no path")
    return Path(value)
