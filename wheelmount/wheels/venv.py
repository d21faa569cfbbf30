"""Make virtual environments to mount on hosts, of links to unpacked wheels.

The name of an environment is a hash of its contents, and it never changes, so it is made once and
any number of commands can mount it. It works at any path: its programs look for their interpreter
beside them, and its interpreter is a link to one that hosts have at the same path.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import posixpath
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wheelmount.errors import ConfigError, WheelError
from wheelmount.progress import SILENT, Progress
from wheelmount.wheels.bytecode import Compiler
from wheelmount.wheels.carried import Carried
from wheelmount.wheels.disk import disk_errors
from wheelmount.wheels.environment.files import row_of
from wheelmount.wheels.linktree import Item, find_conflicts, link, record_of
from wheelmount.wheels.scratch import scratch
from wheelmount.wheels.shipment import items_of
from wheelmount.wheels.target import Target
from wheelmount.wheels.unpacked import Unpacked

_VERSION = 1
"""Version of the layout; environments of other versions are made again."""

_INSTALLER = b"wheelmount\n"

NOTE = "wheelmount.json"
"""Name of the file in each environment that describes it."""

# A shell and Python can both run this: it starts the interpreter beside the program.
_SHEBANG = (
    b'#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(realpath -- "$0")")"/python "$0" "$@"\n\' \'\'\'\n'
)


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment in the cache.

    Attributes:
        folder: its directory.
        packages: ``NAME==VERSION`` of each of its packages.
        python: version of its Python.
    """

    folder: Path
    packages: tuple[str, ...]
    python: str

    @classmethod
    def read(cls, folder: Path) -> Environment:
        """Read the description of an environment.

        Raises:
            OSError: the description cannot be read.
            ValueError: the description is malformed.
        """
        data = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        return cls(folder, tuple(data["packages"]), data["python"])


def make(
    house: Path,
    wheels: Sequence[str],
    target: Target,
    python: str | Carried,
    cache: Path,
    progress: Progress = SILENT,
) -> tuple[Environment, bool]:
    """Make the environment of some wheels, unless it exists.

    Args:
        house: directory of a wheelhouse with the resolved wheels.
        wheels: names of the wheels to install.
        target: the target that they were chosen for.
        python: path of the interpreter on hosts, or an interpreter to put into the environment.
        cache: private directory for environments and unpacked wheels.
        progress: informed of the steps ``unpack``, ``compile`` and ``environment``, if they are
            needed.

    Returns:
        The environment, and whether it was made now.

    Raises:
        ConfigError: other users may write to the directory of environments.
        WheelError: wheels cannot be unpacked, or exclude each other.
        SourceError: the cache cannot be written.
        StoreError: no space is left.
        UnavailableError: the Python that compiles bytecode failed.
    """
    chosen = items_of(house, wheels)
    # Not by the requested names: a dependency is the same package.
    each = sorted((one.filename, one.sha256, repr(one.direct_url)) for one in chosen)
    text = repr((_VERSION, str(target), python, each))
    folder = directory(cache) / hashlib.sha256(text.encode()).hexdigest()[:16]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = Environment.read(folder)
        os.utime(folder)  # time of the last use, for ``cache prune``
        return found, False
    unpacked = Unpacked(cache / "unpacked")
    recipes = unpacked.add(
        [(house / one.filename, one.sha256) for one in chosen],
        python.compiler() if isinstance(python, Carried) else Compiler.find(target),
        progress,
    )
    items = [
        Item(one.filename, recipe, direct_url=one.direct_url)
        for one, recipe in zip(chosen, recipes, strict=True)
    ]
    replaced = find_conflicts(items, progress)
    packages = tuple(sorted(f"{item.name}=={item.version}" for item in items))
    with disk_errors(folder), progress.task("environment", unit="packages") as task:
        task.total(len(items))
        with scratch(folder.parent) as place:
            part = place / folder.name
            part.mkdir(mode=0o755)
            if isinstance(python, Carried):
                python.place(part)
                _library(part, target).mkdir(parents=True, exist_ok=True)
                _name_python(part, f"python{target.minor_release}")
            else:
                _base(part, target, python)
            note = {"packages": packages, "python": target.minor_release}
            (part / NOTE).write_text(json.dumps(note), encoding="utf-8")
            for item, passed in zip(items, replaced, strict=True):
                try:
                    _place(part, item, {*map(tuple, passed)}, target, unpacked)
                except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
                    path = posixpath.relpath(error.filename2 or error.filename, part)
                    raise WheelError(
                        f"{item.filename} would take the place of {path} of the environment",
                        hint="it cannot be in an environment",
                    ) from None
                task.advance(1)
            try:
                part.rename(folder)
            except OSError as error:  # another process was faster
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        task.note(f"{len(items)} packages")
    return Environment(folder, packages, target.minor_release), True


