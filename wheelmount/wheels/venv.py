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
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from wheelmount import typed
from wheelmount.errors import ConfigError, WheelError
from wheelmount.mount.snapshot.tree import Tree, many_objects
from wheelmount.progress import SILENT, Progress, number_of
from wheelmount.wheels.bytecode import Compiler
from wheelmount.wheels.carried import Carried
from wheelmount.wheels.disk import disk_errors
from wheelmount.wheels.environment.files import row_of
from wheelmount.wheels.linktree import Item, find_conflicts, record_of
from wheelmount.wheels.making import Making, SpoiltError
from wheelmount.wheels.manifest import Request
from wheelmount.wheels.scratch import scratch
from wheelmount.wheels.shipment import items_of
from wheelmount.wheels.target import Target
from wheelmount.wheels.unpacked import Recipe, Unpacked

_VERSION = 1
"""Version of the layout; environments of other versions are made again."""

_INSTALLER = b"wheelmount\n"

NOTE = "wheelmount.json"
"""Name of the file in each environment that describes it."""

# A shell and Python can both run this: it starts the interpreter beside the program.
_SHEBANG = (
    b'#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(realpath -- "$0")")"/python "$0" "$@"\n\' \'\'\'\n'
)


class _Note(TypedDict):
    packages: tuple[str, ...]
    python: str


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
        note = typed.decode((folder / NOTE).read_bytes(), _Note)
        return cls(folder, note["packages"], note["python"])


@dataclass(frozen=True, slots=True)
class Planned:
    """An environment that may have to be made.

    Attributes:
        folder: its directory.
        target: the target that its wheels were chosen for.
        python: path of the interpreter on hosts, or an interpreter to put into it.
        items: its wheels; None if it is there.
        unpack: unpacks those wheels again of which the cache lacks files, or has spoilt ones.
        unpacked: the cache of unpacked wheels.
        progress: informed of the step ``environment``.
    """

    folder: Path
    target: Target
    python: str | Carried
    items: Sequence[Item] | None
    unpack: Callable[[], object]
    unpacked: Unpacked
    progress: Progress

    @many_objects()
    def make(self) -> Tree | None:
        """Make the environment, unless it was there when it was planned.

        Returns:
            Its tree, as ``scan`` would find it, if it is known.

        Raises:
            WheelError: wheels exclude each other.
            SourceError: the cache cannot be written.
            StoreError: no space is left.
        """
        items, progress = self.items, self.progress
        if items is None:
            return None
        replaced = find_conflicts(items, progress)
        try:
            return self._make(items, replaced)
        except SpoiltError:
            self.unpack()
            return self._make(items, replaced)

    def _make(self, items: Sequence[Item], replaced: list[list[tuple[str, str]]]) -> Tree | None:
        folder, progress = self.folder, self.progress
        with disk_errors(folder), progress.task("environment", unit="package") as task:
            task.total(len(items))
            with scratch(folder.parent) as place:
                part = place / folder.name
                part.mkdir(mode=0o755)
                with contextlib.closing(Making(str(part))) as making:
                    self._base(making)
                    for item, passed in zip(items, replaced, strict=True):
                        try:
                            self._place(making, item, {*map(tuple, passed)})
                        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
                            path = posixpath.relpath(error.filename2 or error.filename, part)
                            raise WheelError(
                                f"{item.filename} would take the place of {path} of the "
                                "environment",
                                hint="it cannot be in an environment",
                            ) from None
                        task.advance(1)
                if not _put(part, folder, place):
                    making.known = False
            task.note(number_of(len(items), "package"))
        return making.tree(str(folder))

    def _base(self, making: Making) -> None:
        """Make an environment without packages."""
        release, python = self.target.minor_release, self.python
        if isinstance(python, Carried):
            python.place(Path(making.path))
            making.known = False
        else:
            settings = f"home = {posixpath.dirname(python)}\ninclude-system-site-packages = false\n"
            settings += f"version = {release}\nrelocatable = true\n"
            making.write("pyvenv.cfg", settings.encode())
            making.symlink("lib", "lib64")
        packages = sorted(f"{item.name}=={item.version}" for item in self.items or ())
        making.write(NOTE, json.dumps({"packages": packages, "python": release}).encode())
        making.enter(_library(self.target))
        making.enter("bin")
        if not isinstance(python, Carried):
            making.symlink(python, f"python{release}")
        for name in ("python", "python3"):
            if not os.path.islink(f"{making.path}/{name}"):  # noqa: PTH114
                making.symlink(f"python{release}", name)

    def _place(self, making: Making, item: Item, passed: set[tuple[str, ...]]) -> None:
        """Link the files of a wheel into an environment, its RECORD last."""
        recipe, library = item.recipe, _library(self.target)
        places = {
            "purelib": library,
            "platlib": library,
            "scripts": "bin",
            "data": "",
            "headers": f"include/site/python{self.target.minor_release}/{item.name}",
        }
        rows: list[Sequence[str]] = []
        current = None
        for scheme, contents in recipe.schemes():
            base = places[scheme]
            for path, content in contents.items():
                if (scheme, path) in passed:
                    continue
                file = f"{base}/{path}" if base else path
                folder, _, name = file.rpartition("/")
                if folder != current:
                    making.enter(folder)
                    current = folder
                source = self.unpacked.object(content)
                if scheme == "scripts":
                    data = _script(source, content.size)
                    making.write(name, data, 0o755)
                    rows.append((os.path.relpath(file, library), *row_of(data)))
                    continue
                try:
                    making.link(source, name, content.size)
                except FileExistsError:  # of the interpreter, or metadata of another package
                    there = f"{making.path}/{name}"
                    own = os.path.islink(there) or file == NOTE  # noqa: PTH114
                    if own or not os.path.isfile(there):  # noqa: PTH113
                        raise
                    making.remove(name)
                    making.link(source, name, content.size)
                if scheme != recipe.root:
                    rows.append((os.path.relpath(file, library), *content.row))
        texts = {"INSTALLER": _INSTALLER}
        if item.direct_url:
            texts["direct_url.json"] = json.dumps(item.direct_url).encode()
        making.enter(f"{library}/{recipe.info}")
        for name, data in texts.items():
            making.write(name, data)
            rows.append((f"{recipe.info}/{name}", *row_of(data)))
        record = io.StringIO(record_of(recipe))
        record.seek(0, os.SEEK_END)
        csv.writer(record, lineterminator="\n").writerows(rows)
        making.write("RECORD", record.getvalue().encode())


