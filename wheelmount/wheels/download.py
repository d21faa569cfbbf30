"""Wheels of a lock into a flat directory: in parallel, hashed on the way, resumed where cut off."""

from __future__ import annotations

import errno
import hashlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import filelock
import httpx
import tenacity
from packaging.pylock import Pylock
from packaging.utils import canonicalize_name

from wheelmount.errors import (
    InputError,
    SourceError,
    StoreError,
    TransferError,
    UnavailableError,
    WaitError,
    WheelError,
)
from wheelmount.progress import SILENT, Progress, Task
from wheelmount.wheels.archive import CHUNK, find_faults, hash_file
from wheelmount.wheels.credentials import IndexAuth
from wheelmount.wheels.lockfile import Wheel, chosen_wheels
from wheelmount.wheels.manifest import Entry, Manifest
from wheelmount.wheels.target import Target

ATTEMPTS = 6
"""Tries of one wheel, each continuing where the last one was cut off."""

LONGEST_PAUSE = 8.0
"""Seconds, at most, between two tries."""

STALL = 20.0
"""Seconds without a byte after which a connection counts as lost."""

LOCK_TIMEOUT = 3600.0
"""Seconds to wait for another download into the same directory."""

LOCK_NAME = ".wheelmount.lock"

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class DownloadReport:
    """What a download came to.

    Attributes:
        wheels: file names of all wheels chosen for the target, in the lock's order.
        fetched: those of them that were not there before.
        size: bytes of all of them.
        fetched_size: bytes of those fetched.
        seconds: from beginning to end.
    """

    wheels: tuple[str, ...]
    fetched: tuple[str, ...]
    size: int
    fetched_size: int
    seconds: float

    @classmethod
    def together(cls, reports: Sequence[DownloadReport], seconds: float) -> DownloadReport:
        """Several as one; a wheel that serves several targets is counted by each."""
        return cls(
            tuple(dict.fromkeys(name for report in reports for name in report.wheels)),
            tuple(dict.fromkeys(name for report in reports for name in report.fetched)),
            sum(report.size for report in reports),
            sum(report.fetched_size for report in reports),
            seconds,
        )


class _StopError(Exception):
    """Another wheel failed, or the user wants to end: leave the ``.part`` as it is."""


class _AgainError(Exception):
    """A continued download that a new try from the first byte may mend."""


def download(
    lock: Pylock,
    directory: Path,
    *,
    target: Target,
    progress: Progress = SILENT,
    jobs: int = 8,
    trusted: Iterable[str] = (),
) -> DownloadReport:
    """Bring the wheels that a lock has for a target into a directory.

    A wheel gets its name once it has the right hash and a sound form; the manifest remembers that.
    One that is there stays. That it still has its hash is taken from its size and mtime, so that a
    second run does not read gigabytes again; ``Wheelhouse.check`` does. While a wheel arrives it is
    ``NAME.part``, and a later run goes on from there. Any number of processes may download into one
    directory; they take turns.

    Args:
        lock: a validated lock; relative paths in it count from ``directory``.
        directory: made if it is not there.
        target: which wheel of each package is wanted.
        progress: told of the one step, ``download``, in bytes.
        jobs: wheels fetched at the same time.
        trusted: packages whose wheels may have a wrong RECORD, besides those of the manifest.

    Raises:
        InputError: ``jobs`` is below 1.
        ResolveError: a package has no wheel for the target.
        WheelError: a wheel with a bad name, whose bytes are not those of the lock, or that is not
            sound.
        TransferError: a wheel that did not arrive after several tries.
        SourceError: the directory can't be written, or a ``file://`` source is missing.
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
) -> DownloadReport:
    """``download`` for who holds the directory's lock, see there."""
    started = time.monotonic()
    wheels = chosen_wheels(lock, target)
    with progress.task("download", unit="B") as task:
        with _disk_errors(directory):
            manifest = Manifest.read(directory)
            manifest.trusted.update(map(canonicalize_name, trusted))
            needed = [wheel for wheel in wheels if not _is_there(wheel, directory, manifest)]
        try:
            _fetch_all(needed, directory, manifest, task, jobs)
        finally:
            with _disk_errors(directory):
                manifest.write(directory)
        report = DownloadReport(
            wheels=tuple(wheel.filename for wheel in wheels),
            fetched=tuple(wheel.filename for wheel in needed),
            size=sum(manifest.wheels[wheel.filename].size for wheel in wheels),
            fetched_size=sum(manifest.wheels[wheel.filename].size for wheel in needed),
            seconds=time.monotonic() - started,
        )
        task.note(
            f"{len(report.wheels)} wheels, {report.size / 1e6:.1f} MB, {len(needed)} of them new"
        )
    return report


