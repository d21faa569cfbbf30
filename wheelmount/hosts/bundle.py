"""This wheelmount with its Python and all that it needs, for hosts that have none of it.

A bundle is an archive of two directories: ``python``, the interpreter that runs this with the
libraries of the system that it needs (but glibc's), and ``venv``, a virtual environment of it with
the packages that hosts need. It works wherever it lies. A host keeps bundles in a private directory
of the user's, each under its key; ``SCRIPT`` runs there, starts the one that is wanted, and asks
for it where it is not there.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import importlib.util
import logging
import math
import os
import platform
import re
import select
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import wheelmount
from wheelmount import variables
from wheelmount.config import Settings, private_directory
from wheelmount.errors import UnavailableError, WheelmountError
from wheelmount.progress import Progress, Task

log = logging.getLogger("wheelmount")

UNPACK = 120.0
"""Seconds that a host may take to unpack it, beyond those in which hosts are to start."""

GLANCE = 200
"""Milliseconds between looks at whether what is sent is still wanted."""

FORMAT = "1"
"""Of bundles; part of each key."""

LEFT_OUT = frozenset({"clusterscope", "flask", "numpy", "pyarrow", "py-spy"})
"""Packages that torchmonarch asks for and nothing uses on hosts: 240 MB of 700."""

_PARTS_LEFT_OUT = "monarch/gradient/", "monarch/monarch_dashboard/", "tests/", "zstandard/_cffi."
"""Beginnings of files that nothing uses on hosts; ``tests`` is torchmonarch's."""

_STDLIB_LEFT_OUT = shutil.ignore_patterns(
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo"),
    *("lib2to3", "_tkinter*", "nis.*", "config-*", "*.a", "*.opt-1.pyc", "*.opt-2.pyc"),
)

_SOURCES = ".c", ".pyx", ".h", ".cpp", ".pyi"
"""Endings of files of packages that nothing reads where they run."""

_OF_GLIBC = re.compile(r"(ld-linux|lib(c|m|dl|rt|pthread|util|resolv|nsl|anl|mvec|nss_\w+)\.so\b)")
"""Beginnings of the names of glibc's libraries, which are the host's own everywhere."""

_OPTIONAL = ("pyfuse3",)
"""Packages that hosts use where they are installed."""

_PROGRAMS = frozenset({"uv"})
"""Packages whose programs hosts use."""

_OWN = Path(wheelmount.__file__).parent

KEPT_BUNDLES = 3
"""Bundles that a client keeps."""

PIECE = 1 << 20
"""Bytes that are read or sent at once."""

GROUP = 16
"""Parts of an archive, of 4 MiB, that are compressed at the same time at most."""

