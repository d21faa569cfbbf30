"""The tools that people build and run projects with, each with a wheelhouse and no network at all.

What docs/wheelhouses.md says of each is tried here. The project wants ``requests``, its build
backend hatchling, its tests ``six``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import uv

from wheelmount.wheels.redirect import environment, pip_conf, uv_toml
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import LOOPBACK

pytestmark = pytest.mark.network

PROJECT = ["requests", "six", "hatchling", "editables", "pip"]
TOOLS = ["build", "hatch", "pipx", "poetry", "tox"]

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "mine"
version = "1.0"
requires-python = ">=3.10"
dependencies = ["requests"]
[project.scripts]
mine = "mine:main"
[dependency-groups]
test = ["six"]
[tool.hatch.envs.default]
dependencies = ["six"]
[[tool.poetry.source]]
name = "packages"
url = "http://127.0.0.1:8000/simple/"
priority = "primary"
"""

MODULE = """
def main():
    import requests, urllib3
    print("mine ran with", requests.__version__, urllib3.__version__)
"""

TOX = """
[tox]
env_list = py
[testenv]
deps = six
commands = python -c "import six, mine; mine.main()"
"""

# A loopback, up, and nothing else; everything that is written lies in $HOME.
INSIDE = f"""
import os, sys
{LOOPBACK}
os.execvp("bash", ["bash", "-ec", sys.argv[1]])
"""


@dataclass(frozen=True)
class Place:
    """A wheelhouse, and environments with the tools installed from it."""

    packages: Path
    tools: Path
    pdm: Path
    lock: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("tools")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_CACHE_DIR", str(root / "cache"))
        patch.setenv("UV_NO_CONFIG", "1")
        house = Wheelhouse(root / "packages")
        # pdm with the versions its authors tested: with the newest of all it does not even start.
        for wanted in ([*PROJECT, *TOOLS], ["pdm[locked]"], ["urllib3<2.6"]):
            house.add(Wanted.of(wanted), targets=[Target.here()])
        make_project(root / "locked")
        # A lock of the public index, with an older version than the newest of the wheelhouse.
        run_here("uv", "lock", "-q", "-P", "urllib3<2.6", cwd=root / "locked")
    for name, wanted in (("tools", TOOLS), ("pdm", ["pdm[locked]"])):
        run_here("uv", "venv", "-q", str(root / name))
        python = str(root / name / "bin" / "python")
        offline = ["--offline", "--no-cache", "--no-index", "--find-links", str(house.directory)]
        run_here("uv", "pip", "install", "-q", "-p", python, *offline, *wanted)
    (root / "pip.conf").write_text(pip_conf(str(house.directory)))
    (root / "uv.toml").write_text(uv_toml(str(house.directory), system=False))
    return Place(house.directory, root / "tools", root / "pdm", root / "locked" / "uv.lock")


def run_here(program: str, *arguments: str, cwd: Path | None = None) -> None:
    found = uv.find_uv_bin() if program == "uv" else program
    subprocess.run([found, *arguments], cwd=cwd, check=True, timeout=120)


def make_project(directory: Path) -> None:
    (directory / "src" / "mine").mkdir(parents=True)
    (directory / "pyproject.toml").write_text(PYPROJECT)
    (directory / "src" / "mine" / "__init__.py").write_text(MODULE)
    (directory / "tox.ini").write_text(TOX)


def offline(script: str, place: Place, work: Path, **variables: str) -> str:
    """What a script prints that runs in a project of its own, without a network."""
    make_project(work / "project")
    shutil.copy(place.lock, work / "project")
    (work / "home").mkdir()
    bins = [place.tools / "bin", place.pdm / "bin", Path(uv.find_uv_bin()).parent]
    path = os.pathsep.join([*map(str, bins), "/usr/bin", "/bin"])
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", sys.executable, "-c", INSIDE, script],
        cwd=work / "project",
        env={"PATH": path, "HOME": str(work / "home"), "LANG": "C.UTF-8", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    print(done.stdout, done.stderr)  # seen when the test fails
    return done.stdout if done.returncode == 0 else f"failed with {done.returncode}"


PLAIN = {
    "build": "pyproject-build . && ls dist",
    "hatch": "hatch run python -c 'import six, mine; mine.main()' && hatch build -t wheel",
    "pipx": "pipx install . && ~/.local/bin/mine",
    "tox": "tox -q",
    "uv build": "uv build && ls dist",
    "uv run": "rm uv.lock && uv run mine && uv run --with six python -c 'import six'",
    "uv sync": "rm uv.lock && uv sync && .venv/bin/mine",
    "uv tool": "uv tool install . && ~/.local/bin/mine && uvx --from . mine",
}
WORKED = ("mine ran with", "mine-1.0-py3-none-any.whl")


@pytest.mark.costly
@pytest.mark.parametrize("tool", PLAIN)
def test_plain_commands_where_the_two_files_are(place: Place, tmp_path: Path, tool: str) -> None:
    files = environment(
        str(place.packages.parent / "pip.conf"), str(place.packages.parent / "uv.toml")
    )
    said = offline(PLAIN[tool], place, tmp_path, **files)
    assert any(word in said for word in WORKED)


@pytest.mark.costly
@pytest.mark.parametrize("tool", PLAIN)
def test_with_an_index_and_no_files(place: Place, tmp_path: Path, tool: str) -> None:
    index = f"{place.packages.as_uri()}/simple/"
    said = offline(PLAIN[tool], place, tmp_path, PIP_INDEX_URL=index, UV_DEFAULT_INDEX=index)
    assert any(word in said for word in WORKED)


@pytest.mark.costly
def test_pdm(place: Place, tmp_path: Path) -> None:
    script = "rm uv.lock; pdm install && .venv/bin/mine && pdm add six"
    index = f"{place.packages.as_uri()}/simple/"
    said = offline(script, place, tmp_path, PDM_PYPI_URL=index, PDM_CHECK_UPDATE="0")
    assert "mine ran with" in said


@pytest.mark.costly
def test_poetry_wants_a_server(place: Place, tmp_path: Path) -> None:
    script = f"""
python3 -m http.server -b 127.0.0.1 -d '{place.packages}' 8000 >/dev/null 2>&1 & server=$!
trap 'kill $server' EXIT
until python3 -c 'import socket; socket.create_connection(("127.0.0.1", 8000))' 2>/dev/null
do sleep 0.1; done
poetry install -n && "$(poetry env info -p)/bin/mine"
sed -i 's|http://127.0.0.1:8000|{place.packages.as_uri()}|' pyproject.toml
rm poetry.lock
if poetry lock -n; then echo "poetry reads directories now"; exit 1; fi
"""
    assert "mine ran with" in offline(script, place, tmp_path)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("script", "works"),
    [
        (
            "uv export -q --frozen --no-emit-project -o r.txt && uv venv -q && "
            "uv pip sync -q r.txt && uv pip install -q --no-deps . && .venv/bin/mine",
            True,
        ),
        ("uv sync -q && .venv/bin/mine", True),
        ("uv sync --frozen && .venv/bin/mine", False),
        ("uv sync --locked && .venv/bin/mine", False),
    ],
)
def test_a_lock_of_the_public_index(place: Place, tmp_path: Path, script: str, works: bool) -> None:
    files = environment(
        str(place.packages.parent / "pip.conf"), str(place.packages.parent / "uv.toml")
    )
    said = offline(script, place, tmp_path, **files)
    assert ("mine ran with" in said) == works
    if works:  # the version that was locked, and not the newest there is
        assert " 2.5." in said
