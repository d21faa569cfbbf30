"""Whoever uv resolves with also downloads: indexes, their credentials, certificates and proxies."""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import netrc
import os
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import httpcore
import httpx
import pytest

from wheelmount.errors import ConfigError, UnavailableError, WheelmountError
from wheelmount.wheels import fetch
from wheelmount.wheels.credentials import IndexAuth
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import TARGET, Index, make_wheel, serving

BEHIND = "index.invalid"
"""A name that only the proxy knows."""


@pytest.fixture
def house(tmp_path: Path) -> Wheelhouse:
    return Wheelhouse(tmp_path / "house")


def at(index: Index, name: str, user: str = "") -> str:
    return f"{index.address}/{name}/simple".replace("://", f"://{user}@" if user else "://")


def add(house: Wheelhouse, *lines: str) -> None:
    file = house.directory.with_name("needs.txt")
    file.write_text("".join(f"{line}\n" for line in lines))
    assert house.add(Wanted.of(files=[file]), targets=[TARGET]).fetched


@pytest.mark.parametrize("option", ["--index-url", "-i", "--extra-index-url"])
def test_an_index_in_a_file(index: Index, house: Wheelhouse, option: str) -> None:
    make_wheel(index.directory, "own")
    index.passwords["a"] = "secret"
    more = [] if option != "--extra-index-url" else [f"--index-url {at(index, 'none')}"]
    (index.directory.parent / "inner.txt").write_text(f"{option} {at(index, 'a', 'me:secret')}\n")
    add(house, "-r inner.txt", *more, "own")


@pytest.mark.parametrize("how", ["variables", "file", "names"])
def test_two_indexes_of_one_origin(
    index: Index, house: Wheelhouse, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    for name in ("own", "other"):
        make_wheel(index.directory, name)
    index.passwords.update(one="first", two="second")
    first, second = at(index, "one", "me:first"), at(index, "two", "me:second")
    lines = ["own", "other"]
    if how == "variables":
        monkeypatch.setenv("UV_DEFAULT_INDEX", first)
        monkeypatch.setenv("UV_INDEX", second)
    elif how == "file":
        lines = [f"--index-url {first}", f"--extra-index-url {second}", *lines]
    else:
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"one={at(index, 'one')}")
        monkeypatch.setenv("UV_INDEX", f"two={at(index, 'two')}")
        for name, password in index.passwords.items():
            monkeypatch.setenv(f"UV_INDEX_{name.upper()}_USERNAME", "me")
            monkeypatch.setenv(f"UV_INDEX_{name.upper()}_PASSWORD", password)
    add(house, *lines)
    assert len(house.wheels()) == 2


def test_a_keyring(
    index: Index, house: Wheelhouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index.directory, "own")
    index.password = "secret"  # noqa: S105
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "keyring"  # as uv and pip ask it
    program.write_text('#!/bin/sh\n[ "$1 $3" = "get me" ] && echo secret\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("UV_KEYRING_PROVIDER", "subprocess")
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url.replace("://", "://me@"))
    add(house, "own")


def test_a_keyring_is_not_asked_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "keyring"
    program.write_text(f"#!/bin/sh\necho asked >>{tmp_path}/log\necho secret\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("UV_KEYRING_PROVIDER", "subprocess")
    monkeypatch.setenv("UV_INDEX", "https://me:known@a.example/one https://you@a.example/two")
    request = httpx.Request("GET", "https://a.example/one/a.whl")
    flow = IndexAuth().of().auth_flow(request)

    def given(request: httpx.Request) -> str:
        return base64.b64decode(request.headers["Authorization"].removeprefix("Basic ")).decode()

    assert given(next(flow)) == "me:known"
    assert not (tmp_path / "log").exists()
    assert given(flow.send(httpx.Response(401))) == "you:secret"
    assert (tmp_path / "log").exists()


@pytest.mark.parametrize(
    "content", [b"machine a login b\xe4 password c", b"machine a login b secret", None]
)
def test_a_netrc_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    file = tmp_path / "netrc"
    file.write_bytes(content or b"")
    monkeypatch.setenv("NETRC", str(file))
    if content is None:
        error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        monkeypatch.setattr(netrc, "netrc", Mock(side_effect=error))
    with pytest.raises(ConfigError, match="netrc cannot be read: ") as caught:
        IndexAuth()
    assert caught.value.hint
    assert "secret" not in caught.value.message


def serve(index: Index, place: Path, *, clients: bool = False) -> tuple[Path, Path]:
    """Speak TLS; the key and the certificate, which is its own authority.

    With ``clients`` those have to show it too.
    """
    key, certificate = place / "key.pem", place / "certificate.pem"
    names = f"subjectAltName=IP:127.0.0.1,DNS:{BEHIND}"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", names]
    subject += ["-addext", "basicConstraints=critical,CA:FALSE"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *subject]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if clients:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificate)
    index.encrypt(context)
    return key, certificate


