"""Send this installation of wheelmount, with its Python, to hosts that have none.

A bundle is an archive of two directories: ``python``, the running interpreter with the system
libraries that it needs (without glibc's), and ``venv``, a virtual environment with the packages
that hosts need. It works at any path. A host keeps bundles in a private directory of the user, by
their keys. ``SCRIPT`` runs on the host: it starts the requested bundle, and asks for it if it is
missing.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import importlib.util
import logging
import math
import mmap
import os
import platform
import re
import select
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, cast

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import wheelmount
from wheelmount import disk, variables
from wheelmount.config import Settings, private_directory
from wheelmount.errors import UnavailableError
from wheelmount.lock import locked
from wheelmount.progress import Progress, Task

log = logging.getLogger("wheelmount")

TAKE, TOLD, WAIT = "take", "told", "wait"
"""What a host does that has no bundle: read it from its input; let another process bring it, and go
on after a line of input; look until another process has brought it."""

UNPACK = 120.0
"""Seconds that a host may take to unpack a bundle, beyond the time for its start."""

POLL_MS = 200
"""Milliseconds between checks whether the host still takes the bundle."""

FORMAT = "3"
"""Version of the layout of bundles; part of each key."""

LEFT_OUT = frozenset({"clusterscope", "flask", "numpy", "pyarrow", "py-spy"})
"""Requirements of torchmonarch that hosts do not use: 240 MB of 700."""

_PARTS_LEFT_OUT = "monarch/gradient/", "monarch/monarch_dashboard/", "tests/", "zstandard/_cffi."
"""Prefixes of files that hosts do not use; ``tests`` is torchmonarch's."""

_STDLIB_LEFT_OUT = shutil.ignore_patterns(
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo"),
    *("lib2to3", "_tkinter*", "nis.*", "config-*", "*.a", "*.opt-1.pyc", "*.opt-2.pyc"),
    *("ensurepip", "pydoc_data", "_test*.so", "_ctypes_test*.so", "_xxtestfuzz*.so"),
)

_SOURCES = ".c", ".pyx", ".h", ".cpp", ".pyi"
"""Suffixes of files that packages do not read when they run."""

_OF_GLIBC = re.compile(r"(ld-linux|lib(c|m|dl|rt|pthread|util|resolv|nsl|anl|mvec|nss_\w+)\.so\b)")
"""Prefixes of the names of glibc's libraries, which every host has."""

_GLIBC = re.compile(rb"GLIBC_2\.(\d+)(?:\.\d+)?\0")
"""Names of glibc's versions in the programs that need them."""

_OPTIONAL = ("pyfuse3",)
"""Packages that hosts use where they are installed."""

_PROGRAMS = frozenset({"uv"})
"""Packages whose programs hosts use."""

_HEADER = 64
"""Bytes of the header of an ELF file of 64 bits."""

_LOADED = 2
"""Flag of a section of an ELF file: SHF_ALLOC."""

_OWN = Path(wheelmount.__file__).parent

SUFFIX = ".tar.gz"
"""Suffix of bundles, behind their keys and the minor version of glibc that they need."""

KEPT_BUNDLES = 3
"""Number of bundles that a client keeps."""

LOCK_TIMEOUT = 300.0
"""Seconds to wait for another process that makes the same bundle."""

PIECE = 1 << 20
"""Bytes that are read or sent at a time."""

PART = 4 << 20
"""Bytes of an archive that are compressed as one part."""

GROUP = 16
"""Most parts that are compressed, or wait for it, at the same time."""

