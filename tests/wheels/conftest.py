from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import Index


@pytest.fixture(autouse=True)
def _own_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No settings of pip, uv or netrc of whoever runs the tests, and nothing left behind."""
    for name in os.environ:
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "uv-cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # uv's own tries again take ten seconds in all where nobody answers.
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """An index over ``tmp_path / "index"``, empty at first."""
    (tmp_path / "index").mkdir()
    with Index(tmp_path / "index") as index:
        yield index


@pytest.fixture
def uv_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The same, and uv knows no other."""
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
    return index
