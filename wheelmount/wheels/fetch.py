"""Fetch files into a directory: in parallel, checked by their hashes, resumed where cut off."""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass, url2pathname

import httpx
import tenacity

from wheelmount.disk import FULL
from wheelmount.errors import SourceError, TransferError, UnavailableError, WheelError
from wheelmount.owned import FILE
from wheelmount.progress import Task
from wheelmount.wheels import uvsettings
from wheelmount.wheels.archive import CHUNK, hash_file
from wheelmount.wheels.credentials import IndexAuth
from wheelmount.wheels.disk import disk_errors
from wheelmount.wheels.lockfile import Wheel
from wheelmount.wheels.refusals import refuse_unpinned, refuse_unsound

ATTEMPTS = 6
"""Tries for one wheel; each resumes where the last one was cut off."""

LONGEST_PAUSE = 8.0
"""Most seconds between two tries."""

STALL = 20.0
"""Seconds without a byte after which a connection counts as lost."""

LONGEST = 120.0
"""Seconds in which a file of requirements, or a page of an index, must have arrived."""

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


class _StopError(Exception):
    """Another wheel failed, or the user wants to end: leave the ``.part`` as it is."""


class _AgainError(Exception):
    """A resumed download failed; a new try from the first byte may succeed."""


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
        directory: directory for the files; relative paths of sources start there.
        task: informed of bytes.
        jobs: number of files fetched at the same time.
        trusted: packages whose wheels may have a wrong RECORD.
        arrived: called with each complete file, in this thread.
        auth: credentials; by default those of uv's settings.

    Raises:
        WheelError: a file has another hash, or a wheel is not sound.
        TransferError: a file did not arrive after several tries.
        SourceError: the directory cannot be written, or a ``file://`` source is missing.
        StoreError: no space is left.
        UnavailableError: proxies or certificates of the environment cannot be used.
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
        """Set the size of a wheel, and the bytes that have arrived."""
        with self._lock:
            if size is not None and self._sizes.get(wheel.filename) != size:
                self._sizes[wheel.filename] = size
                self._task.total(sum(self._sizes.values()))
            # Bytes of a try that started over count once, so that a bar never runs backwards.
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
                if error.errno in FULL:  # a partial file that cannot be completed blocks later runs
                    (self._directory / f"{wheel.filename}.part").unlink(missing_ok=True)
                raise
            else:
                return
        raise TransferError(
            f"{wheel.filename} did not arrive from {urlsplit(wheel.source).hostname}: {reason}",
            hint="run it again: what has arrived is kept",
        )

    def end(self) -> None:
        """Make every call end soon, also calls that wait for a silent server."""
        self._stop.set()
        for connection in tuple(self._sockets):
            with suppress(OSError):
                # Of the plain socket: that of TLS would first take itself apart under its reader.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _once(self, wheel: Wheel) -> None:
        if self._stop.is_set():
            raise _StopError
        part = self._directory / f"{wheel.filename}.part"
        if part.is_symlink():  # another user may have put a link here
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
            if resumed:  # the partial file may be of another file: start over
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
                # The partial file is complete and only lacks its name, or it is garbage.
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
        """Append chunks to the first ``have`` bytes of ``part``; return the SHA-256 of all."""
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
                if 0 < wheel.size < have:  # it is another file, maybe without an end
                    break
        return digest.hexdigest()


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _TRANSIENT
    if isinstance(error, httpx.UnsupportedProtocol):
        return False
    return isinstance(error, httpx.TransportError | _AgainError)


def _local_path(source: str, directory: Path) -> Path | None:
    """Return the local path of a source; None if the source is a URL of a server."""
    scheme = source.partition("://")[0] if "://" in source else ""
    if scheme == "file":
        return Path(url2pathname(urlsplit(source).path))
    return None if scheme else directory / source


def read_url(
    url: str, auth: httpx.Auth | None, most: int, headers: Mapping[str, str] | None = None
) -> tuple[bytes, str]:
    """Return the content of a URL, and its media type.

    Args:
        url: the URL.
        auth: credentials.
        most: bytes that it may have.
        headers: further headers of the request.

    Raises:
        httpx.HTTPError: it did not arrive, or the server refuses.
        httpx.InvalidURL: it is no URL.
        SourceError: it has more bytes.
        TransferError: it did not arrive within ``LONGEST``.
    """
    deadline = time.monotonic() + LONGEST
    content = bytearray()
    with connect(1) as client, client.stream("GET", url, auth=auth, headers=headers) as response:
        response.raise_for_status()
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > most:
                raise SourceError(f"{url} has more than {most} bytes", hint="check the URL")
            if time.monotonic() > deadline:
                raise TransferError(
                    f"{url} did not arrive within {LONGEST:.0f} s", hint="check the network"
                )
        return bytes(content), response.headers.get("Content-Type", "")


def connect(jobs: int) -> httpx.Client:
    """Return an HTTP client with uv's proxies and certificates.

    Raises:
        UnavailableError: proxies or certificates of the environment cannot be used.
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
                f"https://{host}": httpx.HTTPTransport(
                    verify=False, limits=limits, proxy=_proxy_for(host)
                )
                for host in uvsettings.insecure_hosts()
            },
            # A wheel is compressed already, and a compressed response cannot be resumed.
            headers={"Accept-Encoding": "identity"},
        )
    except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
        raise UnavailableError(
            f"no connection can be made with this environment: {error}",
            hint="check HTTPS_PROXY, ALL_PROXY, UV_INSECURE_HOST, SSL_CERT_FILE and SSL_CERT_DIR",
        ) from None


def _proxy_for(host: str) -> str | None:
    """Return the proxy of the environment for a host, as httpx chooses it; None for none.

    Args:
        host: ``HOST`` or ``HOST:PORT``.
    """
    if proxy_bypass(host) or proxy_bypass(httpx.URL(f"https://{host}").host):  # [::1] is ::1
        return None
    proxies = getproxies()
    proxy = proxies.get("https") or proxies.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def _certificates() -> ssl.SSLContext:
    """Return the trusted authorities, as in uv: the environment's, the system's, or httpx's own."""
    system = uvsettings.flag("native-tls") or uvsettings.flag("system-certs")
    context = ssl.create_default_context() if system else httpx.create_ssl_context()
    if certificate := os.environ.get("SSL_CLIENT_CERT"):
        context.load_cert_chain(certificate)
    return context


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, FILE)
