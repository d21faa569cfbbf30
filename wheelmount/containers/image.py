"""Images: SIF files, built from a definition and kept while nothing they are made of changes."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
from blake3 import blake3

from wheelmount.containers import apptainer
from wheelmount.containers.overlay import remove_tree
from wheelmount.containers.sif import check
from wheelmount.errors import ContainerError, InputError, SourceError
from wheelmount.progress import SILENT, Progress

# Compression dominates the time a build takes: gzip, the default, needs 55 s where this needs 3.
_SQUASHFS = "-comp zstd -Xcompression-level 3"


@dataclasses.dataclass(frozen=True)
class Image:
    """What is written in an image about itself."""

    path: Path
    labels: dict[str, str]
    definition: str


def inspect(sif: Path) -> Image:
    """Read an image's labels and the definition it was built from.

    Raises:
        SourceError: there is no such file.
        ContainerError: it is no image.
        UnavailableError: apptainer is missing.
    """
    check(sif)
    attributes = apptainer.inspect(sif.absolute())
    return Image(sif, attributes.get("labels") or {}, attributes.get("deffile") or "")


def build(
    definition: Path,
    sif: Path,
    *,
    build_args: Mapping[str, str] | None = None,
    progress: Progress = SILENT,
) -> bool:
    """Build ``sif`` from ``definition``, unless it is there and up to date.

    It is up to date while the definition, the build arguments and the files that the definition
    copies from this machine are what they were. Relative paths in the definition start at its own
    directory. Builds of one image at the same time wait for each other.

    Args:
        definition: the ``.def`` file.
        sif: where the image goes; its directory is made. Beside it ``SIF.stamp`` says what it was
            made of, ``SIF.log`` tells about a build that runs or failed, ``.SIF.lock`` stays.
        build_args: values for the definition's ``{{ names }}``.
        progress: told about a build, not about an image that is kept.

    Returns:
        True if it was built, False if it was there.

    Raises:
        SourceError: the definition, or a file it copies, is missing.
        InputError: a build argument that is not one.
        ContainerError: the build failed; an image that was there before still is.
        UnavailableError: apptainer is missing.
    """
    definition, sif = definition.absolute(), sif.absolute()
    values = dict(build_args or {})
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or re.search(r"[\n,\"]", value):
            raise InputError(
                f"build argument {name}={value!r} cannot be passed on",
                hint="a name is letters and digits; a value has no comma, quote or line end",
            )
    with _lock(sif, progress):
        digest = fingerprint(definition, values)
        if _stamp(sif) == _Stamp.of(sif, digest):
            return False
        with progress.task("build image", unit="lines") as task:
            _build(definition, sif, values, lambda: task.advance(1))
            stamp = _Stamp.of(sif, digest)
            _stamp_file(sif).write_text(json.dumps(dataclasses.asdict(stamp)), encoding="utf-8")
            task.note(f"{sif.name}, {stamp.size / 1e6:.0f} MB")
    return True


def _build(
    definition: Path, sif: Path, values: Mapping[str, str], on_line: Callable[[], object]
) -> None:
    log = sif.with_name(f"{sif.name}.log")
    fresh = sif.with_name(f".{sif.name}.{os.getpid()}")
    options = ["--force", "--mksquashfs-args", _SQUASHFS]
    options += [option for name in values for option in ("--build-arg", f"{name}={values[name]}")]
    # Not beside the image: that may be a network file system, on which a root file system with its
    # owners and devices cannot be made.
    scratch = Path(tempfile.mkdtemp(prefix="wheelmount-build-"))
    try:
        apptainer.build(
            definition, fresh, options=options, log=log, scratch=scratch, on_line=on_line
        )
        fresh.replace(sif)
    finally:
        fresh.unlink(missing_ok=True)
        remove_tree(scratch)
    log.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(sif: Path, progress: Progress) -> Iterator[None]:
    lock = filelock.FileLock(sif.with_name(f".{sif.name}.lock"))
    try:
        sif.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            progress.log(f"waiting for another build of {sif.name}")
            lock.acquire()
    except OSError as error:
        raise ContainerError(
            f"{sif.parent} cannot be written to: {error.strerror}",
            hint="put the image into a directory of yours",
        ) from None
    try:
        yield
    finally:
        lock.release()


# --- what an image is made of ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Stamp:
    """What an image was made of, and which file that is: another one may be put in its place."""

    inputs: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, sif: Path, inputs: str) -> _Stamp:
        try:
            found = sif.stat()
        except FileNotFoundError:
            return cls(inputs, -1, -1)
        return cls(inputs, found.st_size, found.st_mtime_ns)


def _stamp_file(sif: Path) -> Path:
    return sif.with_name(f"{sif.name}.stamp")


def _stamp(sif: Path) -> _Stamp | None:
    try:
        values: dict[str, Any] = json.loads(_stamp_file(sif).read_text(encoding="utf-8"))
        stamp = _Stamp(**values)
    except (OSError, ValueError, TypeError):
        return None
    return stamp if stamp.size >= 0 else None


def fingerprint(definition: Path, build_args: Mapping[str, str]) -> str:
    """A hash over everything of this machine that goes into an image.

    Raises:
        SourceError: the definition, or a file it copies, is missing.
    """
    try:
        text = definition.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"definition {definition} cannot be read: {error}",
            hint="the project's own is images/python.def",
        ) from None
    digest = blake3(json.dumps([text, sorted(build_args.items())]).encode())
    for source in sources(text, build_args):
        # Path.glob() takes no absolute patterns.
        found = sorted(glob.glob(source, root_dir=definition.parent))  # noqa: PTH207
        if not found:
            raise SourceError(
                f"{definition.name} copies {source}, which is not there",
                hint=f"relative paths start at {definition.parent}",
            )
        for name in found:
            for file in _files(definition.parent / name):
                digest.update(f"\0{file}\0{file.lstat().st_mode}\0".encode())
                if file.is_file():
                    digest.update_mmap(file)
    return digest.hexdigest()


def sources(text: str, build_args: Mapping[str, str]) -> list[str]:
    """The paths of this machine, patterns among them, that a definition's ``%files`` names."""
    values: dict[str, str] = {}
    for line in _section(text, "%arguments"):
        name, found, value = line.partition("=")
        if found and not name.startswith("#"):
            values[name.strip()] = value.strip()
    values.update(build_args)
    filled = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda m: values.get(m[1], m[0]), text)
    words = [shlex.split(line, comments=True) for line in _section(filled, "%files")]
    return [first for first, *_ in filter(None, words)]


def _section(text: str, name: str) -> Iterator[str]:
    """The lines of one section. ``%files from STAGE`` is another: it copies inside the build."""
    current = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("%"):
            current = line
        elif current == name:
            yield line


def _files(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        for inner in sorted(path.iterdir()):
            yield from _files(inner)
