"""Whoever uv resolves with also downloads: indexes, their credentials, certificates and proxies."""

from __future__ import annotations

import os
import shlex
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from wheelmount.errors import WheelmountError
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import TARGET, Index, make_wheel


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


def serve(index: Index, place: Path, *, clients: bool = False) -> tuple[Path, Path]:
    """Speak TLS; the key and the certificate, which is its own authority.

    With ``clients`` those have to show it too.
    """
    key, certificate = place / "key.pem", place / "certificate.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
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