SCRIPT = " ".join(
    line.strip()
    for line in Path(__file__).with_suffix(".sh").read_text().splitlines()
    if not line.startswith("#")
)
"""Program of ``sh`` that starts Python on a host: at the client's path, or from the bundle."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """An archive to send.

    Attributes:
        path: path of the archive.
        size: its size, in bytes.
        digest: its SHA-256.
        glibc: its programs need glibc 2 with at least this minor version.
    """

    path: Path
    size: int
    digest: str
    glibc: int

    def order(self, path: str = "") -> bytes:
        """Return the line that tells ``SCRIPT`` to read the archive from its input or a path."""
        return f"{self.size} {self.digest} {self.glibc} {path}\n".encode()

    def pieces(self) -> Iterator[bytes]:
        """What ``SCRIPT`` takes from its input."""
        yield self.order()
        with self.path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece


class Delivery:
    """Sends the bundle to hosts that ask for it, to all at the same time, as a context manager.

    Args:
        settings: settings of the client.
        progress: informed of the transfer.
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
        self._error: Exception | None = None

    def send(self, pipe: int) -> None:
        """Begin to send the bundle to a host.

        Args:
            pipe: descriptor of the pipe to the input of ``SCRIPT``.
        """
        if self._task is None:
            self._task = self._context.enter_context(self._progress.task("bring", unit="B"))
        thread = threading.Thread(target=self._send, args=(pipe, self._task), daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def since(self) -> float:
        """Time until which hosts were busy with it, by ``time.monotonic``; may be in the future.

        Raises:
            WheelmountError: it cannot be made; see ``make``.
            OSError: it cannot be read.
        """
        if self._error is not None:
            raise self._error
        return self._since

    def _send(self, pipe: int, task: Task) -> None:
        try:
            with self._lock:
                self._since = math.inf  # no time limit while the bundle is made
                try:
                    bundle = make(self._settings)
                finally:
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
        except ConnectionError as error:  # the output of the script tells why
            log.debug("bundle: not taken: %s", error)
        except Exception as error:  # raised where the host is awaited, which would wait in vain
            self._error = error

    def _write(self, pipe: int, piece: bytes) -> None:
        left = memoryview(piece)
        poll = select.poll()
        poll.register(pipe, select.POLLOUT)
        while left and not self._stopped.is_set():
            if poll.poll(POLL_MS):
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
    """Return the name of the bundle: a hash of its parts, as far as their hashes are known."""
    digest = hashlib.sha256()
    parts = [FORMAT, sys.version, platform.machine(), *platform.libc_ver(), *sorted(LEFT_OUT)]
    for file in _own_files():
        digest.update(f"{file}\0".encode() + file.read_bytes())
    for distribution in _distributions():
        parts += [distribution.metadata["Name"], distribution.version]
        parts.append(distribution.read_text("RECORD") or "")  # has the hashes of its files
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def command(
    token: str, argv: list[str], settings: Settings, how: str = TAKE, name: str | None = None
) -> list[str]:
    """Return the command that runs Python with this version of wheelmount on a host.

    Args:
        token: prefix of each line that the host prints.
        argv: arguments of Python.
        settings: settings of the client, with the directory of bundles on hosts.
        how: what is done if the bundle is missing: ``TAKE``, ``TOLD`` or ``WAIT``.
        name: name of the bundle, where it is that of another version; default ``key()``.
    """
    hint = "set WHEELMOUNT_PYTHON to a Python with wheelmount there, or WHEELMOUNT_CACHE_DIR"
    cache = settings.cache_dir if settings.cache_dir != Settings().cache_dir else ""
    lacks, error = '{"lacks": "%s"}', f'{{"host": "%s", "error": "%s", "hint": "{hint}"}}'
    given = (
        how,
        token,
        sys.executable,
        name or key(),
        platform.machine(),
        cache,
        lacks,
        error,
    )
    return ["sh", "-c", SCRIPT, "sh", *given, *argv]


def make(settings: Settings) -> Bundle:
    """Return the bundle of this process, from the cache if it was made before.

    Raises:
        UnavailableError: it cannot be made; the message tells why.
        ConfigError: the cache is on a read-only file system, or others may write to it.
        StoreError: there is no room in the cache.
        WaitError: another process has been making it for too long.
    """
    directory = private_directory(settings.own_cache() / "bundles")
    try:
        return _made_in(directory)
    except (OSError, subprocess.SubprocessError, struct.error) as error:
        if isinstance(error, OSError) and (explanation := disk.explain(error, directory)):
            raise explanation from None
        said = getattr(error, "stderr", None) or error
        raise UnavailableError(
            f"this wheelmount cannot be packed for hosts: {said}",
            hint="install wheelmount on the hosts, and set WHEELMOUNT_PYTHON",
        ) from None


def _made_in(directory: Path) -> Bundle:
    """Return the bundle of this process in a directory, where it is made if it is missing."""
    with locked(directory / "lock", LOCK_TIMEOUT):
        path = next(directory.glob(f"{key()}-*{SUFFIX}"), None)
        if path is None:
            for old in sorted(directory.glob(f"*{SUFFIX}"), key=_used)[: 1 - KEPT_BUNDLES]:
                old.unlink()
            for left in directory.glob("made-*"):
                shutil.rmtree(left, ignore_errors=True)
            new = Path(tempfile.mkdtemp(prefix="made-", dir=directory))
            try:
                _gather(new / "content")
                name = f"{key()}-{_needed_glibc(new / 'content')}{SUFFIX}"
                _pack(new / "content", new / name)
                path = (new / name).replace(directory / name)
            finally:
                shutil.rmtree(new, ignore_errors=True)
        os.utime(path)
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while piece := file.read(PIECE):
                digest.update(piece)
        glibc = path.name.removesuffix(SUFFIX).rpartition("-")[2]
        return Bundle(path, path.stat().st_size, digest.hexdigest(), int(glibc))


def _used(path: Path) -> float:
    return path.stat().st_mtime


def _distributions() -> list[metadata.Distribution]:
    """Return the distributions that wheelmount needs on hosts, without itself."""
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
    """Copy the parts of a bundle to a directory."""
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
    # RPATH and not RUNPATH: it applies to all libraries that the program loads.
    _patchelf("--force-rpath", "--set-rpath", "$ORIGIN/../lib", program)
    for shared in filter(_is_binary, root.rglob("*.so*")):  # last: patchelf needs what is dropped
        _trim(shared)


def _loosen(binary: Path) -> None:
    """Make a module look for libraries in its own directory, then in the program's."""
    before = _patchelf("--print-rpath", binary).strip()
    kept = ":".join(path for path in before.split(":") if path.startswith("$ORIGIN"))
    if kept:
        _patchelf("--force-rpath", "--set-rpath", kept, binary)
    elif before:
        _patchelf("--remove-rpath", binary)


def _trim(library: Path) -> None:
    """Remove symbols and debug information: the sections behind everything that is loaded."""
    with library.open("r+b") as file:
        header = bytearray(file.read(_HEADER))
        segments, sections = struct.unpack_from("<QQ", header, 0x20)
        # Processors of torchmonarch's wheels have 64 bits and are little-endian.
        if header[4:6] != b"\x02\x01" or not sections:
            return
        *sizes, names = struct.unpack_from("<HHHHH", header, 0x36)
        ends = [_HEADER, segments + sizes[0] * sizes[1]]
        file.seek(segments)
        for _ in range(sizes[1]):
            offset, length = struct.unpack_from("<Q16xQ", file.read(sizes[0]), 0x08)
            ends.append(offset + length)
        file.seek(sections)
        table = bytearray(file.read(sizes[2] * sizes[3]))
        at = names * sizes[2]
        offset, length = struct.unpack_from("<QQ", table, at + 0x18)
        file.seek(offset)
        words = file.read(length)
        end = -(-max(ends) // 8) * 8
        for entry in range(0, len(table), sizes[2]):
            (flags,) = struct.unpack_from("<Q", table, entry + 0x08)
            if not flags & _LOADED and entry != at:
                table[entry : entry + sizes[2]] = bytes(sizes[2])
        struct.pack_into("<Q", table, at + 0x18, end + len(table))
        struct.pack_into("<Q", header, 0x28, end)
        file.seek(0)
        file.write(header)
        file.seek(end)
        file.write(table + words)
        file.truncate()


def _copy(distribution: metadata.Distribution, packages: Path, scripts: Path) -> None:
    """Copy the files of a package, with existing bytecode and its programs."""
    for file in distribution.files or []:
        source = Path(str(distribution.locate_file(file)))
        name = str(file)
        if name.startswith(_PARTS_LEFT_OUT) or name.endswith(_SOURCES):
            continue
        if "__pycache__" in name or "/sboms/" in name or not source.is_file():
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
    """Yield names and paths of system libraries, without glibc's, that binaries need."""
    # Libraries beside the interpreter's own are found at their places.
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


def _needed_glibc(root: Path) -> int:
    """Return the minor version of the oldest glibc 2 with which all programs below a path run."""
    found = [17]  # the oldest for which torchmonarch's dependencies are made
    for binary in filter(_is_binary, root.rglob("*")):
        with (
            binary.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as all_,
        ):
            found += map(int, _GLIBC.findall(all_))
    return max(found)


def _patchelf(*arguments: str | Path) -> str:
    program = Path(sysconfig.get_path("scripts"), "patchelf")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _pack(root: Path, path: Path) -> None:
    """Write an archive: reproducible, and fast rather than small, as it is sent once."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode = 0o700 if member.isdir() or member.mode & 0o100 else 0o600
        return member

    with (
        path.open("wb") as target,
        _Compressor(target) as output,
        tarfile.open(fileobj=cast(IO[bytes], output), mode="w|", bufsize=PIECE) as archive,
    ):
        for name in ("python", "venv"):
            archive.add(root / name, name, filter=anonymous)


class _Compressor:
    """Compresses on all processors the bytes that are written to it. A context manager.

    Args:
        target: receives the compressed parts; gzip accepts several members in a row.
    """

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self._threads = ThreadPoolExecutor()
        self._part = bytearray()
        self._waiting: deque[Future[bytes]] = deque()

    def write(self, piece: bytes) -> int:
        self._part += piece
        if len(self._part) >= PART:
            self._hand_over()
        return len(piece)

    def _hand_over(self) -> None:
        self._waiting.append(self._threads.submit(_compress, bytes(self._part)))
        self._part.clear()
        if len(self._waiting) >= GROUP:
            self._target.write(self._waiting.popleft().result())

    def __enter__(self) -> _Compressor:
        return self

    def __exit__(self, *_exc: object) -> None:
        with self._threads:
            self._hand_over()
            for part in self._waiting:
                self._target.write(part.result())


def _compress(piece: bytes) -> bytes:
    return gzip.compress(piece, compresslevel=1, mtime=0)
