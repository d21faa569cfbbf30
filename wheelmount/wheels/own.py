"""Find the directories with the user's own code: those named by files that the user gave.

The metadata of a wheel, or a file that came from a URL, may also name directories of this machine.
These come from strangers, so directories that they name are built in a sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement

from wheelmount import toml
from wheelmount.errors import InputError
from wheelmount.wheels.given import is_fetched
from wheelmount.wheels.reqfile import read_lines
from wheelmount.wheels.requirements import split_url
from wheelmount.wheels.uvsettings import PROJECT_NAME
from wheelmount.wheels.wanted import Wanted

_MALFORMED = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    InvalidRequirement,
    InputError,
)
"""What a ``pyproject.toml`` that uv takes none of may raise."""


def own_directories(wanted: Wanted) -> set[Path]:
    """Return directories of projects that files of requirements and of projects name.

    Those name others in turn, as uv follows them: paths and members of a workspace in
    ``[tool.uv.sources]``, and URLs of directories among dependencies.

    Args:
        wanted: what was asked for; what its lock names is not looked at.
    """
    waiting: list[Path] = []
    files = [each for each in (*wanted.files, *wanted.override_files) if not is_fetched(each)]
    for file in files:
        if file.name == PROJECT_NAME:
            waiting += _named_by(file)
        elif file != wanted.lock:
            for line in read_lines([file]):
                if line.option in ("", "-e", "--editable"):
                    waiting += _directories(line.text, Path.cwd(), line.file.parent)
    found: set[Path] = set()
    while waiting:
        folder = waiting.pop().resolve()
        if folder not in found and folder.is_dir():
            found.add(folder)
            waiting += _named_by(folder / PROJECT_NAME)
    return found


def _directories(text: str, *bases: Path) -> Iterator[Path]:
    """The directories that a line of a file may mean."""
    with suppress(InvalidRequirement):
        text = Requirement(text).url or ""
    location = text.partition(" ;")[0].partition("#")[0].partition("[")[0].strip()
    if location.startswith("file:"):
        location = unquote(split_url(location).path)
    if location and "://" not in location:
        yield from (base / location for base in bases)


def _named_by(file: Path) -> Iterator[Path]:
    with suppress(*_MALFORMED):
        table = toml.read(file) or {}
        for text in _dependencies(table):
            if (url := Requirement(text).url) and url.startswith("file:"):
                yield from _directories(url, file.parent)
        for entries in table.get("tool", {}).get("uv", {}).get("sources", {}).values():
            for entry in entries if isinstance(entries, list) else [entries]:
                if "path" in entry:
                    yield file.parent / entry["path"]
                if entry.get("workspace"):
                    yield from _members(file.parent)


def _dependencies(table: dict[str, Any]) -> Iterator[str]:
    project = table.get("project", {})
    groups = (project.get("optional-dependencies", {}), table.get("dependency-groups", {}))
    for texts in (
        project.get("dependencies", ()),
        *(t for group in groups for t in group.values()),
    ):
        yield from (text for text in texts if isinstance(text, str))


def _members(folder: Path) -> Iterator[Path]:
    """The members of the workspace that a project is in."""
    for root in (folder, *folder.parents):
        with suppress(*_MALFORMED):
            table = toml.read(root / PROJECT_NAME) or {}
            patterns = table["tool"]["uv"]["workspace"]["members"]
            yield from (path for pattern in patterns for path in root.glob(pattern))
            return