@pytest.mark.slow
@pytest.mark.parametrize("how", ["UV_INSECURE_HOST", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS"])
def test_certificates(
    index: Index, house: Wheelhouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    make_wheel(index.directory, "own")
    _, certificate = serve(index, tmp_path)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
    if how == "UV_INSECURE_HOST":
        monkeypatch.setenv(how, "127.0.0.1")
    else:
        monkeypatch.setenv(how, "1")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # in place of the system's
    add(house, "own")


@pytest.mark.slow
def test_certificates_that_only_the_system_trusts(
    index: Index, house: Wheelhouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index.directory, "own")
    _, certificate = serve(index, tmp_path)
    store = tmp_path / "store"
    store.mkdir()
    shutil.copy(certificate, store / "ca-certificates.crt")
    subprocess.run(["openssl", "rehash", str(store)], check=True, capture_output=True)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
    # In a mount namespace of its own, where that is the system's store.
    shell = f'mount --bind {shlex.quote(str(store))} /etc/ssl/certs && exec "$@"'
    command = [
        "unshare",
        "--map-root-user",
        "--mount",
        "--propagation",
        "slave",
        "sh",
        "-c",
        shell,
        "sh",
    ]
    command += [sys.executable, "-m", "wheelmount.cli.main", "download", "own", "-d", "house"]
    for variable, code in (("UV_NATIVE_TLS", 0), ("UV_SYSTEM_CERTS", 0), ("UV_NO_PROGRESS", 69)):
        environment = {**os.environ, variable: "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        shutil.rmtree("house")


@pytest.mark.slow
def test_a_certificate_of_the_client(
    index: Index, house: Wheelhouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index.directory, "own")
    key, certificate = serve(index, tmp_path, clients=True)
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with pytest.raises(WheelmountError):
        add(house, "own")
    both = tmp_path / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    monkeypatch.setenv("SSL_CLIENT_CERT", str(both))
    add(house, "own")


class _Proxy(BaseHTTPRequestHandler):
    """Passes requests for ``BEHIND`` on to this machine, for clients that say who they are."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _permitted(self) -> bool:
        token = base64.b64encode(b"me:p@ss").decode()
        if self.headers.get("Proxy-Authorization") == f"Basic {token}":
            return True
        self.send_response(407)
        self.send_header("Proxy-Authenticate", 'Basic realm="proxy"')
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def do_CONNECT(self) -> None:
        host, _, port = self.path.partition(":")
        if not self._permitted():
            return
        assert host == BEHIND
        with socket.create_connection(("127.0.0.1", int(port))) as there:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_pass_on, args=(there, self.connection))
            back.start()
            _pass_on(self.connection, there)
            back.join()
        self.close_connection = True

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self._permitted():
            return
        assert url.hostname == BEHIND and url.port is not None
        there = http.client.HTTPConnection("127.0.0.1", url.port)
        kept = {name: text for name, text in self.headers.items() if name in ("Accept", "Range")}
        there.request(self.command, url.path, headers=kept)
        answer = there.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for name, text in answer.getheaders():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)
        there.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(65536):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy() -> Iterator[str]:
    """Address of a proxy that asks for a user's name and password."""
    with serving(_Proxy) as server:
        yield f"127.0.0.1:{server.server_port}"


@pytest.mark.parametrize(
    ("variable", "encrypted"),
    [("HTTP_PROXY", False), ("HTTPS_PROXY", True), ("ALL_PROXY", False), ("ALL_PROXY", True)],
)
def test_all_goes_through_a_proxy(
    index: Index,
    house: Wheelhouse,
    proxy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    encrypted: bool,
) -> None:
    make_wheel(index.directory, "needed")
    make_wheel(index.directory, "own", requires=["needed"])
    if encrypted:
        _, certificate = serve(index, tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url.replace("127.0.0.1", BEHIND))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, f"http://{proxy}")
    with pytest.raises(WheelmountError):
        add(house, "own")
    assert not index.requests
    monkeypatch.setenv(variable, f"http://me:p%40ss@{proxy}")
    add(house, "own")
    assert len(house.wheels()) == 2
    assert "p%40ss" not in "".join(
        path.read_text() for path in house.directory.iterdir() if path.suffix in (".toml", ".json")
    )


@pytest.mark.parametrize(
    ("host", "no_proxy", "through"),
    [
        ("index.test", "", True),
        ("index.test:8443", "other.test", True),
        ("index.test", "index.test", False),
        ("index.test:8443", ".test", False),
        ("[::1]:8443", "::1", False),
        ("index.test", "*", False),
    ],
)
def test_hosts_without_certificates_are_reached_by_the_proxy(
    monkeypatch: pytest.MonkeyPatch, host: str, no_proxy: str, through: bool
) -> None:
    for name in ("HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "UV_INSECURE_HOST"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "proxy.test:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    monkeypatch.setenv("UV_INSECURE_HOST", host)
    with fetch.connect(1) as client:
        transport = client._transport_for_url(httpx.URL(f"https://{host}/simple/"))
    assert isinstance(transport, httpx.HTTPTransport)
    assert isinstance(transport._pool, httpcore.HTTPProxy) == through


def test_a_host_without_certificates_that_is_no_host_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UV_INSECURE_HOST", "index:port")
    with pytest.raises(UnavailableError, match="no connection") as caught:
        fetch.connect(1)
    assert "UV_INSECURE_HOST" in str(caught.value.hint)