@many_objects()
def plan(
    house: Path,
    request: Request | None,
    target: Target,
    python: str | Carried,
    cache: Path,
    progress: Progress = SILENT,
) -> Planned:
    """Plan the environment of some wheels; unless it exists, unpack those that are not yet.

    Args:
        house: directory of a wheelhouse with the resolved wheels.
        request: a recorded request, whose wheels are installed; None for no wheels.
        target: the target that they were chosen for.
        python: path of the interpreter on hosts, or an interpreter to put into the environment.
        cache: private directory for environments and unpacked wheels.
        progress: informed of the steps ``unpack``, ``compile`` and ``environment``, if they are
            needed.

    Raises:
        ConfigError: other users may write to the directory of environments.
        WheelError: wheels cannot be unpacked, or were replaced meanwhile.
        SourceError: the cache cannot be written.
        StoreError: no space is left.
        UnavailableError: the Python that compiles bytecode failed.
    """
    chosen = items_of(request) if request else []
    # Not by the requested names: a dependency is the same package.
    each = sorted((one.filename, one.sha256, repr(one.direct_url)) for one in chosen)
    text = repr((_VERSION, str(target), python, each))
    folder = directory(cache) / hashlib.sha256(text.encode()).hexdigest()[:16]
    unpacked = Unpacked(cache / "unpacked")

    def unpack(*, sizes: bool = True) -> list[Recipe]:
        compiler = python.compiler() if isinstance(python, Carried) else Compiler.find(target)
        files = [(house / one.filename, one.sha256) for one in chosen]
        return unpacked.add(files, compiler, progress, sizes=sizes)

    with contextlib.suppress(OSError, ValueError):
        Environment.read(folder)
        os.utime(folder)  # time of the last use, for ``cache prune``
        return Planned(folder, target, python, None, unpack, unpacked, progress)
    recipes = unpack(sizes=False)  # compared when the files are linked
    items = [
        Item(one.filename, recipe, direct_url=one.direct_url)
        for one, recipe in zip(chosen, recipes, strict=True)
    ]
    return Planned(folder, target, python, items, unpack, unpacked, progress)


def _put(part: Path, folder: Path, place: Path) -> bool:
    """Give an environment its name; return False if another process was faster.

    Args:
        part: the environment.
        folder: its name; what else has that name, as after a power failure, is replaced.
        place: a directory for that, which is deleted later.
    """
    while True:
        try:
            part.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return True
        try:
            Environment.read(folder)
        except (OSError, ValueError):
            with contextlib.suppress(FileNotFoundError):  # another process replaces it, too
                folder.rename(tempfile.mkdtemp(dir=place))
        else:
            return False


def every(cache: Path) -> Iterator[Environment]:
    """Yield all environments in a cache."""
    for folder in sorted(directory(cache).iterdir()):
        with contextlib.suppress(OSError, ValueError):
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


def _library(target: Target) -> str:
    free = "t" if target.free_threaded else ""
    pypy = "pypy" if target.implementation == "pypy" else "python"
    return f"lib/{pypy}{target.minor_release}{free}/site-packages"


def _script(source: str, size: int) -> bytes:
    """Return a script of a cache; its first line starts the interpreter beside it.

    Args:
        source: path of the script.
        size: bytes that it should have.

    Raises:
        SpoiltError: the file is missing, or has another size.
    """
    try:
        script = Path(source).read_bytes()
    except FileNotFoundError:
        raise SpoiltError from None
    if len(script) != size:
        raise SpoiltError
    if not script.startswith(b"#!python"):
        return script
    return _SHEBANG + script.partition(b"\n")[2]
