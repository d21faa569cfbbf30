"""Find the definitions of images that come with the package."""

from __future__ import annotations

import re
from pathlib import Path

import wheelmount
from wheelmount import disk
from wheelmount.errors import InputError, SourceError
from wheelmount.owned import make_folders

BASE = "python"
"""The definition that others start from: those with a ``base``."""

_PACKAGE = Path(wheelmount.__file__).parent


def place() -> Path:
    """Return the directory of the definitions: in the package, or beside it in a checkout."""
    return next(
        (each for each in (_PACKAGE / "images", _PACKAGE.parent / "images") if each.is_dir()),
        _PACKAGE / "images",
    )


def names() -> list[str]:
    """Return the names of the definitions."""
    return sorted(path.stem for path in place().glob("*.def"))


def find(name: str) -> Path:
    """Return the file of a definition.

    Args:
        name: name of a definition of the package, or else a path. Whatever the working directory
            has, a name is that of the package; ``./NAME`` is a path.

    Raises:
        InputError: there is no definition of that name.
    """
    if name in names():
        return place() / f"{name}.def"
    given = Path(name)
    if given.exists() or given.suffix or len(given.parts) > 1:
        return given
    raise InputError(
        f"there is no definition {name}", hint=f"give a file, or one of {', '.join(names())}"
    )


def arguments(definition: Path) -> set[str]:
    """Return the names of a definition's build arguments, such as ``{{ base }}``."""
    try:
        return set(re.findall(r"\{\{\s*(\w+)\s*\}\}", definition.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return set()  # the build reports the fault


def copy(name: str, directory: Path) -> list[Path]:
    """Copy a definition of the package, and the files that it copies, to a directory for editing.

    Args:
        name: name of the definition.
        directory: directory for the copies; made if it is missing.

    Returns:
        The files, the definition first.

    Raises:
        InputError: there is no such definition, or one of the files exists already.
        SourceError: the directory cannot be written to.
    """
    definition = find(name)
    if definition.parent != place():
        raise InputError(f"{name} is a file already", hint=f"names are {', '.join(names())}")
    # Files beside the definition, or above it, are to be beside the copy.
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
        make_folders(directory)
        for path in written:
            disk.write(path, texts[path.name])
    except OSError as error:
        raise SourceError(f"{directory} cannot be written to: {error.strerror}") from None
    return written
