"""Make trees of unpacked wheels for mounts, so that hosts install without unpacking.

::

    install/                                     what installs: a copy of ``environment``
    wheels/5be0…/numpy-2.4.6-….whl               metadata of a plan's wheels, for uv
    plans/5be0….json                             one request: which of the wheels, and how
    numpy-2.4.6-1f0c….cpython-311/platlib/…      an unpacked wheel, by schemes, with bytecode
    numpy-2.4.6-1f0c….cpython-311/scripts/…

A tree only grows, and a wheel's directory is never changed, so that links into the tree stay valid.
Files are hardlinks to those of ``Unpacked``, so a file that several wheels share is sent once.

A plan is JSON, for ``environment``::

    {"python": "cpython 3.11", "machine": "x86_64", "glibc": 28,
     "wheels": [{"name": "numpy", "version": "2.4.6", "directory": "numpy-2.4.6-1f0c….cpython-311",
                 "root": "platlib", "info": "numpy-2.4.6.dist-info", "requested": true,
                 "filename": "numpy-2.4.6-….whl", "direct_url": null, "passed": [],
                 "files": {"platlib": {"numpy": ["__init__.py", …], …}, "scripts": {…}},
                 "rows": [["data", "share/man/…", "sha256=…", "1234"]]}]}

``rows`` are the rows of RECORD whose paths depend on the environment; the tree has the others.
``passed`` lists files, by scheme and path, that a later wheel replaces.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import posixpath
import shutil
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from packaging.utils import parse_wheel_filename

from wheelmount import disk
from wheelmount.errors import WheelError
from wheelmount.owned import make_folders
from wheelmount.progress import SILENT, Progress, number_of
from wheelmount.wheels import environment
from wheelmount.wheels.archive import place_of
from wheelmount.wheels.disk import disk_errors
from wheelmount.wheels.environment import uvcache
from wheelmount.wheels.scratch import scratch
from wheelmount.wheels.target import Target, needed_glibc
from wheelmount.wheels.unpacked import Content, Recipe, Unpacked

PROGRAM = "install"
"""Directory of the program that installs from a tree, run by any Python."""

_MAIN = b"""\
import os
import sys

from environment.program import main

os.umask(os.umask(0o077) | 0o022)  # other users must not write to an environment
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class Item:
    """A wheel to install.

    Attributes:
        filename: file name of the wheel.
        recipe: description of its files.
        requested: whether it was requested by name (REQUESTED, PEP 376).
        direct_url: its origin, if it was requested by URL (PEP 610).
    """

    filename: str
    recipe: Recipe
    requested: bool = False
    direct_url: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """Return the normalized name of its package."""
        return parse_wheel_filename(self.filename)[0]

    @property
    def version(self) -> str:
        """Return its version."""
        return str(parse_wheel_filename(self.filename)[1])

    @property
    def directory(self) -> str:
        """Return the name of its directory in a tree."""
        name = f"{self.name}-{self.version}-{self.recipe.sha256[:12]}"
        return f"{name}.{self.recipe.tag}" if self.recipe.tag else name


