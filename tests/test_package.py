"""The package as it is published: an archive of the sources, and a wheel that needs no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import uv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import wheelmount
from tests.conftest import CHECKOUT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_the_lock_for_developers_has_all_that_they_install() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    lists = [project["project"]["dependencies"], *project["dependency-groups"].values()]
    wanted = [Requirement(text) for list_ in lists for text in list_ if isinstance(text, str)]
    lines = (CHECKOUT / "requirements-dev.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and line.lstrip()[0] != "#"]
    versions: dict[str, list[Version]] = {}
    for pin in pins:
        (specifier,) = pin.specifier
        versions.setdefault(canonicalize_name(pin.name), []).append(Version(specifier.version))
    assert len(wanted) > 40
    for one in wanted:
        pinned = versions.get(canonicalize_name(one.name))
        assert pinned, f"{one.name}: make requirements-dev.lock again, as its first lines say"
        assert all(one.specifier.contains(version) for version in pinned), (one, pinned)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an archive of the sources, and the wheel that is built from it."""
    place = tmp_path_factory.mktemp("published")
    command = [uv.find_uv_bin(), "build", "--quiet", "--out-dir", str(place), str(CHECKOUT)]
    subprocess.run(command, check=True, timeout=300)
    return place


def _only(place: Path, pattern: str) -> Path:
    (found,) = place.glob(pattern)
    return found


@pytest.mark.network
def test_an_index_takes_both(published: Path) -> None:
    archives = [_only(published, "*.tar.gz"), _only(published, "*.whl")]
    bin_ = Path(sys.executable).parent
    subprocess.run([bin_ / "twine", "check", "--strict", *archives], check=True, timeout=60)
    subprocess.run([bin_ / "check-wheel-contents", archives[1]], check=True, timeout=60)


@pytest.mark.network
def test_both_have_the_license_and_the_wheel_says_that_it_has_types(published: Path) -> None:
    with tarfile.open(_only(published, "*.tar.gz")) as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}
    assert {"LICENSE", "README.md", "pip.conf", "tests/run.sh"} <= names
    with zipfile.ZipFile(_only(published, "*.whl")) as wheel:
        packed = set(wheel.namelist())
    assert "wheelmount/py.typed" in packed
    assert f"wheelmount-{wheelmount.__version__}.dist-info/licenses/LICENSE" in packed


@pytest.mark.costly
@pytest.mark.network
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_all_that_it_needs_comes_as_wheels(published: Path, python: str) -> None:
    compile_ = [uv.find_uv_bin(), "pip", "compile", "--quiet", "--only-binary", ":all:"]
    compile_ += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "-"]
    wheel = _only(published, "*.whl")
    done = subprocess.run(
        compile_,
        input=f"wheelmount @ {wheel.as_uri()}",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "torchmonarch==" in done.stdout
    assert "pyfuse3" not in done.stdout


@pytest.mark.network
def test_the_wheel_needs_no_checkout(published: Path, tmp_path: Path) -> None:
    """Its modules come from the wheel, and what they need from where the tests have it."""
    place = tmp_path / "place"
    install = [uv.find_uv_bin(), "pip", "install", "-q", "--no-deps", "--target", str(place)]
    subprocess.run([*install, "--python", sys.executable, _only(published, "*.whl")], check=True)
    environment = {**os.environ, "PYTHONPATH": str(place)}
    code = "import wheelmount; print(wheelmount.__file__, wheelmount.remotemount.__name__)"
    code += "; from wheelmount.wheels import redirect; redirect.pip_conf(), redirect.uv_toml()"
    command = [str(place / "bin" / "wheelmount"), "--version"]
    said = [
        subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        for words in ([sys.executable, "-c", code], command)
    ]
    assert [done.returncode for done in said] == [0, 0], said
    file, name = said[0].stdout.split()
    assert file.startswith(f"{place}/") and name == "remotemount"
    assert said[1].stdout.split()[-1] == wheelmount.__version__
