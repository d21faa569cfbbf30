"""Read the requirements in a script (inline script metadata, PEP 723)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from wheelmount import toml
from wheelmount.errors import InputError

_BLOCK = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")

_HINT = "see the specification: https://packaging.python.org/specifications/inline-script-metadata"


@dataclass(frozen=True, slots=True)
class Inline:
    """The metadata block of a script.

    Attributes:
        dependencies: PEP 508 requirements.
        requires_python: allowed versions of Python; empty for any.
        exclude_newer: value of ``--exclude-newer``; empty if not given.
    """

    dependencies: tuple[str, ...] = ()
    requires_python: str = ""
    exclude_newer: str = ""


def read(script: bytes) -> Inline | None:
    """Return the metadata of a script; None if it has none.

    Raises:
        InputError: the script has two metadata blocks, or an invalid one.
    """
    text = script.decode("utf-8", errors="replace").replace("\r\n", "\n")
    blocks = [one for one in _BLOCK.finditer(text) if one["type"] == "script"]
    if not blocks:
        return None
    if len(blocks) > 1:
        raise InputError("the script has its metadata twice", hint=_HINT)
    lines = blocks[0]["content"].splitlines()
    try:
        table = toml.loads("\n".join(line[2:] for line in lines))
        return _of(table)
    except (ValueError, TypeError, AttributeError) as error:  # of TOML and of packaging, too
        raise InputError(
            f"the script's metadata cannot be understood: {error}", hint=_HINT
        ) from None


def _of(table: dict[str, Any]) -> Inline:
    from packaging.requirements import Requirement  # here, as most scripts have no such block
    from packaging.specifiers import SpecifierSet

    settings = table.get("tool", {}).get("uv", {})
    if unknown := settings.keys() - {"exclude-newer"}:
        raise InputError(
            f"[tool.uv] of the script has {sorted(unknown)[0]}, which is not known here",
            hint="give indexes as options, and other sources as URLs in dependencies",
        )
    dependencies = table.get("dependencies", [])
    if not isinstance(dependencies, list):
        raise TypeError("dependencies is not a list")
    for text in map(str, dependencies):
        Requirement(text)  # no path, as what is there would be built as the user's own project
    required = str(table.get("requires-python", ""))
    SpecifierSet(required)
    newer = str(settings.get("exclude-newer", ""))
    return Inline(tuple(map(str, dependencies)), required, newer)
