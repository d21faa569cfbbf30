"""Images: SIF files that are built from a definition, and rebuilt when an input changes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import uv

from wheelmount import disk, typed
from wheelmount.containers import apptainer, definitions
from wheelmount.containers.inputs import fingerprint
from wheelmount.containers.overlay import remove_tree
from wheelmount.containers.sif import check
from wheelmount.errors import ContainerError, InputError, SourceError
from wheelmount.lock import locked
from wheelmount.owned import FILE, make_folders
from wheelmount.progress import SILENT, Progress
from wheelmount.wheels.scratch import clear_fresh, scratch

# Compression dominates the time a build takes: gzip, the default, needs 55 s where this needs 3.
_SQUASHFS = "-comp zstd -Xcompression-level 3"


@dataclasses.dataclass(frozen=True)
class Image:
    """The description that an image contains of itself."""

    path: Path
    labels: dict[str, str]
    definition: str


def inspect(sif: Path) -> Image:
    """Read an image's labels and the definition it was built from.

    Raises:
        SourceError: the file does not exist.
        ContainerError: it is not an image.
        UnavailableError: apptainer is missing.
    """
    check(sif)
    if sif.is_dir():  # apptainer accepts any directory as an image, and has no description of it
        raise ContainerError(f"{sif} is a directory and no image", hint="give the file of an image")
    attributes = apptainer.inspect(sif.absolute())
    return Image(sif, attributes.get("labels") or {}, attributes.get("deffile") or "")


CURRENT, OUTDATED, FOREIGN = "current", "outdated", "foreign"
"""States of an image: built here from the current inputs; from other inputs; not built here."""


def state(sif: Path) -> str:
    """Compare an image with its definition and inputs; return its state, such as ``CURRENT``."""
    stamp = _own_stamp(sif)
    if stamp is None:
        return FOREIGN
    try:
        digest = fingerprint(Path(stamp.definition), stamp.build_args)
    except SourceError:
        return OUTDATED
    return CURRENT if digest == stamp.inputs else OUTDATED


def build_with_base(
    definition: Path, sif: Path, build_args: Mapping[str, str], progress: Progress
) -> bool:
    """Build an image as ``build`` does, and before it the image that it starts from.

    The build argument ``uv`` is uv's program of this machine, unless given. For a definition of the
    package, ``base`` is the image of ``definitions.BASE`` beside ``sif``, unless given; one that
    was not built from that definition is used as it is.

    Returns:
        True if ``sif`` was built, False if it was there.

    Raises:
        WheelmountError: see ``build``.
    """
    values, wanted = dict(build_args), definitions.arguments(definition)
    if "uv" in wanted:
        values.setdefault("uv", uv.find_uv_bin())
    if definition.parent == definitions.place() and "base" in wanted and "base" not in values:
        base = sif.absolute().with_name(f"{definitions.BASE}.sif")
        if base != sif.absolute():
            usual, stamp = definitions.find(definitions.BASE), _own_stamp(base)
            if not base.exists() or (stamp is not None and stamp.definition == str(usual)):
                build_with_base(usual, base, {}, progress)
            else:  # a user's own, which must not be replaced
                progress.log(f"{base} is used as it is: it was not built from {usual}")
            values["base"] = str(base)
    return build(definition, sif, build_args=values, progress=progress)


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
        sif: path of the image; its directory is made. Beside it, ``SIF.stamp`` records its inputs,
            ``SIF.log`` is the log of a running or failed build, and ``.SIF.lock`` stays.
        build_args: values for the definition's ``{{ names }}``.
        progress: informed of a build, not of an image that is up to date.

    Returns:
        True if it was built, False if it was there.

    Raises:
        SourceError: the definition, or a file it copies, is missing.
        InputError: a build argument is invalid, or ``sif`` is a directory.
        ContainerError: the build failed; an earlier image is still there.
        UnavailableError: apptainer is missing.
        WaitError: the build writes nothing any more, as if a registry sends nothing.
    """
    definition, sif = definition.absolute(), sif.absolute()
    if sif.is_dir():
        raise InputError(f"{sif} is a directory", hint="give the path of the image's file")
    values = dict(build_args or {})
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or re.search(r"[\n,\"]", value):
            raise InputError(
                f"build argument {name}={value!r} cannot be passed on",
                hint="a name is letters and digits; a value has no comma, quote or line end",
            )
    with lock(sif, progress):
        digest = fingerprint(definition, values)
        if _Stamp.of(sif, digest, definition, values).same(_stamp(sif)):
            return False
        with progress.task("build image", unit="line") as task:
            _build(definition, sif, values, lambda: task.advance(1))
            stamp = _Stamp.of(sif, digest, definition, values)
            _remove_link(_stamp_file(sif))
            disk.write(_stamp_file(sif), json.dumps(dataclasses.asdict(stamp)))
            task.note(f"{sif.name}, {stamp.size / 1e6:.0f} MB")
    return True