@dataclass(frozen=True, slots=True)
class Plan:
    """The wheels of one environment, to be installed together.

    Attributes:
        items: the wheels.
        text: the plan as JSON, as hosts read it.
    """

    items: tuple[Item, ...]
    text: str

    @classmethod
    def make(cls, items: Sequence[Item], target: Target, progress: Progress = SILENT) -> Plan:
        """Plan an environment.

        Args:
            items: all its wheels.
            target: the target that they were chosen for.
            progress: warned of files that several wheels have, with different contents.

        Raises:
            WheelError: one wheel has a file where another has a directory.
        """
        passed = find_conflicts(items, progress)
        wheels = [_describe(item, passed[number]) for number, item in enumerate(items)]
        plan = {**_fits(items, target), "wheels": wheels}
        return cls(tuple(items), json.dumps(plan, separators=(",", ":")))

    @property
    def digest(self) -> str:
        """Return the hash of the plan, part of the names of its files."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def file(self) -> str:
        """Return the path of the plan in a tree."""
        return f"plans/{self.digest}.json"


def grow(tree: Path, plan: Plan, unpacked: Unpacked) -> None:
    """Add a plan, and its missing wheels, to a tree.

    Args:
        tree: a directory on the file system of ``unpacked``; made if it is missing.
        plan: the plan to add.
        unpacked: the cache of unpacked wheels.

    Raises:
        SourceError: the tree cannot be written.
        StoreError: no space is left.
    """
    with disk_errors(tree):
        make_folders((tree / plan.file).parent)
        for item in plan.items:
            if not (tree / item.directory).is_dir():
                _materialize(tree, item, unpacked)
        package = tree / PROGRAM / "environment"
        make_folders(package)
        for module in Path(environment.__file__).parent.glob("*.py"):
            _write(package / module.name, module.read_bytes())
        _write(package.with_name("__main__.py"), _MAIN)
        names = tree / uvcache.WHEELS / plan.digest
        make_folders(names)
        for item in plan.items:
            info = item.recipe.info
            metadata = tree / item.directory / item.recipe.root / info / "METADATA"
            _write(names / item.filename, _broken(_stub(info, metadata.read_bytes())))
        text = f"Metadata-Version: 2.1\nName: {uvcache.PROBE}\nVersion: 1\n"
        probe = _stub(f"{uvcache.PROBE}-1.dist-info", text.encode())
        _write(names / f"{uvcache.PROBE}-1-py3-none-any.whl", probe)
        _write(tree / plan.file, plan.text.encode())


class _Owner(NamedTuple):
    """The last of several wheels that have a file in one place: its number, and its file."""

    number: int
    scheme: str
    path: str
    content: Content


def find_conflicts(
    items: Sequence[Item], progress: Progress = SILENT
) -> list[list[tuple[str, str]]]:
    """Return, for each item, scheme and path of files that a later item replaces.

    Args:
        items: all wheels of an environment.
        progress: warned of files that several wheels have, with different contents.

    Raises:
        WheelError: one wheel has a file where another has a directory.
    """
    passed: list[list[tuple[str, str]]] = [[] for _ in items]
    owners: dict[tuple[str, str], _Owner] = {}
    differing: dict[tuple[int, int], list[str]] = {}
    for number, item in enumerate(items):
        for scheme, contents in item.recipe.schemes():
            for path, content in contents.items():
                place = _place(scheme, path, item)
                if owner := owners.get(place):
                    passed[owner.number].append((owner.scheme, owner.path))
                    if owner.content != content:
                        differing.setdefault((owner.number, number), []).append(path)
                owners[place] = _Owner(number, scheme, path, content)
    for (first, second), paths in differing.items():
        one, other = items[first].name, items[second].name
        progress.log(
            f"warning: {one} and {other} both have {paths[0]}"
            + (f" and {number_of(len(paths) - 1, 'more file')}" if paths[1:] else "")
            + f", with different contents; {other}'s is installed"
        )
    _refuse_clashes({place: owner.number for place, owner in owners.items()}, items)
    return passed


def _refuse_clashes(owners: Mapping[tuple[str, str], int], items: Sequence[Item]) -> None:
    folders = {(place, path.rpartition("/")[0]): number for (place, path), number in owners.items()}
    for (place, folder), number in folders.items():
        while folder:
            if (owner := owners.get((place, folder))) is not None:
                raise WheelError(
                    f"{items[owner].filename} has a file {folder}, and "
                    f"{items[number].filename} a directory of that name",
                    hint="they cannot be in one environment",
                )
            folder = posixpath.dirname(folder)


def _place(scheme: str, path: str, item: Item) -> tuple[str, str]:
    """Return the place of a file, equal for files that cannot be in one environment."""
    if scheme == "headers":
        return f"headers {item.name}", path
    return place_of(scheme, path)


def _describe(item: Item, passed: Sequence[tuple[str, str]]) -> dict[str, Any]:
    files: dict[str, dict[str, list[str]]] = {}
    for scheme, contents in item.recipe.schemes():
        folders = files.setdefault(scheme, {})
        for path in contents:
            folder, name = posixpath.split(path)
            folders.setdefault(folder, []).append(name)
    recipe = item.recipe
    return {
        "filename": item.filename,
        "name": item.name,
        "version": item.version,
        "directory": item.directory,
        "root": recipe.root,
        "info": recipe.info,
        "requested": item.requested,
        "direct_url": item.direct_url,
        "files": files,
        "passed": passed,
        "rows": [
            [scheme, path, *content.row]
            for scheme, contents in recipe.files.items()
            if scheme not in (recipe.root, "scripts")  # scripts are written for each interpreter
            for path, content in contents.items()
        ],
    }


def _fits(items: Iterable[Item], target: Target) -> dict[str, Any]:
    """Return the Python, machine and glibc that the wheels need."""
    glibc, machine = 0, ""
    for item in items:
        tags = parse_wheel_filename(item.filename)[3]
        if all(tag.platform != "any" for tag in tags):
            machine = target.machine
            glibc = max(glibc, min(needed_glibc(tag.platform, target) for tag in tags))
    free = "t" if target.free_threaded else ""
    python = f"{target.implementation} {target.minor_release}{free}"
    return {"python": python, "machine": machine, "glibc": glibc}


def _materialize(tree: Path, item: Item, unpacked: Unpacked) -> None:
    """Make a wheel's directory, whole or not at all."""
    recipe = item.recipe
    with scratch(tree.parent) as place:
        part = place / item.directory
        for scheme, contents in recipe.schemes():
            made = set()
            for path, content in contents.items():
                file = f"{part}/{scheme}/{path}"
                folder = file.rpartition("/")[0]
                if folder not in made:
                    make_folders(Path(folder))
                    made.add(folder)
                link(unpacked.object(content), file)
        record = part / recipe.root / recipe.info / "RECORD"
        disk.write(record, record_of(recipe))
        try:
            part.rename(tree / item.directory)
        except OSError as error:  # another process was faster
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise


