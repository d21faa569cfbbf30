"""A cache of unpacked wheels, in which each wheel is unpacked once and equal files are kept once.

::

    objects/3f/3f9a…        the contents of files, by SHA-256; with an x at the end, executable
    wheels/0c41….json       what the wheel of that SHA-256 consists of
    wheels/0c41…-cpython-311.json    the same with bytecode

Wheels of one package for several targets or of several versions have most files in common, and so
do different wheelhouses. The cache may be deleted at any time: it is made again.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import posixpath
import shutil
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import installer
from installer.destinations import WheelDestination
from installer.exceptions import InvalidWheelSource
from installer.records import Hash, InvalidRecordEntry, RecordEntry
from installer.scripts import Script
from installer.sources import WheelContentElement, WheelFile
from installer.utils import Scheme, copyfileobj_with_hashing

from wheelmount import disk, typed
from wheelmount.errors import WheelError
from wheelmount.owned import make_folders
from wheelmount.progress import SILENT, Progress
from wheelmount.wheels.archive import UNREADABLE, opened
from wheelmount.wheels.bytecode import Compiler
from wheelmount.wheels.disk import disk_errors
from wheelmount.wheels.scratch import scratch

if TYPE_CHECKING:
    from installer.scripts import ScriptSection

_SHEBANG = "python"
"""Placeholder of the interpreter in scripts (binary distribution format, PEP 427)."""


class Content(NamedTuple):
    """The content of a file.

    Attributes:
        sha256: lower-case hexadecimal.
        size: bytes.
        executable: whether it is a program.
    """

    sha256: str
    size: int
    executable: bool = False

    @property
    def name(self) -> str:
        """Return the name of the file with this content."""
        return f"{self.sha256}x" if self.executable else self.sha256

    @property
    def row(self) -> tuple[str, str]:
        """Return hash and size as in RECORD."""
        digest = base64.urlsafe_b64encode(bytes.fromhex(self.sha256)).rstrip(b"=").decode()
        return f"sha256={digest}", str(self.size)

    @property
    def time(self) -> int:
        """Return the mtime of files with this content, in seconds.

        It is computed from the content, so that equal files can share an inode, and programs that
        compare times (Python's bytecode, copying tools) never mistake different files for equal.
        """
        return _EPOCH + int(self.sha256[:8], 16) % _YEARS


_EPOCH = 946_684_800  # 2000, the zero of no format
_YEARS = 20 * 365 * 86_400


@dataclass(slots=True)
class Recipe:
    """The files of an unpacked wheel.

    Attributes:
        sha256: hash of the wheel.
        root: scheme of the files at its top: ``purelib`` or ``platlib``.
        info: name of its directory ``.dist-info``.
        files: by scheme, contents by path.
        bytecode: contents by path, in the scheme of the root.
        tag: tag of the bytecode's files; empty without bytecode.
    """

    sha256: str
    tag: str = ""
    root: str = ""
    info: str = ""
    files: dict[str, dict[str, Content]] = field(default_factory=dict)
    bytecode: dict[str, Content] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Recipe:
        """Read a recipe that ``write`` wrote.

        Raises:
            OSError: it cannot be read.
            ValueError: it is malformed.
        """
        return typed.decode(file.read_bytes(), cls)

    def write(self, file: Path) -> None:
        """Write the recipe atomically."""
        disk.write(file, json.dumps(asdict(self)).encode())

    def schemes(self) -> Iterator[tuple[str, dict[str, Content]]]:
        """Yield each scheme with its contents by path, bytecode included."""
        for scheme, files in self.files.items():
            yield scheme, {**files, **self.bytecode} if scheme == self.root else files


class Unpacked:
    """A directory of unpacked wheels. Any number of processes may use one.

    Args:
        directory: path of the cache; made if it is missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._objects = str(directory / "objects")

    def add(
        self,
        wheels: Sequence[tuple[Path, str]],
        compiler: Compiler | None = None,
        progress: Progress = SILENT,
        *,
        sizes: bool = True,
    ) -> list[Recipe]:
        """Unpack the wheels that the cache lacks.

        Args:
            wheels: files and the SHA-256 that each must have.
            compiler: compiles their bytecode; None for no bytecode.
            progress: informed of the steps ``unpack`` and ``compile``, if they are needed.
            sizes: whether to compare the sizes of files, as a power failure may leave files without
                bytes; otherwise the caller does.

        Returns:
            The recipe of each wheel, in order.

        Raises:
            WheelError: a wheel cannot be unpacked, or has another hash.
            SourceError: the directory cannot be written.
            StoreError: no space is left.
        """
        with disk_errors(self.directory):
            for name in ("wheels", "objects"):
                make_folders(self.directory / name)
            known = [self._find(digest, compiler, sizes) for _, digest in wheels]
            found = {recipe.sha256: recipe for recipe in known if recipe}
            if missing := [wheel for wheel in wheels if wheel[1] not in found]:
                for recipe in self._unpack(missing, compiler, progress):
                    found[recipe.sha256] = recipe
        return [found[digest] for _, digest in wheels]

    def object(self, content: Content) -> str:
        """Return the path of the file with a content; not a ``Path``, as there are many."""
        return f"{self._objects}/{content.name[:2]}/{content.name}"

    def _recipe(self, digest: str, compiler: Compiler | None) -> Path:
        suffix = f"-{compiler.tag}" if compiler else ""
        return self.directory / "wheels" / f"{digest}{suffix}.json"

    def _find(self, digest: str, compiler: Compiler | None, sizes: bool) -> Recipe | None:
        with contextlib.suppress(OSError, ValueError):
            recipe = Recipe.read(self._recipe(digest, compiler))
            contents = (c for _, files in recipe.schemes() for c in files.values() if sizes)
            if all(os.stat(self.object(c)).st_size == c.size for c in contents):  # noqa: PTH116
                os.utime(self._recipe(digest, compiler))  # the last use, for ``cache prune``
                return recipe
        return None

    def _unpack(
        self, wheels: list[tuple[Path, str]], compiler: Compiler | None, progress: Progress
    ) -> list[Recipe]:
        with scratch(self.directory) as place:
            with progress.task("unpack", unit="B") as task, ThreadPoolExecutor() as pool:
                task.total(sum(file.stat().st_size for file, _ in wheels))
                stop = threading.Event()

                def unpack(wheel: tuple[Path, str]) -> tuple[Path, Recipe]:
                    folder = Path(place, wheel[0].stem)
                    made = folder, _unpack(wheel[0], wheel[1], folder, stop)
                    task.advance(wheel[0].stat().st_size)
                    return made

                try:
                    recipes = list(pool.map(unpack, wheels))
                except BaseException:  # ^C too
                    stop.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            if compiler:
                sources = {
                    folder / recipe.root: [p for p in recipe.files[recipe.root] if p[-3:] == ".py"]
                    for folder, recipe in recipes
                }
                with progress.task("compile", unit="file") as task:
                    compiler.compile(sources, task)
                for folder, recipe in recipes:
                    root, recipe.tag = folder / recipe.root, compiler.tag
                    recipe.bytecode = _bytecode(root, map(compiler.path, sources[root]))
            for folder, recipe in recipes:
                self._keep(folder, recipe)
                recipe.write(self._recipe(recipe.sha256, compiler))
        return [recipe for _, recipe in recipes]

    def _keep(self, folder: Path, recipe: Recipe) -> None:
        """Move contents to their places by hash."""
        for scheme, files in recipe.schemes():
            for path, content in files.items():
                file, made = Path(self.object(content)), folder / scheme / path
                if not file.exists():
                    make_folders(file.parent)
                    made.replace(file)
                elif file.stat().st_size != content.size:
                    _mend(file, made)


def _mend(file: Path, good: Path) -> None:
    """Write the content of ``good`` to a file, so that all its hardlinks have that, too."""
    status = good.stat()
    file.chmod(0o600)
    shutil.copyfile(good, file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    file.chmod(status.st_mode)


class _StopError(Exception):
    """Another wheel failed, or the user wants to end."""


class _Folder(WheelDestination):
    """A directory that a wheel is unpacked into, with a directory for each scheme."""

    def __init__(self, folder: Path, recipe: Recipe, stop: threading.Event) -> None:
        self._folder = folder
        self._stop = stop
        self._recipe = recipe

    def write_script(
        self, name: str, module: str, attr: str, section: ScriptSection
    ) -> RecordEntry:
        name, data = Script(name, module, attr, section).generate(_SHEBANG, "posix")
        return self.write_file(Scheme("scripts"), name, io.BytesIO(data), is_executable=True)

    def write_file(
        self,
        scheme: Scheme,
        path: str | os.PathLike[str],
        stream: BinaryIO,
        is_executable: bool,
    ) -> RecordEntry:
        if self._stop.is_set():
            raise _StopError
        name = posixpath.normpath(os.fspath(path))
        if name.startswith(("/", "..")) or "\0" in name:
            raise ValueError(f"{os.fspath(path)!r} leads out of the environment")
        file = self._folder / scheme / name
        make_folders(file.parent)
        executable = is_executable or scheme == "scripts"
        mode = 0o555 if executable else 0o444
        # A wheel may have two files for one place, of which the later counts. The first one may be
        # written to by root alone, and has its own mode.
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as target:
            digest, size = copyfileobj_with_hashing(stream, target, "sha256")
            plain = base64.urlsafe_b64decode(f"{digest}=").hex()
            content = Content(plain, size, executable)
            target.flush()
            os.utime(descriptor, (content.time, content.time))
        self._recipe.files.setdefault(scheme, {})[name] = content
        return RecordEntry(name, Hash("sha256", digest), size)

    def finalize_installation(
        self,
        scheme: Scheme,
        record_file_path: str,
        records: object,  # noqa: ARG002
    ) -> None:
        self._recipe.root = scheme
        self._recipe.info = posixpath.dirname(record_file_path)


_NOT_OF_A_WHEEL = ("RECORD.jws", "RECORD.p7s", "INSTALLER", "REQUESTED", "LINKS", "direct_url.json")
"""Files that are not installed: signatures, and files that installers write."""


class _Source(WheelFile):
    """A wheel without the files that are not installed: its own bytecode, parts of its metadata."""

    def get_contents(self) -> Iterator[WheelContentElement]:
        for record, stream, executable in super().get_contents():
            folder, name = posixpath.split(record[0])
            if folder == self.dist_info_dir and name in _NOT_OF_A_WHEEL:
                continue
            if "__pycache__" not in folder.split("/"):
                yield record, stream, executable


def _unpack(wheel: Path, digest: str, folder: Path, stop: threading.Event) -> Recipe:
    recipe = Recipe(digest)
    try:
        with opened(wheel) as (stream, found):
            if found != digest:
                raise WheelError(
                    f"{wheel.name} has the sha256 {found}, and had {digest} before",
                    hint="run wheelmount download again",
                )
            with zipfile.ZipFile(stream) as archive:
                archive.filename = str(wheel)
                installer.install(_Source(archive), _Folder(folder, recipe, stop), {})
    except (*UNREADABLE, InvalidWheelSource, InvalidRecordEntry) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # an error of the disk, not of the archive
        reason = " ".join(str(error).split()) or type(error).__name__
        raise WheelError(
            f"{wheel.name} cannot be unpacked: {reason}",
            hint="remove it and run wheelmount download again",
        ) from None
    return recipe


def _bytecode(root: Path, paths: Iterable[str]) -> dict[str, Content]:
    """Return the contents of the bytecode of the sources that compiled."""
    found = {}
    for path in paths:
        file = root / path
        if file.is_file():
            data = file.read_bytes()
            found[path] = content = Content(hashlib.sha256(data).hexdigest(), len(data))
            file.chmod(0o444)
            os.utime(file, (content.time, content.time))
    return found
