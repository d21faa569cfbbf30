"""What servers and archives of strangers have no end of."""

from __future__ import annotations

import bz2
import gzip
import tarfile
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from wheelmount.errors import SourceError, TransferError, WheelError
from wheelmount.wheels import confined, fetch
from wheelmount.wheels.download import download
from wheelmount.wheels.given import file_of
from wheelmount.wheels.listed import offered_versions

from .support import TARGET, lock_of, make_wheel, package_of, serving


class _Endless(BaseHTTPRequestHandler):
    """Answers with bytes without an end; at paths with ``slow``, one each 0.1 s."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        slow = "slow" in self.path
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"#" if slow else b"#" * (1 << 16))
                time.sleep(0.1 if slow else 0)
        except OSError:
            pass  # the client went away


@pytest.fixture
def address() -> Iterator[str]:
    with serving(_Endless) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_a_file_of_requirements(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceError, match="more than 16777216 bytes"):
        file_of(f"{address}/r.txt", tmp_path)
    monkeypatch.setattr(fetch, "LONGEST", 1.0)
    with pytest.raises(TransferError, match="within 1 s"):
        file_of(f"{address}/slow.txt", tmp_path)


def test_a_page_of_an_index(address: str) -> None:
    assert offered_versions("a", f"{address}/simple", TARGET) == []


def test_a_wheel(address: str, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index", "a")
    package = package_of(wheel, f"{address}/{wheel.name}")
    package["wheels"][0]["size"] = wheel.stat().st_size
    with pytest.raises(WheelError, match="has the sha256"):
        download(lock_of(package), tmp_path / "house", target=TARGET)
    assert not list((tmp_path / "house").glob("*.whl*"))


@pytest.mark.parametrize("kind", ["size", "header", "negative", "members"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, suffix: str
) -> None:
    monkeypatch.setattr(confined, "MOST", 1 << 24)
    first = tarfile.TarInfo("a-1.0/first")
    first.size = {"size": 1 << 24, "header": 1 << 23}.get(kind, 0)
    if kind == "header":
        first.type = tarfile.XHDTYPE
    block = bytearray(first.tobuf())
    if kind == "negative":
        block[124:136] = b"\xff" * 10 + (-1024).to_bytes(2, "big", signed=True)
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    last = tarfile.TarInfo("a-1.0/pyproject.toml")
    text = b"[build-system]\nrequires = ['found']\n"
    last.size = len(text)
    source = tmp_path / f"a-1.0.tar{suffix}"
    openers: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".bz2": bz2.open}
    with openers[suffix](source, "wb") as file:
        file.write(bytes(block) * (1 << 15 if kind == "members" else 1))
        file.write(bytes(first.size))
        file.write(last.tobuf() + text.ljust(512, b"\0") + bytes(1024))
    assert "found" not in confined._required(source)


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz"])
def test_an_archive_that_ends(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "first").write_bytes(bytes(1 << 22))
    (tmp_path / "pyproject.toml").write_text("[build-system]\nrequires = ['found']\n")
    source = tmp_path / f"a-1.0.tar{suffix}"
    with tarfile.open(source, f"w:{suffix[1:]}") as archive:  # type: ignore[call-overload]
        archive.add(tmp_path / "first", f"a-1.0/{'long' * 60}")
        archive.add(tmp_path / "pyproject.toml", "a-1.0/pyproject.toml")
    assert confined._required(source) == ["found"]