def link(source: str, target: str, folder: int | None = None) -> None:
    """Hardlink a file; copy it where a hardlink is impossible.

    Args:
        source: path of the file.
        target: path of the new name.
        folder: descriptor of a directory that ``target`` is relative to.
    """
    try:
        os.link(source, target, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        # ext4 allows 65,000 names of a file, other file systems only one, and none allows one on
        # another file system.
        if error.errno not in (errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV):
            raise
        shutil.copy2(source, target if folder is None else f"/proc/self/fd/{folder}/{target}")


_ABSENT = b"unpacked in the tree"


def _stub(info: str, metadata: bytes) -> bytes:
    """Return a wheel that contains only metadata."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in {
            "METADATA": metadata,
            "WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "".join(f"{info}/{n},,\n" for n in ("METADATA", "WHEEL", "RECORD")).encode(),
            "CONTENTS": _ABSENT,
        }.items():
            archive.writestr(zipfile.ZipInfo(f"{info}/{name}"), data)
    return stream.getvalue()


def _broken(stub: bytes) -> bytes:
    """Return the wheel with a wrong checksum: good for resolving, and never installed."""
    before, _, after = stub.rpartition(_ABSENT)
    return before + _ABSENT.upper() + after


def record_of(recipe: Recipe) -> str:
    """Return RECORD of a wheel's files, without the rows that depend on the environment."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerows((path, *content.row) for path, content in recipe.files[recipe.root].items())
    # Without hashes, as pip writes them: bytecode may be compiled again.
    rows.writerows((path, "", "") for path in recipe.bytecode)
    rows.writerow((f"{recipe.info}/RECORD", "", ""))
    return text.getvalue()


def _write(file: Path, data: bytes) -> None:
    """Write a file atomically, unless it has that content already."""
    if not file.is_file() or file.read_bytes() != data:
        disk.write(file, data)