SCRIPT = " ".join(
    line.strip()
    for line in Path(__file__).with_suffix(".sh").read_text().splitlines()
    if not line.startswith("#")
)
"""Program of ``sh`` that starts Python on a host, by the client's path or else of the bundle."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """An archive to be sent.

    Attributes:
        path: of the archive.
        size: of it, in bytes.
        digest: SHA-256 of it.
    """

    path: Path
    size: int
    digest: str

    def order(self, path: str = "") -> bytes:
        """The line by which ``SCRIPT`` takes it: what comes behind, or what lies there already."""
        return f"{self.size} {self.digest} {path}\n".encode()

    def pieces(self) -> Iterator[bytes]:
        """What ``SCRIPT`` takes from its input."""
        yield self.order()
        with self.path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece


class Delivery:
    """Sends the bundle to hosts that ask for it, to all at the same time. A context manager.

    Args:
        settings: of the client.
        progress: told about it.
    """

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._context = contextlib.ExitStack()
        self._task: Task | None = None
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._total = self._moved = 0
        self._since = time.monotonic()
        self._error: WheelmountError | None = None

    def send(self, pipe: int) -> None:
        """Begin to send it.

        Args:
            pipe: descriptor that leads to the input of ``SCRIPT``.
        """
        if self._task is None:
            self._task = self._context.enter_context(self._progress.task("bring", unit="B"))
        thread = threading.Thread(target=self._send, args=(pipe, self._task), daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def since(self) -> float:
        """Until when hosts had much to do with it, by ``time.monotonic``; may be in the future.

        Raises:
            UnavailableError: it cannot be made.
        """
        if self._error is not None:
            raise self._error
        return self._since

    def _send(self, pipe: int, task: Task) -> None:
        try:
            with self._lock:
                self._since = math.inf  # it takes the time that it takes
                bundle = make(self._settings)
                self._since = time.monotonic()
                self._total += bundle.size
                task.total(self._total)
            blocking = os.get_blocking(pipe)
            os.set_blocking(pipe, False)
            try:
                for piece in bundle.pieces():
                    self._write(pipe, piece)
                    task.advance(len(piece))
                    self._since = time.monotonic()
                    if self._stopped.is_set():
                        return
                self._since = time.monotonic() + UNPACK
            finally:
                os.set_blocking(pipe, blocking)
        except WheelmountError as error:
            self._error = error
        except OSError as error:  # what it says tells why
            log.debug("bundle: not taken: %s", error)

    def _write(self, pipe: int, piece: bytes) -> None:
        left = memoryview(piece)
        poll = select.poll()
        poll.register(pipe, select.POLLOUT)
        while left and not self._stopped.is_set():
            if poll.poll(GLANCE):
                left = left[os.write(pipe, left) :]

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._context.close()


@functools.cache
def key() -> str:
    """Name of the bundle: a hash of all that it is made of, as far as that is known by hashes."""
    digest = hashlib.sha256()
    parts = [FORMAT, sys.version, platform.machine(), *platform.libc_ver(), *sorted(LEFT_OUT)]
    for file in _own_files():
        digest.update(f"{file}\0".encode() + file.read_bytes())
    for distribution in _distributions():
        parts += [distribution.metadata["Name"], distribution.version]
        parts.append(distribution.read_text("RECORD") or "")  # hashes of all of its files
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def command(token: str, argv: list[str], settings: Settings, *, waits: bool = False) -> list[str]:
    """The command that runs Python on a host, with this wheelmount.

    Args:
        token: before each line that the host says.
        argv: arguments of Python.
        settings: of the client; say where hosts keep bundles, if it is not the default.
        waits: where it is not there, wait until another process has brought it; else it takes
            it from its input.
    """
    hint = "set WHEELMOUNT_PYTHON to a Python with wheelmount there, or WHEELMOUNT_CACHE_DIR"
    cache = settings.cache_dir if settings.cache_dir != Settings().cache_dir else ""
    lacks, error = '{"lacks": "%s"}', f'{{"host": "%s", "error": "%s", "hint": "{hint}"}}'
    given = (
        "wait" if waits else "take",
        token,
        sys.executable,
        key(),
        platform.machine(),
        cache,
        lacks,
        error,
    )
    return ["sh", "-c", SCRIPT, "sh", *given, *argv]


def make(settings: Settings) -> Bundle:
    """The bundle of this process, from the cache if it was made before.

    Raises:
        UnavailableError: it cannot be made, and why.
    """
    directory = private_directory(settings.own_cache() / "bundles")
    path = directory / f"{key()}.tar.gz"
    with FileLock(directory / "lock", mode=0o600):
        if not path.exists():
            for old in sorted(directory.glob("*.tar.gz"), key=_used)[: 1 - KEPT_BUNDLES]:
                old.unlink()
            for left in directory.glob("new-*"):
                shutil.rmtree(left, ignore_errors=True)
            new = Path(tempfile.mkdtemp(prefix="new-", dir=directory))
            try:
                _gather(new / "content")
                _pack(new / "content", new / path.name)
                (new / path.name).replace(path)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or error
                raise UnavailableError(
                    f"this wheelmount cannot be packed for hosts: {said}",
                    hint="install wheelmount on the hosts, and set WHEELMOUNT_PYTHON",
                ) from None
            finally:
                shutil.rmtree(new, ignore_errors=True)
        os.utime(path)
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while piece := file.read(PIECE):
                digest.update(piece)
        return Bundle(path, path.stat().st_size, digest.hexdigest())


def _used(path: Path) -> float:
    return path.stat().st_mtime


def _distributions() -> list[metadata.Distribution]:
    """Those that wheelmount needs on hosts, itself left out."""
    found: dict[str, metadata.Distribution] = {}
    waiting = ["wheelmount", *(name for name in _OPTIONAL if importlib.util.find_spec(name))]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in LEFT_OUT:
            continue
        found[name] = metadata.distribution(name)
        for text in found[name].requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    del found["wheelmount"]
    return [found[name] for name in sorted(found)]


def _own_files() -> list[Path]:
    found = [path for path in _OWN.rglob("*") if path.is_file()]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def _gather(root: Path) -> None:
    """Bring together what a bundle has."""
    python, venv = root / "python", root / "venv"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    program, packages = python / "bin" / "python", venv / "lib" / version / "site-packages"
    library, modules = python / "lib", python / "lib" / version
    for directory in (program.parent, venv / "bin", packages):
        directory.mkdir(parents=True)
    shutil.copy2(getattr(sys, "_base_executable", "") or sys.executable, program)
    shutil.copytree(
        sysconfig.get_path("stdlib"),
        modules,
        ignore=_STDLIB_LEFT_OUT,
        ignore_dangling_symlinks=True,
    )
    for distribution in _distributions():
        _copy(distribution, packages, venv / "bin")
    for file in _own_files():
        target = packages / "wheelmount" / file.relative_to(_OWN)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    (venv / "bin" / "python").symlink_to("../../python/bin/python")
    binaries = [path for path in root.rglob("*") if _is_binary(path)]
    for name, path in _libraries(binaries, root):
        shutil.copy2(path, library / name)
    for binary in binaries:
        _loosen(binary)
    # RPATH, and not RUNPATH: it goes for all that the program loads.
    _patchelf("--force-rpath", "--set-rpath", "$ORIGIN/../lib", program)


def _loosen(binary: Path) -> None:
    """Have a module look for libraries where it lies itself, and then where the program does."""
    before = _patchelf("--print-rpath", binary).strip()
    kept = ":".join(path for path in before.split(":") if path.startswith("$ORIGIN"))
    if kept:
        _patchelf("--force-rpath", "--set-rpath", kept, binary)
    elif before:
        _patchelf("--remove-rpath", binary)


def _copy(distribution: metadata.Distribution, packages: Path, scripts: Path) -> None:
    """Bring the files of a package with the bytecode that is there, and programs."""
    for file in distribution.files or []:
        source = Path(str(distribution.locate_file(file)))
        name = str(file)
        if name.startswith(_PARTS_LEFT_OUT) or name.endswith(_SOURCES):
            continue
        if "__pycache__" in name or not source.is_file():
            continue
        if ".." in file.parts:
            if source.parent.name != "bin" or distribution.name not in _PROGRAMS:
                continue
            target = scripts / source.name
        else:
            target = packages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        if source.suffix == ".py":
            compiled = Path(importlib.util.cache_from_source(str(source)))
            if compiled.is_file():
                cached = target.parent / compiled.parent.name
                cached.mkdir(exist_ok=True)
                shutil.copy2(compiled, cached)


def _is_binary(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _libraries(binaries: list[Path], root: Path) -> Iterator[tuple[str, str]]:
    """Libraries of the system, but glibc's, that programs and modules need: names and paths."""
    # Those that the interpreter's own lie beside are found as they lie there.
    search = os.pathsep.join(filter(None, [sysconfig.get_config_var("LIBDIR")]))
    environ = {**variables.for_programs(), "LD_LIBRARY_PATH": search, "LC_ALL": "C"}
    found = {}
    for binary in binaries:
        done = subprocess.run(
            ["ldd", str(binary)], env=environ, capture_output=True, text=True, check=False
        )
        for name, path in re.findall(r"^\s*(\S+) => (/.*) \(0x", done.stdout, re.MULTILINE):
            if not _OF_GLIBC.match(name) and not Path(path).is_relative_to(root):
                found[name] = path
    yield from sorted(found.items())


def _patchelf(*arguments: str | Path) -> str:
    program = Path(sysconfig.get_path("scripts"), "patchelf")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _pack(root: Path, path: Path) -> None:
    """Write an archive, the same each time, and quickly rather than small: it is sent once."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode = 0o700 if member.isdir() or member.mode & 0o100 else 0o600
        return member

    plain = path.with_name("archive")
    with tarfile.open(plain, "w") as archive:
        for name in ("python", "venv"):
            archive.add(root / name, name, filter=anonymous)
    with plain.open("rb") as source, path.open("wb") as target, ThreadPoolExecutor() as threads:
        while pieces := [piece for _ in range(GROUP) if (piece := source.read(4 * PIECE))]:
            target.writelines(threads.map(_compress, pieces))  # gzip reads one after the other


def _compress(piece: bytes) -> bytes:
    return gzip.compress(piece, compresslevel=1, mtime=0)
