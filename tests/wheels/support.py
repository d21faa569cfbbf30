"""Real wheels of a few bytes, and a package index on the loopback that can be told to fail."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import ssl
import threading
import time
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from packaging.pylock import Pylock
from packaging.utils import canonicalize_name, parse_wheel_filename

from wheelmount.wheels.target import Target

TARGET = Target("3.11", "x86_64-manylinux_2_28")
ARM = Target("3.12", "aarch64-manylinux_2_36")

LOOPBACK = """
import fcntl, socket, struct
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
with socket.socket() as lo:
    fcntl.ioctl(lo, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP | IFF_RUNNING))
"""
"""A program that brings up the loopback of a new network namespace."""


def make_wheel(
    directory: Path,
    name: str,
    version: str = "1.0",
    *,
    requires: Iterable[str] = (),
    tag: str = "py3-none-any",
    padding: int = 0,
    module: bytes | None = None,
    headers: str = "",
) -> Path:
    """Build a wheel (PEP 427) of one module ``NAME.py`` with ``VALUE``, and ``padding`` bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{headers}"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    contents = {
        f"{name}.py": f"VALUE = {version!r}\n".encode() if module is None else module,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        f"Tag: {tag}\n".encode(),
    }
    if padding:
        contents[f"{name}_data.bin"] = bytes(i * i % 251 for i in range(padding))
    rows = [record_row(path, data) for path, data in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    wheel = directory / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in contents.items():
            archive.writestr(zipfile.ZipInfo(path), data)  # the same bytes at any time
    return wheel


def spoil(wheel: Path, changes: Mapping[str, bytes | None], *more: tuple[str, bytes]) -> Path:
    """Make a wheel anew with some entries changed or (None) left out, and more at its end."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {path: archive.read(path) for path in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two entries with one name
        for path, data in [*({**contents, **changes}).items(), *more]:
            if data is not None:
                archive.writestr(path, data)
    return wheel


def record_row(path: str, data: bytes) -> str:
    """A file's line in RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}"


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def lock_of(*packages: dict[str, Any]) -> Pylock:
    """A lock of these package tables."""
    return Pylock.from_dict(
        {"lock-version": "1.0", "created-by": "test", "packages": list(packages)}
    )


def package_of(wheel: Path, url: str | None = None, *, digest: str | None = None) -> dict[str, Any]:
    """The lock's table of a wheel's package."""
    name, version, _, _ = parse_wheel_filename(wheel.name)
    entry = {
        "name": wheel.name,
        "url": url or wheel.as_uri(),
        "hashes": {"sha256": digest or sha256(wheel)},
    }
    return {"name": name, "version": str(version), "wheels": [entry]}


@dataclass
class Fault:
    """How one answer differs from a right one.

    Attributes:
        status: answer this and nothing else.
        cut: bytes of the body after which the connection ends.
        pause: seconds to wait after every KiB.
        hang: after ``cut`` bytes keep the connection and say nothing more.
        no_range: send the whole file with 200 whatever range was asked for.
        body: send this in place of the file.
        agent: meant for clients of this name only; others are served right.
        together: wait until as many answers are to be given at one time.
    """

    status: int = 0
    cut: int | None = None
    pause: float = 0.0
    hang: bool = False
    no_range: bool = False
    body: bytes | None = None
    agent: str = ""
    together: threading.Barrier | None = None


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """Serve HTTP on a port of this machine during the context."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Index:
    """A package index (PEP 503) over a directory of distributions, as context manager.

    Attributes:
        faults: by file name, the faults of its next answers in turn; then it works.
        requests: the path and ``Range`` of each request so far.
        password: where set, user ``me`` must give it.
        sizes: whether pages say how large files are.
        uploaded: by file name, when it came, where ``sizes`` are said.
        yanked: by file name, why it was taken back.
        passwords: by name, those of further indexes with the same files, at ``/NAME/simple``.
    """

    directory: Path
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    password: str | None = None
    sizes: bool = False
    uploaded: dict[str, str] = field(default_factory=dict)
    yanked: dict[str, str] = field(default_factory=dict)
    passwords: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Index:
        self._ended = threading.Event()
        self._encrypted = False
        index = self

        class Handler(_Handler):
            pass

        Handler.index = index
        self._serving = ExitStack()
        self._server = self._serving.enter_context(serving(Handler))
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._serving.close()

    @property
    def address(self) -> str:
        scheme = "https" if self._encrypted else "http"
        return f"{scheme}://127.0.0.1:{self._server.server_port}"

    def encrypt(self, context: ssl.SSLContext) -> None:
        """Speak TLS from now on."""
        self._encrypted = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    @property
    def url(self) -> str:
        return f"{self.address}/simple"

    def file_url(self, file: Path) -> str:
        return f"{self.address}/files/{file.name}"

    def asked(self, file: Path) -> list[str | None]:
        """The ``Range`` of each request for a file."""
        return [asked for path, asked in self.requests if path == f"/files/{file.name}"]

    def wait_until_ended(self) -> None:
        self._ended.wait(60)


class _Handler(BaseHTTPRequestHandler):
    index: Index
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.index.requests.append((self.path, self.headers.get("Range")))
        path = self.path.partition("?")[0]
        own = path.strip("/").partition("/")[0]
        password = self.index.passwords.get(own, self.index.password)
        base = f"/{own}" if own in self.index.passwords else ""
        if password is not None:
            token = base64.b64encode(f"me:{password}".encode()).decode()
            if self.headers.get("Authorization") != f"Basic {token}":
                return self._answer(401, b"")
        kind, _, name = path.removeprefix(base).strip("/").partition("/")
        files = [file for file in self.index.directory.iterdir() if file.is_file()]
        if kind == "files" and name in {file.name for file in files}:
            return self._file(self.index.directory / name)

        def mark(file: Path) -> str:
            reason = self.index.yanked.get(file.name)
            return "" if reason is None else f' data-yanked="{html.escape(reason)}"'

        if kind == "simple" and name and self.index.sizes:
            listed = [
                {
                    "filename": file.name,
                    "url": f"{base}/files/{file.name}",
                    "hashes": {"sha256": sha256(file)},
                    "size": file.stat().st_size,
                }
                | (
                    {"upload-time": self.index.uploaded[file.name]}
                    if file.name in self.index.uploaded
                    else {}
                )
                for file in files
                if canonicalize_name(file.name.split("-")[0]) == name
            ]
            body = json.dumps({"meta": {"api-version": "1.1"}, "name": name, "files": listed})
            kind = "application/vnd.pypi.simple.v1+json"
            return self._answer(200, body.encode(), {"Content-Type": kind})
        if kind == "simple" and name:
            links = "".join(
                f'<a href="{base}/files/{file.name}#sha256={sha256(file)}"{mark(file)}>'
                f"{html.escape(file.name)}</a>\n"
                for file in files
                if canonicalize_name(file.name.split("-")[0]) == name
            )
            if links:
                return self._answer(200, links.encode(), {"Content-Type": "text/html"})
        return self._answer(404, b"")

    def _file(self, file: Path) -> None:
        faults = self.index.faults[file.name]
        meant = faults and self.headers.get("User-Agent", "").startswith(faults[0].agent)
        fault = faults.pop(0) if meant else Fault()
        if fault.together is not None:
            fault.together.wait(60)
        if fault.status:
            return self._answer(fault.status, b"")
        body = file.read_bytes() if fault.body is None else fault.body
        asked = self.headers.get("Range")
        if asked is None or fault.no_range:
            return self._answer(200, body, {"Accept-Ranges": "bytes"}, fault)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin = int(first) if first else len(body) - int(last)
        end = min(int(last) + 1, len(body)) if first and last else len(body)
        if begin >= len(body):
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(body)}"})
        headers = {"Content-Range": f"bytes {begin}-{end - 1}/{len(body)}"}
        return self._answer(206, body[begin:end], headers, fault)

    def _answer(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        fault: Fault | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        fault = fault or Fault()
        sent = body if fault.cut is None else body[: fault.cut]
        try:
            for begin in range(0, len(sent), 1024 if fault.pause else len(sent) or 1):
                self.wfile.write(sent[begin : begin + (1024 if fault.pause else len(sent))])
                self.wfile.flush()
                time.sleep(fault.pause)
        except OSError:
            pass  # the client went away, as some tests want
        if fault.hang:
            self.index.wait_until_ended()
        self.close_connection = fault.cut is not None or self.close_connection


def with_files(wheel: Path, contents: Mapping[str, bytes]) -> Path:
    """Add files to a wheel, and list all of its files in RECORD."""
    record = "-".join(wheel.name.split("-")[:2]) + ".dist-info/RECORD"
    spoil(wheel, {**contents, record: None})
    with zipfile.ZipFile(wheel, "a") as archive:
        rows = [record_row(f'"{name}"', archive.read(name)) for name in archive.namelist()]
        archive.writestr(record, "\n".join([*rows, f"{record},,", ""]))
    return wheel
