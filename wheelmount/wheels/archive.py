"""A wheel's archive: its metadata, and checks of its contents against them.

pip and uv are lenient, each in its own way: of two entries with one name pip takes the last and uv
the first, uv silently skips a path that leads out of the environment, and neither compares a file
with its hash in RECORD. A wheelhouse rejects such wheels, and names the fault.
"""

from __future__ import annotations

import configparser
import csv
import email.message
import email.parser
import hashlib
import os
import posixpath
import re
import struct
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

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
    struct.error,
    csv.Error,
    EOFError,
    LookupError,
    ValueError,  # bad UTF-8 too
    NotImplementedError,
    RuntimeError,
    AssertionError,  # of installer
    OSError,
)
"""Exceptions from reading an archive that is cut short, changed, encrypted or malformed."""

SCHEMES = frozenset({"purelib", "platlib", "headers", "scripts", "data"})
"""Schemes: the places of a wheel's files in an environment (binary distribution format)."""

LONGEST_NAME = 255
"""Longest name of a file, in bytes, on nearly every file system."""

LONGEST_PATH = 1024
"""Longest path in a wheel, in bytes: a quarter of Linux's limit."""

LARGE = 1 << 30
"""Bytes that any wheel may unpack to; beyond that, ``RATIO`` times the size of the wheel."""

RATIO = 100
"""Most times its own size that a large wheel may unpack to. Real wheels reach 20."""

_LARGEST_METADATA = 1 << 26

# Named like the interpreter of the environment, a script would take its place.
_INTERPRETER = re.compile(r"(?:python|pypy)w?[\d.]*t?(?:\.exe)?", re.IGNORECASE)

# What an environment has already, and no wheel may put a file in place of.
_OWN = re.compile(
    r"pyvenv\.cfg|bin|include|lib(?:64)?(?:/(?:python|pypy)[\d.]+t?(?:/site-packages)?)?"
)

_LIBRARY = re.compile(r"lib(?:64)?/(?:python|pypy)[\d.]+t?/site-packages/(.+)")

_ENTRY = re.compile(r"\w[\w.]*\s*:\s*\w[\w.]*\s*(?:\[[\w\s,.\-]*\])?")
_SCRIPT_SECTIONS = ("console_scripts", "gui_scripts")


_LONGEST_FAULT = 300
"""Characters of a fault that is told; some repeat the whole file."""

_END = b"PK\5\6" + bytes(18)
"""The record at the end of an archive, without a comment."""

_OTHER_NAME = b"up"
"""Kind of an extra field with another name of an entry, which some programs take (0x7075)."""


def hash_file(file: Path, algorithm: str = "sha256") -> str:
    """Return the SHA-256, or another hash, of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hash_stream(stream, algorithm)


def hash_stream(stream: BinaryIO, algorithm: str = "sha256") -> str:
    """Return the hash of an open file from its current position, in hexadecimal."""
    digest = hashlib.new(algorithm)
    while chunk := stream.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def opened(file: Path) -> Iterator[tuple[BinaryIO, str]]:
    """Open and hash a file; check at the end of the context that it did not change.

    The stream reads the hashed file, even if another file takes its path meanwhile.

    Raises:
        WheelError: the file was written to during the context.
    """
    with file.open("rb") as stream:
        before = os.fstat(stream.fileno())
        digest = hash_stream(stream)
        stream.seek(0)
        yield stream, digest
        after = os.fstat(stream.fileno())
    # ctime cannot be set back, while mtime can.
    if (before.st_size, before.st_mtime_ns, before.st_ctime_ns) != (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    ):
        raise WheelError(f"{file.name} was changed while it was read", hint="run it again")


def find_faults(
    file: Path | BinaryIO, name: str | None = None, *, record: bool = True
) -> list[str]:
    """Check a wheel; return its faults in words, none if the wheel is sound.

    A sound wheel meets these rules, and is checked for them in this order; a fault hides later
    ones. No path in the archive occurs twice, leads out of the environment, cannot be created, or
    replaces the interpreter; scripts are functions with valid names; the unpacked size is bounded.
    Name, version and tags are those of the file name. RECORD lists exactly the files in the
    archive, with their sizes and hashes.

    Args:
        file: the wheel, as a path or an open file.
        name: file name of the wheel, if ``file`` is open or has another name.
        record: check RECORD; otherwise the archive's own checksums are checked.
    """
    name = name or Path(file.name).name
    try:
        parse_wheel_filename(name)
    except InvalidWheelFilename as error:
        return [str(error)]
    try:
        with zipfile.ZipFile(file) as archive:
            archive.filename = name  # installer reads name and version from it
            faults = list(_faults(archive, name))
            if not faults and record:
                faults += _wrong_record(archive, name)
            elif not faults and (broken := archive.testzip()) is not None:
                faults.append(f"broken archive: {broken}")
            return faults
    except UNREADABLE as error:
        return [f"broken archive: {_one_line(error)}"]


def read_metadata(file: Path) -> bytes:
    """Return the bytes of a wheel's METADATA.

    Raises:
        WheelError: the wheel has no readable METADATA.
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
    """Parse the headers of METADATA."""
    return email.parser.HeaderParser().parsestr(data.decode("utf-8", "replace"))


