"""What ``--image`` means."""

from __future__ import annotations

from pathlib import Path

import pytest

from wheelmount.config import Settings
from wheelmount.hosts.spec import parse
from wheelmount.operations.image import Image, order, parse_images
from wheelmount.operations.launch import Launch
from wheelmount.operations.site import Site
from wheelmount.progress import SILENT

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


@pytest.mark.parametrize(
    ("hosts", "settings", "expected"),
    [
        ("ssh:n1", Settings(), None),
        ("ssh:n1", Settings(state_dir="/scratch/me"), "/scratch/me"),
        ("local:1", Settings(), Settings().state_dir),
    ],
)
def test_overlays_are_where_the_host_has_them(
    hosts: str, settings: Settings, expected: str | None
) -> None:
    site = Site(parse(hosts), settings, SILENT)
    image = Image({"": Path("a.sif")})
    assert order("n1", image, None, Launch(), site).state_dir == expected


def test_a_file_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_images("a=b,c") == ({"a": Path("b"), "": Path("c")}, {})
    (tmp_path / "a=b,c").touch()
    assert parse_images("a=b,c") == ({"": Path("a=b,c")}, {})
