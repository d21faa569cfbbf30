"""Files by their hashes into a directory: in parallel, hashed on the way, resumed where cut off."""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx
import tenacity

from wheelmount.errors import TransferError, UnavailableError, WheelError
from wheelmount.progress import Task
from wheelmount.wheels import uvsettings
from wheelmount.wheels.archive import CHUNK, hash_file
from wheelmount.wheels.credentials import IndexAuth
from wheelmount.wheels.disk import FULL, disk_errors
from wheelmount.wheels.lockfile import Wheel
from wheelmount.wheels.refusals import refuse_unpinned, refuse_unsound

ATTEMPTS = 6
"""Tries of one wheel, each continuing where the last one was cut off."""

LONGEST_PAUSE = 8.0
"""Seconds, at most, between two tries."""

STALL = 20.0
"""Seconds without a byte after which a connection counts as lost."""

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


class _StopError(Exception):
    """Another wheel failed, or the user wants to end: leave the ``.part`` as it is."""


class _AgainError(Exception):
    """A continued download that a new try from the first byte may mend."""


def fetch(
    wheels: list[Wheel],
    directory: Path,
    task: Task,
    jobs: int,
    *,
    trusted: Collection[str] = (),
    arrived: Callable[[Wheel], object] = lambda _: None,
    auth: IndexAuth | None = None,
) -> None:
    """Fetch files into a directory that no other process changes meanwhile.

    Args:
        wheels: the files to fetch; source distributions too.
        directory: where to; relative paths of sources count from there.
        task: told of bytes.
        jobs: files fetched at the same time.
        trusted: packages whose wheels may have a wrong RECORD.
        arrived: told of each file that is there, in this thread.
        auth: credentials; default those of uv's settings.

    Raises:
        WheelError: bytes that are not those of the hash, or a wheel of unsound form.
        TransferError: a file that did not arrive after several tries.
        SourceError: the directory can't be written, or a ``file://`` source is missing.
        StoreError: no space is left.
        UnavailableError: proxies or certificates of the environment that can't be used.
    """
    if not wheels:
        return
    with connect(jobs) as client, ThreadPoolExecutor(jobs, thread_name_prefix="wheel") as pool:
        fetching = _Fetch(client, auth or IndexAuth(), directory, trusted, _Total(task))
        futures = {pool.submit(fetching, wheel): wheel for wheel in wheels}
        try:
            for future in as_completed(futures):
                future.result()
                arrived(futures[future])
        except BaseException:  # ^C too: end the other threads, which leave their .part
            fetching.end()
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
        self,
        client: httpx.Client,
        auth: IndexAuth,
        directory: Path,
        trusted: Collection[str],
        total: _Total,
    ) -> None:
        self._client = client
        self._auth = auth
        self._directory = directory
        self._trusted = trusted
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
        with disk_errors(self._directory):
            try:
                retrying(self._once, wheel)
            except httpx.HTTPStatusError as error:
                reason = f"{error.response.status_code} {error.response.reason_phrase}"
            except (httpx.HTTPError, httpx.InvalidURL, _AgainError) as error:
                reason = str(error) or type(error).__name__
            except OSError as error:
                if error.errno in FULL:  # a part that cannot be finished blocks later runs
                    (self._directory / f"{wheel.filename}.part").unlink(missing_ok=True)
                raise
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
        if part.is_symlink():  # where others may write it may be theirs, and lead anywhere
            part.unlink()
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
            refuse_unpinned(part, wheel)
            refuse_unsound(part, wheel, self._trusted)
        except WheelError:
            part.unlink()
            raise
        part.replace(self._directory / wheel.filename)

    def _request(self, wheel: Wheel, part: Path, have: int) -> str:
        headers = {"Range": f"bytes={have}-"} if have else {}
        auth = self._auth.of(wheel.index)
        with self._client.stream("GET", wheel.source, headers=headers, auth=auth) as response:
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
        with open(part, "r+b" if have else "wb", opener=_open_no_link) as stream:
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


def connect(jobs: int) -> httpx.Client:
    """A client with proxies and certificates as uv has them.

    Raises:
        UnavailableError: those of the environment can't be used.
    """
    # One connection for each job, so that no request waits for one and times out.
    limits = httpx.Limits(max_connections=jobs)
    try:
        return httpx.Client(
            limits=limits,
            timeout=httpx.Timeout(STALL),
            follow_redirects=True,
            verify=_certificates(),
            mounts={
                f"https://{host}": httpx.HTTPTransport(verify=False, limits=limits)
                for host in uvsettings.insecure_hosts()
            },
            # A wheel is compressed already, and bytes compressed on the way can't be resumed.
            headers={"Accept-Encoding": "identity"},
        )
    except (ImportError, ValueError, OSError) as error:
        raise UnavailableError(
            f"no connection can be made with this environment: {error}",
            hint="check HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR",
        ) from None


def _certificates() -> ssl.SSLContext:
    """Whom to believe, as uv does: the environment's authorities, the system's, or its own."""
    system = uvsettings.flag("native-tls") or uvsettings.flag("system-certs")
    context = ssl.create_default_context() if system else httpx.create_ssl_context()
    if certificate := os.environ.get("SSL_CLIENT_CERT"):
        context.load_cert_chain(certificate)
    return context


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