def requirements_of(file: Path) -> list[Requirement]:
    """Return the requirements of a wheel; none if its metadata cannot be read."""
    try:
        headers = parse_metadata(read_metadata(file))
        return [Requirement(value) for value in headers.get_all("Requires-Dist", [])]
    except (WheelError, InvalidRequirement):
        return []


def _dist_info(archive: zipfile.ZipFile) -> str:
    # Only at the top level: packages that vendor others have more such directories further down.
    found = {path.partition("/")[0] for path in archive.namelist()}
    found = {top for top in found if top.endswith(".dist-info")}
    if len(found) != 1:
        raise ValueError(f"{len(found)} directories .dist-info instead of one")
    return found.pop()


def _faults(archive: zipfile.ZipFile, name: str) -> Iterator[str]:
    if all(entry.header_offset for entry in archive.infolist()):
        yield "there are other bytes before the archive"
    if (stream := archive.fp) is not None:
        stream.seek(-len(archive.comment) - len(_END), os.SEEK_END)
        if stream.read(4) != _END[:4]:
            yield "there are other bytes behind the archive"
    yield from _too_large(archive)
    for entry in archive.infolist():
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            yield f"{entry.filename!r} is compressed by a method that uv rejects"
        if _OTHER_NAME in entry.extra and _other_name(entry):
            yield f"{entry.filename!r} has another name too"
    # With all that stands behind a NUL, where zipfile ends a name.
    paths = [entry.orig_filename for entry in archive.infolist()]
    yield from _bad_paths(paths, "-".join(name.split("-")[:2]))
    info = _dist_info(archive)
    yield from _bad_scripts(archive, info)
    yield from _other_identity(archive, info, name)


def _wrong_record(archive: zipfile.ZipFile, name: str) -> Iterator[str]:
    from installer.sources import WheelFile  # loaded only where a wheel is unpacked

    try:
        WheelFile(archive).validate_record(validate_contents=True)
    except WheelFile.validation_error as error:
        for issue in getattr(error, "issues", [str(error)]):
            issue = issue.removeprefix(f"In {name}, ")
            yield issue if len(issue) <= _LONGEST_FAULT else f"{issue[:_LONGEST_FAULT]}…"
        return
    # installer looks only for what is there.
    lines = archive.read(f"{_dist_info(archive)}/RECORD").decode().splitlines()
    rows = Counter(row[0] for row in csv.reader(lines) if row)
    for path in sorted(rows.keys() - set(archive.namelist())):
        yield f"{path} is mentioned in RECORD and not there"
    for path, times in rows.items():
        if times > 1:
            yield f"{path} is mentioned {times} times in RECORD"


def _too_large(archive: zipfile.ZipFile) -> Iterator[str]:
    stream = archive.fp
    size = stream.seek(0, os.SEEK_END) if stream else 0
    unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > LARGE and unpacked > RATIO * size:
        yield f"it unpacks to {unpacked / 1e9:.1f} GB, {unpacked // max(size, 1)} times its size"
    for entry in archive.infolist():
        folder = entry.filename.partition("/")[0]
        if folder.endswith(".dist-info") and entry.file_size > _LARGEST_METADATA:
            yield f"{entry.filename!r} has {entry.file_size / 1e6:.0f} MB"


def _other_name(entry: zipfile.ZipInfo) -> bool:
    """Return whether an entry has a name for programs that know Unicode, and it differs."""
    rest = entry.extra
    while len(rest) >= 4:
        kind, length = struct.unpack_from("<2sH", rest)
        if kind == _OTHER_NAME and rest[9 : 4 + length] != entry.orig_filename.encode():
            return True
        rest = rest[4 + length :]
    return False


def _bad_paths(paths: list[str], wheel: str) -> Iterator[str]:
    """Yield faults of paths; ``wheel`` is name and version as in the name of its file."""
    folders: set[str] = set()
    for path, times in Counter(paths).items():
        if times > 1:
            yield f"{times} entries of the name {path!r}"
        # Backslashes are no separators here, but are to tools on other systems; no wheel has them.
        if path.startswith("/") or "\\" in path or ".." in path.split("/"):
            yield f"{path!r} leads out of the environment"
        elif posixpath.normpath(path) != path.removesuffix("/"):
            yield f"{path!r} is another way to write {posixpath.normpath(path)!r}"
        yield from _unprintable(path)
        yield from _too_long(path)
        yield from _bad_place(path, wheel)
        folder = posixpath.dirname(path)
        while folder and folder not in folders:
            folders.add(folder)
            folder = posixpath.dirname(folder)
    for path in folders.intersection(paths):
        yield f"{path!r} is a file and a directory"