def fetch(files: list[Wheel], directory: Path) -> None:
    """Bring files, checked by their hashes, into a directory that is nobody else's.

    Raises:
        WheelmountError: as ``download``.
    """
    with SILENT.task("download") as task:
        _fetch_all(files, directory, Manifest(), task, len(files))


@contextmanager
def locked(directory: Path, progress: Progress = SILENT) -> Iterator[None]:
    """Hold the right to change a wheelhouse, which is made if it is not there.

    Raises:
        SourceError: the directory can't be made or written.
        WaitError: somebody else held it for ``LOCK_TIMEOUT``.
    """
    with _disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(directory / LOCK_NAME)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            progress.log(f"waiting for another download into {directory}")
            try:
                lock.acquire(timeout=LOCK_TIMEOUT)
            except filelock.Timeout:
                raise WaitError(
                    f"another download has held {directory} for {LOCK_TIMEOUT:.0f} s",
                    hint="end it, or use another directory",
                ) from None
    try:
        yield
    finally:
        lock.release()


def _is_there(wheel: Wheel, directory: Path, manifest: Manifest) -> bool:
    """Whether the wheel is in the directory whole; remembered in the manifest if so."""
    file = directory / wheel.filename
    if not file.is_file():
        return False
    if manifest.has(wheel.filename, directory):
        return manifest.wheels[wheel.filename].sha256 == wheel.sha256
    if hash_file(file) != wheel.sha256:
        return False
    _refuse_unsound(file, wheel, manifest)
    manifest.wheels[wheel.filename] = Entry.of(file, wheel.sha256)
    return True


def _refuse_unsound(file: Path, wheel: Wheel, manifest: Manifest) -> None:
    if not wheel.filename.endswith(".whl"):
        return  # a source distribution: what is built of it is looked into
    # Not the contents: they are what was published, as the hash has proven.
    record = wheel.package not in manifest.trusted
    if not (faults := find_faults(file, wheel.filename, record=record, contents=False)):
        return
    if record and not find_faults(file, wheel.filename, record=False, contents=False):
        hint = f"take another version; if you trust who made it: --trust {wheel.package}"
    else:
        hint = "take another version, and tell who made it"
    raise WheelError(f"{wheel.filename} is not sound: {faults[0]}", hint=hint)


def _fetch_all(
    wheels: list[Wheel], directory: Path, manifest: Manifest, task: Task, jobs: int
) -> None:
    if not wheels:
        return
    with _client(jobs) as client, ThreadPoolExecutor(jobs, thread_name_prefix="wheel") as pool:
        fetch = _Fetch(client, directory, manifest, _Total(task))
        futures = {pool.submit(fetch, wheel): wheel for wheel in wheels}
        try:
            for future in as_completed(futures):
                future.result()
                wheel = futures[future]
                file = directory / wheel.filename
                manifest.wheels[wheel.filename] = Entry.of(file, wheel.sha256)
        except BaseException:  # ^C too: end the other threads, which leave their .part
            fetch.end()
            pool.shutdown(cancel_futures=True)
            raise


