"""Build untrusted sources: download what the build needs, then run its code in a sandbox.

A build may require more packages when it runs (``get_requires_for_build_wheel``). It then fails for
lack of them; they are downloaded, and the build runs again. Its code never has a network.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import uv

from wheelmount import toml, trust
from wheelmount.errors import WheelmountError
from wheelmount.wheels import sandbox
from wheelmount.wheels.archive import UNREADABLE
from wheelmount.wheels.compiler import build_wheel
from wheelmount.wheels.download import download
from wheelmount.wheels.missing import absent
from wheelmount.wheels.resolve import resolve
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted

_ROUNDS = 8
"""Most times that a build may require more packages."""

LARGEST = 1 << 20
"""Most bytes that are read of a ``pyproject.toml`` in an archive."""

MOST = 1 << 28
"""Most bytes that are unpacked of an archive, in search of that file."""

_LEGACY = ["setuptools>=40.8", "wheel"]
"""Build requirements of a project without ``[build-system]`` (PEP 517)."""


def build_confined(source: Path, output: Path) -> str:
    """Build a project or source distribution without a network, and without the user's files.

    Args:
        source: directory or archive of the source; a copy is built.
        output: directory for the wheel; made. Its parent must be a private temporary directory.

    Returns:
        The reason of a failure, in one line; empty on success.

    Raises:
        WheelmountError: a build requirement cannot be downloaded.
    """
    place, needs = output.with_name("place"), output.with_name("needs")
    made = place / "made"
    made.mkdir(parents=True)
    inner = place / source.name
    if source.is_dir():
        shutil.copytree(source, inner, symlinks=True)
    else:
        shutil.copy(source, inner)
    program = uv.find_uv_bin()
    # This user downloads requirements into a directory that the build can only read.
    keep = [program, sys.prefix, sys.base_prefix, str(Path(__file__).parent), str(needs)]
    options = ["--offline", "--no-index", "--find-links", str(needs), "--no-config", "--no-cache"]
    wanted = _required(source)
    failure = ""
    for _ in range(_ROUNDS):
        _bring(wanted, needs)
        _hand_over(needs)
        _hand_over(place)
        failure = build_wheel(
            inner,
            made,
            sys.executable,
            options,
            lambda argv: sandbox.command(argv, place, keep),
            {**sandbox.environment(place), "UV_PYTHON_DOWNLOADS": "never"},
        )
        more = [one for one in absent(failure) if one not in wanted]
        if not failure or not more:
            break
        wanted += more
    output.mkdir()
    for wheel in () if made.is_symlink() else made.glob("*.whl"):
        if wheel.is_file() and not wheel.is_symlink():
            shutil.copyfile(wheel, output / wheel.name)
    return failure


def _bring(wanted: list[str], needs: Path) -> None:
    needs.mkdir(exist_ok=True)
    if not wanted:
        return
    target = Target.here()
    try:
        lock = resolve(Wanted.of(wanted), target=target, output=needs / "pylock.toml")
        download(lock, needs, target=target)
    except WheelmountError as error:
        error.message = f"what it is built with: {error.message}"
        raise


def _required(source: Path) -> list[str]:
    """Return the build requirements in a project's ``pyproject.toml``."""
    try:
        table = toml.loads(_pyproject(source))
        system = table.get("build-system", {})
        return [str(one) for one in system.get("requires", _LEGACY)]
    except (ValueError, TypeError, AttributeError):
        return list(_LEGACY)  # the build reports the fault


def _pyproject(source: Path) -> str:
    if source.is_dir():
        found = trust.read(source / "pyproject.toml")  # which may be a link to anything
        return found.content.decode() if found else ""
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                names = [n for n in archive.namelist() if _is_top(n)]
                if not names:
                    return ""
                with archive.open(names[0]) as stored:
                    return stored.read(LARGEST).decode()
        with _Unpacking(source) as unpacking, tarfile.TarFile(fileobj=unpacking) as tar:
            while member := tar.next():
                if _is_top(member.name) and (stream := tar.extractfile(member)):
                    return stream.read(LARGEST).decode()
                tar.members.clear()  # type: ignore[attr-defined] # there may be millions
    except (*UNREADABLE, lzma.LZMAError, tarfile.TarError):
        pass
    return ""


class _Unpacking(io.RawIOBase):
    """The content of a stranger's ``.tar``, compressed or not; limited, as it may have no end.

    It is read once from the start to ``MOST``, in pieces of ``LARGEST``: ``tarfile`` reads headers
    of any size into memory, and goes back without end where a size is negative.

    Args:
        file: the archive.
    """

    def __init__(self, file: Path) -> None:
        with file.open("rb") as plain:
            start = plain.read(6)
        kinds: dict[bytes, Callable[..., Any]] = {
            b"\x1f\x8b": gzip.open,
            b"BZh": bz2.open,
            b"\xfd7zXZ\0": lzma.open,
        }
        opened = next((o for magic, o in kinds.items() if start.startswith(magic)), open)
        self._stream: BinaryIO = opened(file, "rb")

    def close(self) -> None:
        self._stream.close()
        super().close()

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or not self.tell() <= place <= MOST:
            raise tarfile.ReadError(f"what is searched for is not in the first {MOST} bytes")
        return self._stream.seek(place)

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= LARGEST or self.tell() > MOST:
            raise tarfile.ReadError(f"it has a header of {size} bytes")
        return self._stream.read(size)


def _is_top(name: str) -> bool:
    return name.count("/") == 1 and name.endswith("/pyproject.toml")


def _hand_over(place: Path) -> None:
    """Change the owner of a directory to the user that the build runs as."""
    if os.getuid() != 0:
        return
    for path in (place, *place.rglob("*")):
        os.chown(path, sandbox.NOBODY, sandbox.NOBODY, follow_symlinks=False)
