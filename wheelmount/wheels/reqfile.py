"""Read the parts of requirements files (``requirements.txt``) that uv does not report.

uv reads these files completely. Its result lacks the hashes that pin files (``--hash``,
``--require-hashes``) and the indexes of packages, which are read here.
"""

from __future__ import annotations

import os
import re
import shlex
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from wheelmount.errors import InputError
from wheelmount.urls import without_credentials

_COMMENT = re.compile(r"(?:^|\s+)#.*$")
_CONTINUED = re.compile(r"\\[ \t]*\r?\n")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_OPTION = re.compile(r"\s--?[a-z]")
_HASH = re.compile(r"\s--hash(?:=|\s+)(\S+)")

INDEX_OPTIONS = ("--index-url", "--extra-index-url", "--find-links")
"""Options that say where packages are looked for."""

# Short forms of the options that are read.
_LONG = {"-r": "--requirement", "-c": "--constraint", "-i": "--index-url", "-f": "--find-links"}


@dataclass(frozen=True, slots=True)
class Line:
    """A requirement or an option in a file.

    Attributes:
        file: the file that contains it.
        option: the option's long form, such as ``--index-url``; empty for a requirement.
        text: the value of the option, or the requirement without options of its own.
        hashes: value of each ``--hash`` in lower case, ``ALGORITHM:HEX`` if it is well formed.
    """

    file: Path
    option: str
    text: str
    hashes: frozenset[str] = frozenset()

    def requirement(self) -> Requirement | None:
        """Return the requirement, ``NAME @ LOCATION`` for a path or the URL of a file.

        None if the name of the package is unknown.
        """
        with suppress(InvalidRequirement):
            return Requirement(self.text)
        location = self.text.partition(" ;")[0].strip()
        path, _, fragment = location.partition("#")
        filename = unquote(path.partition("?")[0].rpartition("/")[2])
        name = dict(parse_qsl(fragment)).get("egg", "")
        with suppress(InvalidWheelFilename):
            name = parse_wheel_filename(filename)[0]
        with suppress(InvalidSdistFilename):
            name = parse_sdist_filename(filename)[0]
        with suppress(InvalidRequirement):
            return Requirement(f"{name} @ {quote(location, safe='/:#?&=%@+')}")
        return None


def read_lines(files: Iterable[Path]) -> Iterator[Line]:
    """Yield all requirements and options of files, and of the files that they name.

    Unreadable files are skipped: uv reports them.
    """
    seen: set[Path] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        try:
            lines = [line for line, _ in _logical_lines(file)]
        except OSError:
            continue
        for line in lines:
            if line.option in ("--requirement", "--constraint") and "://" not in line.text:
                waiting.append((file.parent / line.text).absolute())
            yield line


def expanded(text: bytes) -> bytes:
    """Return the text of a file with the values of its variables, but without credentials."""
    found = text.decode("utf-8-sig", errors="surrogateescape")
    plain = without_credentials(_VARIABLE.sub(_value, found))
    return plain.encode(errors="surrogateescape")


def rewrite(file: Path, changes: Mapping[Line, str], folder: Path) -> Path:
    """Copy a file of requirements, and the files that it names, with some lines changed.

    Args:
        file: the original.
        changes: new texts of changed requirements.
        folder: a private directory for the copies, which may hold credentials.

    Returns:
        The copy.
    """
    copies: dict[Path, Path] = {}

    def copy(original: Path) -> Path:
        if original in copies:  # files may name each other
            return copies[original]
        made = copies[original] = folder / uuid.uuid4().hex / original.name
        made.parent.mkdir()
        lines = []
        for line, text in _logical_lines(original):
            path = _path_of(line)
            if line in changes:
                text = changes[line]
            elif path and line.option != "--find-links":
                text = f"{line.option} {copy((original.parent / path).absolute())}"
            elif path:
                text = f"{line.option} {(original.parent / path).absolute()}"
            lines.append(f"{text}\n")
        made.write_text("".join(lines), encoding="utf-8")
        return made

    return copy(file)


def indexes(files: Iterable[Path], folder: Path) -> Path:
    """Copy only the options that say where packages are looked for.

    Args:
        files: files of requirements.
        folder: a private directory for the copy, which may hold credentials.

    Returns:
        The copy: one file of requirements.
    """
    made = folder / f"{uuid.uuid4().hex}.txt"
    options = [line for line in read_lines(files) if line.option in (*INDEX_OPTIONS, "--no-index")]
    texts = [f"{line.option} {_anchored(line, line.file.parent)}".strip() for line in options]
    made.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return made


def anchored(file: Path, folder: Path) -> str:
    """Return the text of a file of requirements, with absolute paths of the files that it names.

    Args:
        file: the file.
        folder: directory that its relative paths start at.
    """
    lines = []
    for line, text in _logical_lines(file):
        lines.append(f"{line.option} {_anchored(line, folder)}" if _path_of(line) else text)
    return "".join(f"{line}\n" for line in lines)


def _anchored(line: Line, folder: Path) -> str:
    """Return the value of an option, with the absolute path if it names one."""
    path = _path_of(line)
    return str((folder / path).absolute()) if path else line.text


def _path_of(line: Line) -> str:
    """Return the path that an option names, relative to its file; empty if it names none."""
    named = line.option in ("--requirement", "--constraint", "--find-links")
    return line.text if named and "://" not in line.text else ""


def _logical_lines(file: Path) -> Iterator[tuple[Line, str]]:
    """Yield each requirement and option of one file, parsed and as written."""
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    for plain in _CONTINUED.sub(" ", text).splitlines():
        line = _parse(file, _VARIABLE.sub(_value, _COMMENT.sub("", plain)).strip())
        if line is not None:
            yield line, plain


def _parse(file: Path, text: str) -> Line | None:
    if not text:
        return None
    if not text.startswith("-"):
        end = _OPTION.search(text)
        hashes = frozenset(one.strip("\"'").lower() for one in _HASH.findall(text))
        return Line(file, "", text[: end.start()].strip() if end else text, hashes)
    name, value = text, ""
    if text.startswith("--"):
        name, _, value = re.sub(r"[=\s]\s*", "\0", text, count=1).partition("\0")
    else:
        name, value = _LONG.get(text[:2], text[:2]), text[2:].lstrip("= ")
    try:
        value = " ".join(shlex.split(value))
    except ValueError:  # an apostrophe, an ordinary character here
        value = value.strip()
    return Line(file, name, value)


def _value(found: re.Match[str]) -> str:
    return os.environ.get(found[1]) or found[0]


def name_of(line: Line) -> str:
    """Return the normalized name of the package that a line with hashes pins.

    Raises:
        InputError: the line does not name it.
    """
    requirement = line.requirement()
    if requirement is None:
        raise InputError(
            f"{line.file} pins {line.text!r} by a hash, without the name of its package",
            hint="write NAME @ URL --hash=…",
        )
    return canonicalize_name(requirement.name)
