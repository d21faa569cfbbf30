"""Inputs of an image from this machine: its definition, and the files that this names."""

from __future__ import annotations

import glob
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from wheelmount.errors import SourceError

_ARCHIVES = "docker-archive", "oci", "oci-archive"
"""Values of ``Bootstrap`` after which ``From`` is a path of this machine, and a name in it."""


def fingerprint(definition: Path, build_args: Mapping[str, str]) -> str:
    """Hash all inputs of an image from this machine.

    Files count by the names that the definition gives them, wherever the definition lies. An image
    that docker has cannot be seen here: with one, no two results are equal.

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
    places = {each.path for each in named}
    plain = {name: value for name, value in build_args.items() if value not in places}
    digest.update(json.dumps(sorted(plain.items())).encode())
    for source in named:
        if source.unseen:
            digest.update(secrets.token_bytes())
            continue
        # Path.glob() takes no absolute patterns.
        found = sorted(glob.glob(source.path, root_dir=definition.parent))  # noqa: PTH207
        if not found:
            raise SourceError(
                f"{definition.name} needs {source.path}, which does not exist",
                hint=f"relative paths start at {definition.parent}; --build-arg gives others",
            )
        for name in found:
            top = definition.parent / name
            for file in _files(top, follow=source.copied):
                shown = f"{top.name}/{file.relative_to(top)}"
                mode = (file.stat() if file.exists() else file.lstat()).st_mode
                digest.update(b"\0%b\0%d\0" % (os.fsencode(shown), mode))
                if file.is_file():
                    digest.update_mmap(file)
    return digest.hexdigest()


_WORD = re.compile(r"""[^\s"']+|"[^"]*"|'[^']*""")
"""A word of a line of ``%files``, as apptainer finds it: only double quotes protect spaces."""


class Source(NamedTuple):
    """Something of this machine that an image is made of.

    Attributes:
        path: a path, or a pattern of paths.
        copied: whether it is copied by ``%files``, with what links in it lead to.
        unseen: whether it is in no file that could be read, such as an image that docker has.
    """

    path: str
    copied: bool = False
    unseen: bool = False


def sources(text: str, build_args: Mapping[str, str]) -> list[Source]:
    """Return what a definition starts from or copies of this machine.

    These are ``From`` after a ``Bootstrap`` that names an image here, ``%files`` and ``%appfiles``.
    """
    values: dict[str, str] = {}
    for line in _section(text, "%arguments"):
        name, found, value = line.partition("=")
        if found and not name.startswith("#"):
            values[name.strip()] = value.strip()
    values.update(build_args)
    filled = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda m: values.get(m[1], m[0]), text)
    lines = [*_section(filled, "%files"), *_section(filled, "%appfiles")]
    words = [_WORD.findall(line) for line in lines if not line.startswith("#")]
    copied = (Source(first.strip('"'), copied=True) for first, *_ in filter(None, words))
    return [*_bases(filled), *copied]


def _bases(text: str) -> Iterator[Source]:
    agent = ""
    for line in text.splitlines():
        name, found, value = line.partition("#")[0].partition(":")
        key, value = name.strip().lower(), value.strip()
        if found and key == "bootstrap":
            agent = value.lower()
        elif found and key == "from" and agent == "localimage":
            yield Source(value)
        elif found and key == "from" and agent in _ARCHIVES:
            yield Source(value.partition(":")[0])  # the image's name in it may follow
        elif found and key == "from" and agent == "docker-daemon":
            yield Source(value, unseen=True)


def _section(text: str, name: str) -> Iterator[str]:
    """Yield the lines of all sections of a name.

    ``%files from STAGE`` is another one, which copies in the build.
    """
    inside = False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("%"):
            section, *rest = line.split()
            inside = section.lower() == name and not (len(rest) == 2 and rest[0] == "from")
        elif inside:
            yield line


def _files(path: Path, *, follow: bool, above: Sequence[tuple[int, int]] = ()) -> Iterator[Path]:
    """Yield a path, and all below it; if ``follow``, also what is reached by links, as by cp -L."""
    yield path
    if path.is_dir() and (follow or not above or not path.is_symlink()):
        found = path.stat()
        own = found.st_dev, found.st_ino
        if own not in above:  # a link to a directory above it has no end
            for inner in sorted(path.iterdir()):
                yield from _files(inner, follow=follow, above=[*above, own])
