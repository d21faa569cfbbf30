"""A package index in files (PEP 503, 691 and 658), beside the wheels that it lists.

::

    simple/index.html, index.json
    simple/numpy/index.html, index.json
    simple/numpy/numpy-2.4.6-….whl -> ../../numpy-2.4.6-….whl
    simple/numpy/numpy-2.4.6-….whl.metadata

Tools use ``file:///…/simple/`` as their index, or the same directory through a web server. Pages
have hashes, so tools check wheels by default.
"""

from __future__ import annotations

import errno
import hashlib
import html
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from wheelmount import disk, typed
from wheelmount.errors import SourceError, WheelError
from wheelmount.owned import make_folders
from wheelmount.wheels.archive import hash_file, parse_metadata, read_metadata
from wheelmount.wheels.manifest import Entry

INDEX_NAME = "simple"

WRITTEN = re.compile(r"index\.(html|json)|.+\.whl\.metadata")
"""Names of the files that are written in its directories."""

_API_VERSION = "1.1"

_PAGE = "index.json"


@dataclass(frozen=True, slots=True)
class _File:
    """A wheel as its project's page lists it; ``metadata`` is the SHA-256 of that file."""

    project: str
    version: str
    name: str
    sha256: str
    size: int
    requires_python: str
    metadata: str
    yanked: str | None = None


def write_index(directory: Path, known: Mapping[str, Entry]) -> None:
    """Update the index of a directory to its wheels.

    Unchanged files are not touched, so a refresh of a mount sends only changes. Unreadable wheels
    are not listed.

    Args:
        directory: the directory of wheels; the caller must hold its lock.
        known: hashes of wheels by name; other wheels are hashed.

    Raises:
        SourceError: ``simple`` is another directory, maybe of the user's program.
    """
    refuse_other(directory)
    root = directory / INDEX_NAME
    if not (root / _PAGE).is_file():  # first, so that the directory is known even if this is ended
        make_folders(root)
        _write(root / _PAGE, _json(projects=[]))
    files = [listed for wheel in directory.glob("*.whl") if (listed := _list(wheel, root, known))]
    files.sort(key=lambda file: (file.project, file.name))
    projects = []
    for project, group in groupby(files, key=lambda file: file.project):
        projects.append(project)
        _write_project(root / project, project, list(group))
    links = "".join(f'<a href="{project}/">{project}</a><br>\n' for project in projects)
    _write(root / "index.html", _page("Simple index", links))
    _write(root / _PAGE, _json(projects=[{"name": project} for project in projects]))
    for folder in root.iterdir():
        if folder.name not in projects and not folder.is_symlink() and _is_page(folder / _PAGE):
            shutil.rmtree(folder)


def refuse_other(directory: Path) -> None:
    """Check that a directory's ``simple``, if there is one, is an index that was written here.

    Raises:
        SourceError: it is not.
    """
    root = directory / INDEX_NAME
    if not os.path.lexists(root) or _is_page(root / _PAGE):
        return
    if not root.is_dir() or any(not path.name.startswith(f".{_PAGE}.") for path in root.iterdir()):
        raise SourceError(
            f"{root} is not an index of wheels that wheelmount made",
            hint="use another directory for the wheels, or move that away",
        )


def _is_page(file: Path) -> bool:
    """Return whether a file is a page of an index, as ``_json`` makes it."""
    try:
        table = typed.decode(file.read_bytes(), dict[str, Any])
    except (OSError, ValueError):
        return False
    return isinstance(table.get("meta"), dict) and "api-version" in table["meta"]


def _list(wheel: Path, root: Path, known: Mapping[str, Entry]) -> _File | None:
    try:
        project, version, _, _ = parse_wheel_filename(wheel.name)
        entry = known.get(wheel.name)
        if entry is None or not entry.fits(wheel):
            entry = Entry.of(wheel, hash_file(wheel))
        metadata = _metadata(wheel, root / project, entry)
    except (InvalidWheelFilename, WheelError, OSError):
        return None
    return _File(
        project=project,
        version=str(version),
        name=wheel.name,
        sha256=entry.sha256,
        size=entry.size,
        requires_python=parse_metadata(metadata).get("Requires-Python", ""),
        metadata=hashlib.sha256(metadata).hexdigest(),
        yanked=entry.yanked,
    )


