"""A wheel's archive: its metadata, and whether what it holds is what it says.

pip and uv are lenient, each in its own way: of two entries with one name pip takes the last and uv
the first, uv passes over a path that leads out of the environment without a word, and neither
compares a file with its hash in RECORD. A wheelhouse refuses all that, by name.
"""

from __future__ import annotations

import csv
import email.message
import email.parser
import hashlib
import posixpath
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from installer.sources import WheelFile
from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import parse_tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from wheelmount.errors import WheelError

CHUNK = 1 << 20
"""Bytes of a file read and hashed at a time."""

UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,
    ValueError,  # bad UTF-8 too
    NotImplementedError,
    RuntimeError,
    OSError,
)
"""What reading an archive that is cut, changed, encrypted or odd ends with."""

# Named like the interpreter of the environment, a script would take its place.
_INTERPRETER = re.compile(r"[^/]+\.data/scripts/python[\d.]*(?:\.exe)?", re.IGNORECASE)


def hash_file(file: Path, algorithm: str = "sha256") -> str:
    """The SHA-256, or another hash, of a file, in hexadecimal."""
    digest = hashlib.new(algorithm)
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def find_faults(
    file: Path, name: str | None = None, *, record: bool = True, contents: bool = True
) -> list[str]:
    """What is wrong with a wheel; empty where it is sound.

    Every entry of its archive stays inside, once; name, version and tags are those of the file's
    name; RECORD has all files that there are, and no others; and their contents have the sizes and
    hashes that it says. What comes first in this list and is wrong hides what comes later.

    Args:
        file: the wheel.
        name: its file name, where the file does not have that yet.
        record: whether RECORD has to be right; if not, the archive's own checksums do.
        contents: whether all of it is unpacked: some 50 MB of wheel a second, and a hundred times
            as much without.
    """
    name = name or file.name
    try:
        parse_wheel_filename(name)
    except InvalidWheelFilename as error:
        return [str(error)]
    try:
        with zipfile.ZipFile(file) as archive:
            archive.filename = name  # installer reads from it what the wheel is
            faults = list(_faults(archive, name))
            if not faults and record:
                faults += _wrong_record(archive, name, contents=contents)
            elif not faults and contents and (broken := archive.testzip()) is not None:
                faults.append(f"broken archive: {broken}")
            return faults
    except UNREADABLE as error:
        return [f"broken archive: {_one_line(error)}"]


def read_metadata(file: Path) -> bytes:
    """The bytes of a wheel's METADATA.

    Raises:
        WheelError: there is none that can be read, naming the wheel.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.read(f"{_dist_info(archive)}/METADATA")
    except UNREADABLE as error:
        raise WheelError(
            f"{file.name} has no metadata that can be read: {_one_line(error)}",
            hint="remove it and run wheelmount download again",
        ) from None


def parse_metadata(data: bytes) -> email.message.Message:
    """The headers of METADATA."""
    return email.parser.HeaderParser().parsestr(data.decode("utf-8", "replace"))


def requirements_of(file: Path) -> list[Requirement]:
    """What a wheel requires; nothing where its metadata can't be read."""
    try:
        headers = parse_metadata(read_metadata(file))
        return [Requirement(value) for value in headers.get_all("Requires-Dist", [])]
    except (WheelError, InvalidRequirement):
        return []


def _dist_info(archive: zipfile.ZipFile) -> str:
    # At the top level: packages that come with others inside have more of them further down.
    found = {path.partition("/")[0] for path in archive.namelist()}
    found = {top for top in found if top.endswith(".dist-info")}
    if len(found) != 1:
        raise ValueError(f"{len(found)} directories .dist-info instead of one")
    return found.pop()


def _faults(archive: zipfile.ZipFile, name: str) -> Iterator[str]:
    if all(entry.header_offset for entry in archive.infolist()):
        yield "there are other bytes before the archive"
    yield from _bad_paths(archive.namelist())
    yield from _other_identity(archive, _dist_info(archive), name)


def _wrong_record(archive: zipfile.ZipFile, name: str, *, contents: bool) -> Iterator[str]:
    try:
        WheelFile(archive).validate_record(validate_contents=contents)
    except WheelFile.validation_error as error:
        for issue in getattr(error, "issues", [str(error)]):
            yield issue.removeprefix(f"In {name}, ")
        return
    # installer looks only for what is there.
    lines = archive.read(f"{_dist_info(archive)}/RECORD").decode().splitlines()
    for path in sorted({row[0] for row in csv.reader(lines) if row} - set(archive.namelist())):
        yield f"{path} is mentioned in RECORD and not there"


def _bad_paths(paths: list[str]) -> Iterator[str]:
    for path, times in Counter(paths).items():
        if times > 1:
            yield f"{times} entries of the name {path!r}"
        # Backslashes are no separators here, but are to tools on other systems; no wheel has them.
        if path.startswith("/") or "\\" in path or ".." in path.split("/"):
            yield f"{path!r} leads out of the environment"
        if _INTERPRETER.fullmatch(path):
            yield f"{posixpath.basename(path)!r} would take the place of the interpreter"


def _other_identity(archive: zipfile.ZipFile, info: str, name: str) -> Iterator[str]:
    """What contradicts the file's name."""
    package, version, _, tags = parse_wheel_filename(name)
    metadata = parse_metadata(archive.read(f"{info}/METADATA"))
    its_name, its_version = metadata.get("Name", ""), metadata.get("Version", "")
    if canonicalize_name(its_name) != package:
        yield f"METADATA has the name {its_name!r}"
    found = None
    with suppress(InvalidVersion):
        found = Version(its_version)
    if found != version:
        yield f"METADATA has the version {its_version!r}"
    wheel = parse_metadata(archive.read(f"{info}/WHEEL"))
    if wheel.get("Wheel-Version", "").partition(".")[0] != "1":
        yield f"WHEEL has the version {wheel.get('Wheel-Version', '')!r}, not 1"
    its_tags = {tag for text in wheel.get_all("Tag", []) for tag in parse_tag(text.strip())}
    # Not the platform: wheels are renamed for one without a new WHEEL, ray's and playwright's too.
    if not {(t.interpreter, t.abi) for t in its_tags} & {(t.interpreter, t.abi) for t in tags}:
        yield f"WHEEL has the tags {', '.join(sorted(map(str, its_tags))) or 'none'}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
