"""Fill a cache of uv with links into a tree, so that plain ``uv pip install`` only makes links.

uv takes a wheel from its cache if there is one of its name. To resolve, uv reads the tree's stubs:
wheels with metadata only, which cannot be installed, so that uv fails if a wheel is missing in the
cache. The layout of the cache is learned from uv: it installs wheels with metadata only and an
empty wheel, and then links replace the files that it unpacked.
"""

from __future__ import annotations

import configparser
import csv
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile

from .files import in_parallel, row_of
from .installation import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .files import Work

WHEELS = "wheels"
"""Directory of a tree that has a directory of stubs for each plan."""

PROBE = "wheelmount_probe"
"""Package of the one complete wheel there, which is empty."""

_TIMEOUT = 60.0
_METADATA = ("METADATA", "WHEEL")


def fill(wheels: Sequence[dict[str, Any]], root: str, flat: str, cache: str) -> dict[str, str]:
    """Fill a cache.

    Args:
        wheels: the wheels of a plan.
        root: path of the mounted tree.
        flat: directory in the tree with stubs of these wheels.
        cache: directory of the cache, on the file system of environments, so that uv can link.

    Returns:
        Environment variables that make uv use the cache, and no index.

    Raises:
        Refusal: the directory is not empty, uv is missing, or uv has another layout of the cache.
    """
    cache = os.path.abspath(cache)
    if os.path.isdir(cache) and os.listdir(cache):
        raise Refusal(f"{cache} is not empty", "remove it, or name another directory")
    with tempfile.TemporaryDirectory(prefix="wheelmount-") as place:
        stubs = os.path.join(place, "stubs")
        os.mkdir(stubs)
        for wheel in wheels:
            _write_stub(wheel, root, stubs)
        _install(["{name}=={version}".format(**wheel) for wheel in wheels], stubs, cache, place)
        theirs = _only(f"{cache}/wheels-v*/index/*")
        found = [(_only(f"{archive}/*.dist-info"), archive) for archive in _archives(cache)]
        _install([f"{PROBE}==1"], flat, cache, place)
    ours = os.path.dirname(_only(f"{cache}/wheels-v*/index/*/{PROBE.replace('_', '-')}"))
    for name in os.listdir(theirs):
        os.rename(os.path.join(theirs, name), os.path.join(ours, name))
    archives = {os.path.basename(info): archive for info, archive in found}
    work: list[Work] = []
    for wheel in wheels:
        shutil.rmtree(archives[wheel["info"]])
        work += _links(wheel, root, archives[wheel["info"]])
    in_parallel(work)
    for wheel in wheels:
        _write_record(wheel, root, archives[wheel["info"]])
    variables = {"UV_CACHE_DIR": cache, "UV_FIND_LINKS": flat, "UV_LINK_MODE": "hardlink"}
    return {**variables, "UV_OFFLINE": "true", "UV_NO_CACHE": "false"}


def _write_stub(wheel: dict[str, Any], root: str, folder: str) -> None:
    """Make a wheel of this name with metadata only."""
    info = wheel["info"]
    with zipfile.ZipFile(os.path.join(folder, wheel["filename"]), "w") as archive:
        for name in _METADATA:
            file = os.path.join(root, wheel["directory"], wheel["root"], info, name)
            archive.write(file, f"{info}/{name}")
        rows = "".join(f"{info}/{name},,\n" for name in (*_METADATA, "RECORD"))
        archive.writestr(f"{info}/RECORD", rows)


def _install(pins: list[str], links: str, cache: str, place: str) -> None:
    """Make uv install packages from one directory, only to fill its cache."""
    command = ["uv", "pip", "install", "--quiet", "--offline", "--no-index", "--no-deps"]
    command += ["--python", sys.executable, "--find-links", links, "--target", f"{place}/target"]
    environment = {name: value for name, value in os.environ.items() if name[:3] != "UV_"}
    environment.update(UV_NO_CONFIG="1", UV_CACHE_DIR=cache)
    try:
        done = subprocess.run(
            [*command, *pins],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except FileNotFoundError:
        raise Refusal("uv is not installed here", "put it on PATH") from None
    except subprocess.TimeoutExpired:
        raise Refusal(f"uv did not end within {_TIMEOUT:.0f} s", "try again") from None
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise Refusal(f"uv rejects these wheels: {reason}", "install without its cache")


def _only(pattern: str) -> str:
    found = glob.glob(pattern)
    if len(found) != 1:
        raise Refusal(
            f"this uv has another layout of its cache: {len(found)} of {pattern}",
            "install without it: python -I TREE/install PLAN symlink",
        )
    return found[0]


def _archives(cache: str) -> list[str]:
    return glob.glob(f"{cache}/archive-v*/*")


def _links(wheel: dict[str, Any], root: str, archive: str) -> list[Work]:
    """Make a wheel's directory as uv unpacks it: links to files, and copies of metadata."""
    work: list[Work] = []
    for scheme, folders in wheel["files"].items():
        source = os.path.join(root, wheel["directory"], scheme)
        top = archive if scheme == wheel["root"] else os.path.join(archive, _data(wheel), scheme)
        for folder, names in folders.items():
            target = os.path.normpath(os.path.join(top, folder))
            os.makedirs(target, exist_ok=True)
            if scheme == "scripts":
                names = [name for name in names if name not in _entry_points(wheel, root)]
            copied = scheme == "scripts" or folder.split("/")[0] == wheel["info"]
            way = "copy" if copied else "symlink"
            work.append((os.path.join(source, folder), target, names, way))
    return work


def _write_record(wheel: dict[str, Any], root: str, archive: str) -> None:
    """Return RECORD as uv stores it, with the files of ``.data``."""
    source = os.path.join(root, wheel["directory"], wheel["root"], wheel["info"], "RECORD")
    target = os.path.join(archive, wheel["info"], "RECORD")
    shutil.copyfile(source, target)
    rows = [[f"{_data(wheel)}/{scheme}/{path}", *row] for scheme, path, *row in wheel["rows"]]
    scripts = os.path.join(archive, _data(wheel), "scripts")
    for name in os.listdir(scripts) if os.path.isdir(scripts) else ():
        with open(os.path.join(scripts, name), "rb") as stream:
            rows.append([f"{_data(wheel)}/scripts/{name}", *row_of(stream.read())])
    with open(target, "a", encoding="utf-8", newline="") as text:
        csv.writer(text, lineterminator="\n").writerows(rows)


def _data(wheel: dict[str, Any]) -> str:
    return str(wheel["info"])[: -len("dist-info")] + "data"


def _entry_points(wheel: dict[str, Any], root: str) -> set[str]:
    """Return the names of scripts that uv makes itself."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    directory = os.path.join(root, wheel["directory"], wheel["root"], wheel["info"])
    parser.read(os.path.join(directory, "entry_points.txt"), encoding="utf-8")
    sections = [name for name in ("console_scripts", "gui_scripts") if parser.has_section(name)]
    return {name for section in sections for name in parser.options(section)}