def _metadata(wheel: Path, folder: Path, entry: Entry) -> bytes:
    """Return METADATA of a wheel, from the file beside its link if that is current."""
    file = folder / f"{wheel.name}.metadata"
    if file.is_file() and file.stat().st_mtime_ns == entry.mtime_ns:
        return file.read_bytes()
    data = read_metadata(wheel)
    make_folders(folder)
    disk.write(file, data)
    os.utime(file, ns=(entry.mtime_ns, entry.mtime_ns))
    return data


def _write_project(folder: Path, project: str, files: list[_File]) -> None:
    for file in files:
        _link(folder, file.name)
    _write(folder / "index.html", _page(f"Links for {project}", "".join(map(_anchor, files))))
    _write(
        folder / _PAGE,
        _json(
            name=project,
            versions=list(dict.fromkeys(file.version for file in files)),
            files=[_record(file) for file in files],
        ),
    )
    names = {file.name for file in files}
    _keep_only(folder, {"index.html", _PAGE, *names, *(f"{name}.metadata" for name in names)})


def _link(folder: Path, name: str) -> None:
    """Link to a wheel from its project's directory, or copy it on a file system without links."""
    link, target = folder / name, Path("..", "..", name)
    wheel = folder.parent.parent / name
    if link.is_symlink() and link.readlink() == target:
        return
    if os.path.lexists(link):  # of a wheelhouse that was copied with copies in place of links
        if not link.is_symlink() and link.is_file() and _same(link, wheel):
            return
        _remove(link)
    try:
        link.symlink_to(target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        part = folder / f".{name}.part"
        shutil.copy2(wheel, part)
        part.replace(link)


def _same(copy: Path, wheel: Path) -> bool:
    one, other = copy.stat(), wheel.stat()
    return (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def _anchor(file: _File) -> str:
    requires = html.escape(file.requires_python)
    attributes = f' data-requires-python="{requires}"' if requires else ""
    for attribute in ("data-core-metadata", "data-dist-info-metadata"):  # PEP 714
        attributes += f' {attribute}="sha256={file.metadata}"'
    if file.yanked is not None:
        attributes += f' data-yanked="{html.escape(file.yanked)}"'  # PEP 592
    name = html.escape(file.name)
    href = name.replace("+", "%2B")
    return f'<a href="{href}#sha256={file.sha256}"{attributes}>{name}</a><br>\n'


def _record(file: _File) -> dict[str, Any]:
    record: dict[str, Any] = {
        "filename": file.name,
        "url": file.name.replace("+", "%2B"),
        "hashes": {"sha256": file.sha256},
        "size": file.size,
        "core-metadata": {"sha256": file.metadata},
    }
    if file.requires_python:
        record["requires-python"] = file.requires_python
    if file.yanked is not None:
        record["yanked"] = file.yanked or True
    return record


def _page(title: str, links: str) -> str:
    return (
        "<!DOCTYPE html>\n<html>\n<head>\n"
        f'<meta name="pypi:repository-version" content="{_API_VERSION}">\n'
        f"<title>{title}</title>\n</head>\n<body>\n{links}</body>\n</html>\n"
    )


def _json(**content: object) -> str:
    return json.dumps({"meta": {"api-version": _API_VERSION}, **content}, indent=1) + "\n"


def _write(file: Path, text: str) -> None:
    """Write a file atomically, if its content changes."""
    if file.is_file() and file.read_text(encoding="utf-8") == text:
        return
    disk.write(file, text.encode())


def _keep_only(folder: Path, names: Iterable[str]) -> None:
    for other in {path.name for path in folder.iterdir()} - set(names):
        _remove(folder / other)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