def _unprintable(path: str, what: str = "") -> Iterator[str]:
    # uv rejects all of these in paths: some make a terminal show another name.
    if not path.isprintable() and any(unicodedata.category(each)[0] == "C" for each in path):
        yield f"{what}{path!r} has a control character"


def _too_long(path: str) -> Iterator[str]:
    longest = max(len(part.encode("utf-8", "replace")) for part in path.split("/"))
    if longest > LONGEST_NAME or len(path.encode("utf-8", "replace")) > LONGEST_PATH:
        yield f"{path[:40]!r}… has a name of {longest} bytes, a path of {len(path)}"


def _bad_place(path: str, wheel: str) -> Iterator[str]:
    """Return what is wrong with the target of a file in ``.data``."""
    top, _, inside = path.partition("/")
    if not (top.endswith(".data") and inside):
        return
    if top != f"{wheel}.data":  # pip installs its contents as if it were the wheel's own
        yield f"{path!r} is in the .data of another wheel"
    scheme, _, target = inside.partition("/")
    if scheme not in SCHEMES:
        yield f"{path!r} has the unknown scheme {scheme!r}"
    if scheme == "data" and _OWN.fullmatch(target):
        yield f"{path!r} would take the place of the environment's own"
    place, target = place_of(scheme, target)
    if place == "scripts" and _INTERPRETER.fullmatch(target):
        yield f"{target!r} would take the place of the interpreter"
    if scheme == "scripts" and "/" in target.rstrip("/"):
        yield f"{path!r} is a directory of scripts"
    if place == "purelib" and target.partition("/")[0].endswith(".dist-info"):
        yield f"{path!r} would change what is known of a package"


def place_of(scheme: str, path: str) -> tuple[str, str]:
    """Return where in an environment a file of a scheme goes, one form for each place.

    purelib and platlib are one directory, and data may lead into others.
    """
    if scheme == "data" and (found := _LIBRARY.fullmatch(path)):
        return "purelib", found[1]
    if scheme == "data" and path.startswith("bin/"):
        return "scripts", path.removeprefix("bin/")
    return "purelib" if scheme == "platlib" else scheme, path


def _bad_scripts(archive: zipfile.ZipFile, info: str) -> Iterator[str]:
    """Yield faults of entry points that no script, or only a wrong one, can be made of."""
    try:
        text = archive.read(f"{info}/entry_points.txt").decode()
    except KeyError:
        return
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(text)
    except configparser.Error as error:
        yield f"entry_points.txt cannot be read: {_one_line(error)}"
        return
    for section in filter(parser.has_section, _SCRIPT_SECTIONS):
        for name, value in parser.items(section):
            if _INTERPRETER.fullmatch(name):
                yield f"the script {name!r} would take the place of the interpreter"
            if "/" in name or "\\" in name or name in ("", ".", ".."):
                yield f"the script {name!r} leads out of the directory of scripts"
            yield from _unprintable(name, "the script ")
            yield from _too_long(name)
            if not _ENTRY.fullmatch(value):
                yield f"the script {name!r} is no function: {value[:80]!r}"


def find_clashes(wheels: Iterable[Path]) -> list[tuple[Path, str]]:
    """Find wheels that exclude each other: one has a file where another has a directory.

    Args:
        wheels: paths of readable wheels.

    Returns:
        The later wheel of each pair, and a description of the clash.
    """
    files: dict[str, Path] = {}
    folders: dict[str, Path] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            paths = [_placed(path) for path in archive.namelist() if not path.endswith("/")]
        for path in paths:
            files.setdefault(path, wheel)
            folder = posixpath.dirname(path)
            while folder and folder not in folders:
                folders[folder] = wheel
                folder = posixpath.dirname(folder)
    return [
        (wheel, f"{path!r} is a directory here and a file in {files[path].name}")
        for path, wheel in folders.items()
        if path in files and files[path] != wheel
    ]


def _placed(path: str) -> str:
    """Return the place of a file in an environment: purelib and platlib are one directory."""
    top, _, inside = path.partition("/")
    if not (top.endswith(".data") and "-" in top):
        return path
    scheme, _, target = inside.partition("/")
    place, target = place_of(scheme, target)
    if place == "purelib":
        return target
    # What goes to other places, and the headers of each package to one of its own.
    return f"{top if place == 'headers' else ''}//{place}/{target}"


def _other_identity(archive: zipfile.ZipFile, info: str, name: str) -> Iterator[str]:
    """Yield contradictions between the metadata and the file name."""
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