def every(cache: Path) -> Iterator[Environment]:
    """Yield all environments in a cache."""
    for folder in sorted(directory(cache).iterdir()):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            yield Environment.read(folder)


def directory(cache: Path) -> Path:
    """Return the directory of environments; made if it is missing.

    Raises:
        ConfigError: another user may write to it.
        SourceError: it cannot be made.
    """
    folder = cache / "environments"
    with disk_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022
    if not private or found.st_uid != os.getuid():
        raise ConfigError(
            f"{folder} is not a directory of yours alone",
            hint="remove it, or set WHEELMOUNT_CACHE_DIR",
        )
    return folder


def _base(part: Path, target: Target, python: str) -> None:
    """Make an environment without packages."""
    release = target.minor_release
    (part / "bin").mkdir()
    _library(part, target).mkdir(parents=True)
    (part / "lib64").symlink_to("lib")
    (part / "bin" / f"python{release}").symlink_to(python)
    _name_python(part, f"python{release}")
    settings = f"home = {posixpath.dirname(python)}\ninclude-system-site-packages = false\n"
    settings += f"version = {release}\nrelocatable = true\n"
    (part / "pyvenv.cfg").write_text(settings, encoding="utf-8")


def _name_python(part: Path, program: str) -> None:
    """Link the other names of an interpreter to it."""
    for name in ("python", "python3"):
        if not (part / "bin" / name).is_symlink():
            (part / "bin" / name).symlink_to(program)


def _library(part: Path, target: Target) -> Path:
    free = "t" if target.free_threaded else ""
    pypy = "pypy" if target.implementation == "pypy" else "python"
    return part / "lib" / f"{pypy}{target.minor_release}{free}" / "site-packages"


def _place(
    part: Path, item: Item, passed: set[tuple[str, ...]], target: Target, unpacked: Unpacked
) -> None:
    """Link the files of a wheel into an environment, its RECORD last."""
    recipe, library = item.recipe, _library(part, target)
    places = {
        "purelib": library,
        "platlib": library,
        "scripts": part / "bin",
        "data": part,
        "headers": part / "include" / "site" / f"python{target.minor_release}" / item.name,
    }
    rows: list[Sequence[str]] = []
    made: set[str] = set()
    for scheme, contents in recipe.schemes():
        base = str(places[scheme])
        for path, content in contents.items():
            if (scheme, path) in passed:
                continue
            file = f"{base}/{path}"
            folder = file.rpartition("/")[0]
            if folder not in made:
                os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - one of 40,000 calls
                made.add(folder)
            if scheme == "scripts":
                data = _script(Path(unpacked.object(content)).read_bytes())
                _write(file, data, 0o755)
                rows.append((os.path.relpath(file, library), *row_of(data)))
                continue
            try:
                link(unpacked.object(content), file)
            except FileExistsError:  # of the interpreter, or metadata of another package
                own = os.path.islink(file) or file == f"{part}/{NOTE}"  # noqa: PTH114
                if own or not os.path.isfile(file):  # noqa: PTH113
                    raise
                os.unlink(file)  # noqa: PTH108
                link(unpacked.object(content), file)
            if scheme != recipe.root:
                rows.append((os.path.relpath(file, library), *content.row))
    texts = {"INSTALLER": _INSTALLER}
    if item.direct_url:
        texts["direct_url.json"] = json.dumps(item.direct_url).encode()
    for name, data in texts.items():
        _write(f"{library}/{recipe.info}/{name}", data)
        rows.append((f"{recipe.info}/{name}", *row_of(data)))
    record = io.StringIO(record_of(recipe))
    record.seek(0, os.SEEK_END)
    csv.writer(record, lineterminator="\n").writerows(rows)
    _write(f"{library}/{recipe.info}/RECORD", record.getvalue().encode())


def _write(file: str, data: bytes, mode: int = 0o644) -> None:
    """Write a new file. One in its place is not written to: others may have it too."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)  # noqa: PTH108
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as stream:
        os.fchmod(stream.fileno(), mode)
        stream.write(data)


def _script(script: bytes) -> bytes:
    """Return a script whose first line starts the interpreter beside it."""
    if not script.startswith(b"#!python"):
        return script
    return _SHEBANG + script.partition(b"\n")[2]