class _Total:
    """Adds up sizes that become known one by one, from several threads."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._done: dict[str, int] = {}

    def at(self, wheel: Wheel, size: int | None, done: int) -> None:
        """Say how big a wheel is, and how much of it is there."""
        with self._lock:
            if size is not None and self._sizes.get(wheel.filename) != size:
                self._sizes[wheel.filename] = size
                self._task.total(sum(self._sizes.values()))
            # What a try that began again had done counts once: a bar never runs backwards.
            more = done - self._done.get(wheel.filename, 0)
            if more > 0:
                self._done[wheel.filename] = done
                self._task.advance(more)


class _Fetch:
    """Fetches one wheel, with tries; called in the pool's threads."""

    def __init__(
        self, client: httpx.Client, directory: Path, manifest: Manifest, total: _Total
    ) -> None:
        self._client = client
        self._directory = directory
        self._manifest = manifest
        self._total = total
        self._stop = threading.Event()
        self._sockets: set[socket.socket] = set()

    def __call__(self, wheel: Wheel) -> None:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_transient),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=LONGEST_PAUSE),
            sleep=tenacity.sleep_using_event(self._stop),
            reraise=True,
        )
        with _disk_errors(self._directory):
            try:
                retrying(self._once, wheel)
            except httpx.HTTPStatusError as error:
                reason = f"{error.response.status_code} {error.response.reason_phrase}"
            except (httpx.HTTPError, httpx.InvalidURL, _AgainError) as error:
                reason = str(error) or type(error).__name__
            else:
                return
        raise TransferError(
            f"{wheel.filename} did not arrive from {urlsplit(wheel.source).hostname}: {reason}",
            hint="run it again: what has arrived is kept",
        )

    def end(self) -> None:
        """Make every call end soon, those too that wait for a server that has gone quiet."""
        self._stop.set()
        for connection in tuple(self._sockets):
            with suppress(OSError):
                # Of the plain socket: that of TLS would first take itself apart under its reader.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _once(self, wheel: Wheel) -> None:
        if self._stop.is_set():
            raise _StopError
        part = self._directory / f"{wheel.filename}.part"
        local = _local_path(wheel.source, self._directory)
        if local is not None:
            resumed = 0
            with local.open("rb") as stream:
                chunks = iter(lambda: stream.read(CHUNK), b"")
                digest = self._write(wheel, chunks, part, 0, local.stat().st_size)
        else:
            resumed = part.stat().st_size if part.is_file() else 0
            digest = self._request(wheel, part, resumed)
        if digest != wheel.sha256:
            part.unlink()
            if resumed:  # it may have been the beginning of other bytes: once more, all of it
                raise _AgainError("the server sends other bytes than before")
            raise WheelError(
                f"{wheel.filename} has the sha256 {digest}, and the lock says {wheel.sha256}",
                hint="resolve again; if that does not help, do not trust this index or proxy",
            )
        try:
            _refuse_unsound(part, wheel, self._manifest)
        except WheelError:
            part.unlink()
            raise
        part.replace(self._directory / wheel.filename)

    def _request(self, wheel: Wheel, part: Path, have: int) -> str:
        headers = {"Range": f"bytes={have}-"} if have else {}
        with self._client.stream("GET", wheel.source, headers=headers) as response:
            # RFC 9110: 416 where the server has no byte after ours, 206 where it goes on from
            # there, 200 where it can't and sends the whole.
            if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                # Either all of it is here, cut off just before it got its name, or it is garbage.
                return hash_file(part)
            response.raise_for_status()
            if response.status_code != httpx.codes.PARTIAL_CONTENT:
                have = 0
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                part.unlink()
                raise _AgainError("the server sends other ranges than asked for")
            length = response.headers.get("Content-Length", "")
            size = have + int(length) if length.isdecimal() else None
            connection = response.extensions["network_stream"].get_extra_info("socket")
            self._sockets.add(connection)
            try:
                return self._write(wheel, response.iter_raw(), part, have, size)
            finally:
                self._sockets.discard(connection)

    def _write(
        self, wheel: Wheel, chunks: Iterable[bytes], part: Path, have: int, size: int | None
    ) -> str:
        """Add chunks to the first ``have`` bytes of ``part``; the SHA-256 of the whole."""
        digest = hashlib.sha256()
        with part.open("r+b" if have else "wb") as stream:
            while stream.tell() < have:
                digest.update(stream.read(min(CHUNK, have - stream.tell())))
            self._total.at(wheel, size, have)
            for chunk in chunks:
                if self._stop.is_set():
                    raise _StopError
                digest.update(chunk)
                stream.write(chunk)
                have += len(chunk)
                self._total.at(wheel, size, have)
        return digest.hexdigest()


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _TRANSIENT
    if isinstance(error, httpx.UnsupportedProtocol):
        return False
    return isinstance(error, httpx.TransportError | _AgainError)


def _local_path(source: str, directory: Path) -> Path | None:
    """The file that a source names; None where it is a URL of a server."""
    scheme = source.partition("://")[0] if "://" in source else ""
    if scheme == "file":
        return Path(url2pathname(urlsplit(source).path))
    return None if scheme else directory / source


def _client(jobs: int) -> httpx.Client:
    try:
        return httpx.Client(
            # One connection for each job, so that no request waits for one and times out.
            limits=httpx.Limits(max_connections=jobs),
            timeout=httpx.Timeout(STALL),
            follow_redirects=True,
            auth=IndexAuth(),
            # A wheel is compressed already, and bytes compressed on the way can't be resumed.
            headers={"Accept-Encoding": "identity"},
        )
    except (ImportError, ValueError, OSError) as error:
        raise UnavailableError(
            f"no connection can be made with this environment: {error}",
            hint="check HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR",
        ) from None


@contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"no space left for {directory}", hint="make room, or use another directory"
            ) from None
        raise SourceError(
            f"{error.filename or directory}: {error.strerror or error}",
            hint="check that it exists and that you may use it",
        ) from None
