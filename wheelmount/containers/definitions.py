"""The definitions of images that come with the package, by their names."""

from __future__ import annotations

import re
from pathlib import Path

import wheelmount
from wheelmount.errors import InputError, SourceError

BASE = "python"
"""The image that others of them start from, where they take a ``base``."""

_PACKAGE = Path(wheelmount.__file__).parent


def place() -> Path:
    """Where they lie: in the package, or beside it in a checkout."""
    return next(
        (each for each in (_PACKAGE / "images", _PACKAGE.parent / "images") if each.is_dir()),
        _PACKAGE / "images",
    )


def names() -> list[str]:
    """What they are called."""
    return sorted(path.stem for path in place().glob("*.def"))


def find(name: str) -> Path:
    """The file of a definition.

    Args:
        name: of one that comes with the package, unless it is a path.

    Raises:
        InputError: there is none of that name.
    """
    given = Path(name)
    if given.exists() or given.suffix or len(given.parts) > 1:
        return given
    if name not in names():
        raise InputError(
            f"there is no definition {name}", hint=f"give a file, or one of {', '.join(names())}"
        )
    return place() / f"{name}.def"


def arguments(definition: Path) -> set[str]:
    """Names that a definition has values for, or wants: ``{{ base }}``."""
    try:
        return set(re.findall(r"\{\{\s*(\w+)\s*\}\}", definition.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return set()  # the build says what is wrong with it


def copy(name: str, directory: Path) -> list[Path]:
    """Write a definition that comes with the package, and the files that it copies, to be edited.

    Args:
        name: of the definition.
        directory: where to; made if it is not there.

    Returns:
        The files, that of the definition first.

    Raises:
        InputError: there is none of that name, or a file is there already.
        SourceError: it cannot be written.
    """
    definition = find(name)
    if definition.parent != place():
        raise InputError(f"{name} is a file already", hint=f"names are {', '.join(names())}")
    # Whatever it names beside itself or above is to be beside the copy.
    text = re.sub(r"\.\./(build/images/)?", "", definition.read_text(encoding="utf-8"))
    text = text.replace(f"images/{definition.name}", definition.name)
    beside = [definition.with_name("uv.toml"), definition.parent.parent / "pip.conf"]
    texts = {definition.name: text}
    texts |= {each.name: each.read_text() for each in beside if f" {each.name} " in text}
    written = [directory / file for file in texts]
    for path in written:
        if path.exists():
            raise InputError(f"{path} is there already", hint="name another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in written:
            path.write_text(texts[path.name], encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{directory} cannot be written to: {error.strerror}") from None
    return written
