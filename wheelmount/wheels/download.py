"""Download the missing wheels of a lock into a flat directory."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.pylock import Pylock
from packaging.utils import canonicalize_name

from wheelmount import lock as locks
from wheelmount.errors import InputError, StoreError, WaitError, WheelError
from wheelmount.owned import FILE, make_folders
from wheelmount.progress import SILENT, Progress, number_of
from wheelmount.wheels.archive import find_clashes, hash_file
from wheelmount.wheels.disk import disk_errors
from wheelmount.wheels.lockfile import Wheel, chosen_wheels
from wheelmount.wheels.manifest import REQUESTS_NAME, RESULT, Entry, Manifest, Request
from wheelmount.wheels.refusals import refuse_unpinned, refuse_unsound
from wheelmount.wheels.scratch import abandoned, clear_fresh
from wheelmount.wheels.simple import INDEX_NAME, WRITTEN
from wheelmount.wheels.target import Target

if TYPE_CHECKING:
    from wheelmount.wheels.credentials import IndexAuth

LOCK_TIMEOUT = 3600.0
"""Seconds to wait for another download into the same directory."""

LOCK_NAME = ".wheelmount.lock"

_WRITTEN = re.compile(r"wheelmount\.json|pylock\.toml")
"""Names of the files that are written beside the wheels, by holders of the lock."""


@dataclass(frozen=True, slots=True)
class DownloadReport:
    """The result of a download.

    Attributes:
        wheels: file names of all wheels chosen for the target, in the lock's order.
        fetched: file names of the wheels that were missing before.
        size: bytes of all wheels.
        fetched_size: bytes of the fetched wheels.
        seconds: duration of the download.
        requests: relative paths of files of requirements that pin all wheels, one for each target.
        answers: the recorded request of each target, with its result.
    """

    wheels: tuple[str, ...]
    fetched: tuple[str, ...]
    size: int
    fetched_size: int
    seconds: float
    requests: tuple[str, ...] = ()
    answers: tuple[Request, ...] = ()

    @classmethod
    def together(cls, reports: Sequence[DownloadReport], seconds: float) -> DownloadReport:
        """Combine several reports; a wheel for several targets is counted for each of them."""
        return cls(
            tuple(dict.fromkeys(name for report in reports for name in report.wheels)),
            tuple(dict.fromkeys(name for report in reports for name in report.fetched)),
            sum(report.size for report in reports),
            sum(report.fetched_size for report in reports),
            seconds,
            tuple(one for report in reports for one in report.requests),
            tuple(one for report in reports for one in report.answers),
        )


def download(
    lock: Pylock,
    directory: Path,
    *,
    target: Target,
    progress: Progress = SILENT,
    jobs: int = 8,
    trusted: Iterable[str] = (),
) -> DownloadReport:
    """Download the wheels that a lock has for a target into a directory.

    A wheel gets its name once its hash is right and its form is sound, which the manifest records.
    A wheel that is there already is kept: its hash is assumed to be right if its size and mtime are
    those of the manifest, so that a second run does not read gigabytes again
    (``Wheelhouse.check`` does). A partial wheel is named ``NAME.part``, and a later run resumes it.
    Any number of processes may download into one directory; a lock admits one after the other.

    Args:
        lock: a validated lock; relative paths in it start at ``directory``.
        directory: directory for the wheels; made if it is missing.
        target: the target that selects the wheel of each package.
        progress: informed of the one step, ``download``, in bytes.
        jobs: number of wheels fetched at the same time.
        trusted: packages whose wheels may have a wrong RECORD, besides those in the manifest.

    Raises:
        InputError: ``jobs`` is below 1.
        ResolveError: a package has no wheel for the target.
        WheelError: a wheel has a bad name, another hash than the lock says, or is not sound.
        TransferError: a wheel did not arrive after several tries.
        SourceError: the directory cannot be written, or a ``file://`` source is missing.
        StoreError: no space is left.
        WaitError: another download into the directory did not end.
    """
    if jobs < 1:
        raise InputError(f"jobs is {jobs}", hint="give 1 or more")
    chosen_wheels(lock, target)  # fail before anything is made
    with locked(directory, progress):
        return fill(lock, directory, target, progress, jobs, trusted)


def fill(
    lock: Pylock,
    directory: Path,
    target: Target,
    progress: Progress,
    jobs: int,
    trusted: Iterable[str],
    auth: IndexAuth | None = None,
    built: Path | None = None,
) -> DownloadReport:
    """Download as ``download`` does; the caller must hold the directory's lock.

    Args:
        built: directory, on the same file system, of sound wheels that were built for this lock.
            They are moved into the wheelhouse once all others have arrived.
    """
    from wheelmount.wheels.fetch import fetch  # with httpx, which takes long to load

    started = time.monotonic()
    wheels = chosen_wheels(lock, target)
    with progress.task("download", unit="B") as task:
        with disk_errors(directory):
            manifest = Manifest.read(directory)
            manifest.trusted.update(map(canonicalize_name, trusted))
            fresh = {wheel: file for wheel in wheels if (file := _in(built, wheel))}
            needed = [
                wheel
                for wheel in wheels
                if wheel not in fresh and not _is_there(wheel, directory, manifest)
            ]
            _refuse_full(needed, directory)

        def remember(wheel: Wheel) -> None:
            file = directory / wheel.filename
            manifest.wheels[wheel.filename] = Entry.of(file, wheel.sha256, wheel.yanked)
            manifest.built.pop(wheel.filename, None)  # one that was built here is gone

        try:
            fetch(
                needed,
                directory,
                task,
                jobs,
                trusted=manifest.trusted,
                arrived=remember,
                auth=auth,
            )
        finally:
            with disk_errors(directory):
                manifest.write(directory)
        if not manifest.has_together((wheel.filename, wheel.sha256) for wheel in wheels):
            _refuse_clashes([fresh.get(wheel, directory / wheel.filename) for wheel in wheels])
        if fresh:
            with disk_errors(directory):
                for wheel, file in fresh.items():
                    file.replace(directory / wheel.filename)
                    remember(wheel)
                manifest.write(directory)
        report = DownloadReport(
            wheels=tuple(wheel.filename for wheel in wheels),
            fetched=tuple(wheel.filename for wheel in needed),
            size=sum(manifest.wheels[wheel.filename].size for wheel in wheels),
            fetched_size=sum(manifest.wheels[wheel.filename].size for wheel in needed),
            seconds=time.monotonic() - started,
        )
        task.note(
            f"{number_of(len(report.wheels), 'wheel')}, {report.size / 1e6:.1f} MB, "
            f"{len(needed)} of them new"
        )
    return report


def _clear(directory: Path) -> None:
    """Delete remains of killed runs, except for partly downloaded wheels."""
    for place in abandoned(directory):
        name = pending(place).stem
        for lock in (*directory.glob(f"{name}*.toml"), *directory.glob(f".{name}*.toml.*")):
            lock.unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
    clear_fresh(directory, _WRITTEN)
    clear_fresh(directory / REQUESTS_NAME, RESULT)
    for folder in (directory / INDEX_NAME, *(directory / INDEX_NAME).glob("*/")):
        clear_fresh(folder, WRITTEN)


def pending(place: Path) -> Path:
    """Return the path for a lock file while it is made by the owner of a scratch directory.

    It lies beside its final name because relative paths in a lock count from there.
    """
    return place.with_name(f"pylock.{place.name.rpartition('-')[2]}.toml")


def _refuse_full(wheels: Sequence[Wheel], directory: Path) -> None:
    """Compare the size of missing wheels, as far as the lock says, with the free space."""
    there = (directory / f"{wheel.filename}.part" for wheel in wheels)
    have = sum(part.stat().st_size for part in there if part.is_file())
    needed = sum(wheel.size for wheel in wheels) - have
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise StoreError(
            f"no space left for {directory}: {needed / 1e6:.1f} MB are needed, "
            f"{free / 1e6:.1f} MB are free",
            hint="free some space, or use another directory",
        )


def _refuse_clashes(wheels: Sequence[Path]) -> None:
    for wheel, fault in find_clashes(wheels):
        raise WheelError(
            f"{wheel.name} is not sound: {fault}", hint="they cannot be in one environment"
        )


@contextmanager
def locked(directory: Path, progress: Progress = SILENT) -> Iterator[None]:
    """Hold the lock of a wheelhouse, which is made if it is missing.

    Raises:
        SourceError: the directory cannot be made or written.
        WaitError: another process held the lock for ``LOCK_TIMEOUT``.
    """
    error = WaitError(
        f"another download has held {directory} for {LOCK_TIMEOUT:.0f} s",
        hint="end it, or use another directory",
    )
    with ExitStack() as held:
        with disk_errors(directory):
            make_folders(directory)
            held.enter_context(
                locks.locked(
                    directory / LOCK_NAME,
                    LOCK_TIMEOUT,
                    error,
                    mode=FILE,
                    waiting=lambda: progress.log(f"waiting for another download into {directory}"),
                )
            )
            _clear(directory)
        yield


def _in(folder: Path | None, wheel: Wheel) -> Path | None:
    """Return the file of a wheel in a directory, if it is there with the right bytes."""
    file = folder / wheel.filename if folder else None
    return file if file and file.is_file() and hash_file(file) == wheel.sha256 else None


def _is_there(wheel: Wheel, directory: Path, manifest: Manifest) -> bool:
    """Return whether the directory has the whole wheel, and record it in the manifest if so."""
    file = directory / wheel.filename
    if not file.is_file():
        return False
    if manifest.has(wheel.filename, directory):
        if manifest.wheels[wheel.filename].sha256 == wheel.sha256:
            refuse_unpinned(file, wheel)
            return True
        return False
    if hash_file(file) != wheel.sha256:
        return False
    refuse_unpinned(file, wheel)
    refuse_unsound(file, wheel, manifest.trusted)
    manifest.wheels[wheel.filename] = Entry.of(file, wheel.sha256, wheel.yanked)
    return True
