"""A small wheelhouse, and a program that only looks like apptainer for the pure ones."""

from __future__ import annotations

import base64
import hashlib
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from wheelmount.containers import image

FAKE = """#!/bin/sh
[ "$1" != --version ] || { echo "apptainer version 0.0"; exit; }
echo "INFO:    Starting build..."
while [ $# -gt 2 ]; do shift; done
echo built >>"$(dirname "$0")/builds"
if grep -q SLOW "$2"; then sleep 60; fi
if grep -q BROKEN "$2"; then
  echo "cp: cannot stat 'nothing'" >&2
  echo "FATAL:   While performing build: exit status 1" >&2
  exit 255
fi
cat "$2" >"$1"
"""


@pytest.fixture
def fake_apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An apptainer that copies the definition to the image and counts how often it did."""
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheelhouse: ``hello`` 1.0, and ``greeting`` 2.0 that depends on it."""
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "hello", "1.0")
    make_wheel(folder, "greeting", "2.0", requires="hello")
    return folder


def make_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """Write a wheel with one module into a directory."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        record += f"{path},sha256={digest.rstrip('=')},{len(text)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def make_sif(path: Path, identity: int) -> Path:
    """Write what begins as a SIF, with an identifier of its own."""
    head = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0")
    path.write_bytes(head + b"SIF_MAGIC\x0001\x0002\x00" + bytes([identity]) * 16 + bytes(100))
    return path


def built(name: str, sif: Path, **build_args: str) -> Path:
    """The image of ``images/NAME.def``, on top of that of ``python.def``."""
    made = sif.with_name(f"{name}.sif")
    definition = CHECKOUT / "images" / f"{name}.def"
    image.build(definition, made, build_args={"base": str(sif), **build_args})
    assert image.inspect(made).labels["wheelmount.image"] == name
    return made


@pytest.fixture(scope="session")
def ci(sif: Path) -> Path:
    return built("ci", sif)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that hosts of a lab see too, as they see the checkout."""
    with tempfile.TemporaryDirectory(prefix="ci-", dir=CHECKOUT / "build") as name:
        yield Path(name)