def _build(
    definition: Path, sif: Path, values: Mapping[str, str], on_line: Callable[[], object]
) -> None:
    log = sif.with_name(f"{sif.name}.log")
    clear_fresh(sif.parent, re.compile(re.escape(sif.name)))  # of killed builds
    fresh = sif.with_name(f".{sif.name}.{os.getpid()}")
    _remove_link(fresh)
    options = ["--force", "--mksquashfs-args", _SQUASHFS]
    options += [option for name in values for option in ("--build-arg", f"{name}={values[name]}")]
    # Not beside the image: that may be a network file system, on which a root file system with its
    # owners and devices cannot be made.
    with scratch() as temporary:
        root = temporary / "root"
        root.mkdir(mode=0o700)
        try:
            apptainer.build(
                definition, fresh, options=options, log=log, scratch=root, on_line=on_line
            )
            fresh.replace(sif)
        finally:
            fresh.unlink(missing_ok=True)
            remove_tree(root)
    log.unlink(missing_ok=True)


def _remove_link(path: Path) -> None:
    """Remove a symlink at a path before it is written: another user may have put it there."""
    if path.is_symlink():
        path.unlink()


@contextlib.contextmanager
def lock(sif: Path, progress: Progress) -> Iterator[None]:
    """Lock an image during the context, so that one process builds it.

    Raises:
        ContainerError: its directory cannot be written to.
    """
    file, for_ever = sif.with_name(f".{sif.name}.lock"), -1
    waits = f"waiting for another process that builds {sif.name}"
    with contextlib.ExitStack() as held:
        try:
            make_folders(sif.parent)
            held.enter_context(
                locked(file, for_ever, mode=FILE, waiting=lambda: progress.log(waits))
            )
        except OSError as error:
            raise ContainerError(
                f"{sif.parent} cannot be written to: {error.strerror}",
                hint="put the image into a directory of yours",
            ) from None
        yield


# --- identity of an image -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Stamp:
    """The inputs of an image, and its file's identity: another file may take its place."""

    inputs: str
    size: int
    mtime_ns: int
    definition: str
    build_args: dict[str, str]

    @classmethod
    def of(cls, sif: Path, inputs: str, definition: Path, build_args: Mapping[str, str]) -> _Stamp:
        try:
            found = sif.stat()
            size, mtime_ns = found.st_size, found.st_mtime_ns
        except FileNotFoundError:
            size, mtime_ns = -1, -1
        return cls(inputs, size, mtime_ns, str(definition), dict(build_args))

    def same(self, other: _Stamp | None) -> bool:
        """Return whether both are of the same file and inputs."""
        return other is not None and (self.inputs, self.size, self.mtime_ns) == (
            other.inputs,
            other.size,
            other.mtime_ns,
        )


def _stamp_file(sif: Path) -> Path:
    return sif.with_name(f"{sif.name}.stamp")


def _own_stamp(sif: Path) -> _Stamp | None:
    """Return the stamp of an image; None if it was not built here, or another took its place."""
    stamp = _stamp(sif)
    if stamp is None:
        return None
    now = _Stamp.of(sif, stamp.inputs, Path(stamp.definition), stamp.build_args)
    return stamp if now.same(stamp) else None


def _stamp(sif: Path) -> _Stamp | None:
    try:
        stamp = typed.decode(_stamp_file(sif).read_bytes(), _Stamp)
    except (OSError, ValueError):
        return None
    return stamp if stamp.size >= 0 else None
