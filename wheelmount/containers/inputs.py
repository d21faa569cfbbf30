"""Inputs of an image from this machine: its definition, and the files that this names."""

from __future__ import annotations

import glob
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from blake3 import blake3

from wheelmount.errors import SourceError


def fingerprint(definition: Path, build_args: Mapping[str, str]) -> str:
    """Hash all inputs of an image from this machine.

    Files count by the names that the definition gives them, wherever the definition lies.

    Raises:
        SourceError: the definition, a file it copies or the image it starts from is missing.
    """
    try:
        text = definition.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SourceError(
            f"definition {definition} cannot be read: {reason}",
            hint="name one of wheelmount's own: wheelmount image build python",
        ) from None
    digest = blake3(text.encode())
    # Files count by their contents, see below.
    named = sources(text, build_args)
    plain = {name: value for name, value in build_args.items() if value not in named}
    digest.update(json.dumps(sorted(plain.items())).encode())
    for source in named:
        # Path.glob() takes no absolute patterns.
        found = sorted(glob.glob(source, root_dir=definition.parent))  # noqa: PTH207
        if not found:
            raise SourceError(
                f"{definition.name} needs {source}, which does not exist",
                hint=f"relative paths start at {definition.parent}; --build-arg gives others",
            )
        for name in found:
            top = definition.parent / name
            for file in _files(top):
                shown = f"{top.name}/{file.relative_to(top)}"
                digest.update(f"\0{shown}\0{file.lstat().st_mode}\0".encode())
                if file.is_file():
                    digest.update_mmap(file)
    return digest.hexdigest()


def sources(text: str, build_args: Mapping[str, str]) -> list[str]:
    """Return the paths and patterns of this machine that a definition starts from or copies.

    These are ``From`` after ``Bootstrap: localimage``, and ``%files``.
    """
    values: dict[str, str] = {}
    for line in _section(text, "%arguments"):
        name, found, value = line.partition("=")
        if found and not name.startswith("#"):
            values[name.strip()] = value.strip()
    values.update(build_args)
    filled = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda m: values.get(m[1], m[0]), text)
    words = [shlex.split(line, comments=True) for line in _section(filled, "%files")]
    return [*_bases(filled), *(first for first, *_ in filter(None, words))]


def _bases(text: str) -> Iterator[str]:
    agent = ""
    for line in text.splitlines():
        name, found, value = line.partition(":")
        if found and name.strip().lower() == "bootstrap":
            agent = value.strip().lower()
        elif found and name.strip().lower() == "from" and agent == "localimage":
            yield value.strip()


def _section(text: str, name: str) -> Iterator[str]:
    """Yield the lines of a section; ``%files from STAGE`` is another, which copies in the build."""
    current = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("%"):
            current = line
        elif current == name:
            yield line


def _files(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        for inner in sorted(path.iterdir()):
            yield from _files(inner)
