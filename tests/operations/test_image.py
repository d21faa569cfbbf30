"""What ``--image`` means."""

from __future__ import annotations

from pathlib import Path

import pytest

from wheelmount.operations.image import parse_images

REFERENCE = "docker://python:3.12-slim"


@pytest.mark.parametrize(("text", "host"), [(REFERENCE, ""), (f"host0={REFERENCE}", "host0")])
def test_no_file_of_the_working_directory_takes_the_place_of_a_registry(
    text: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planted = tmp_path / text
    planted.parent.mkdir(parents=True)
    planted.touch()
    assert parse_images(text) == ({}, {host: REFERENCE})


def test_a_file_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_images("a=b,c") == ({"a": Path("b"), "": Path("c")}, {})
    (tmp_path / "a=b,c").touch()
    assert parse_images("a=b,c") == ({"": Path("a=b,c")}, {})
