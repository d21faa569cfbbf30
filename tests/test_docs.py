"""The documentation, as its readers' programs make it."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import wheelmount
from tests.conftest import CHECKOUT
from wheelmount.wheels.sandbox import HIDDEN

PROGRAMS = Path(sys.executable).parent


def _run(
    *command: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.costly
@pytest.mark.slow
def test_pages_are_made_without_a_warning(tmp_path: Path) -> None:
    done = _run(
        *(PROGRAMS / "sphinx-build", "-q", "-W", "--keep-going"),
        *("-d", tmp_path / "cache", CHECKOUT / "docs", tmp_path / "pages"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "pages" / "index.html").read_text()
    assert 'href="hosts.html#access-control"' in page, "a link of the README"


def test_tests_that_pages_name_are_there() -> None:
    pages = "".join(path.read_text() for path in (CHECKOUT / "docs").rglob("*.md"))
    tests = "".join(path.read_text() for path in (CHECKOUT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", pages))
    assert named
    assert {name for name in named if f"def {name}(" not in tests} == set()


def test_each_kind_of_host_has_a_test_for_each_case() -> None:
    page = (CHECKOUT / "docs" / "hosts.md").read_text()
    section = page.partition("## Tests for each kind of host\n")[2].partition("\n## ")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    kinds, _, *cases = table
    assert kinds[1:] == ["`local`", "`ssh`", "`slurm`", "`kubernetes`", "`tls`"]
    assert len(cases) > 10
    for case, *cells in cases:
        assert len(cells) == len(kinds) - 1, case
        for cell in cells:
            assert re.fullmatch(r"`test_\w+`|none: .{10,}", cell), (case, cell)


@pytest.mark.slow
def test_man_pages_are_made_of_the_help(tmp_path: Path) -> None:
    assert _run(PROGRAMS / "click-man", "wheelmount", "--target", tmp_path).returncode == 0
    pages = sorted(tmp_path.iterdir())
    assert {"wheelmount.1", "wheelmount-run.1", "wheelmount-image-build.1"} <= {
        page.name for page in pages
    }
    for page in pages:
        done = _run("man", "--warnings", "-l", page, env={"MANWIDTH": "80", "LC_ALL": "C.UTF-8"})
        assert (done.returncode, done.stderr) == (0, ""), page
        assert "SYNOPSIS" in done.stdout


def test_a_module_file_leads_to_the_command() -> None:
    script = f"""
    . /usr/share/lmod/lmod/init/bash
    module use {CHECKOUT}/examples/modulefiles
    module load wheelmount
    command -v wheelmount
    echo "$PATH"
    module unload wheelmount
    command -v wheelmount || echo gone
    module whatis wheelmount 2>&1
    """
    done = _run("bash", "-c", script, env={"PATH": "/usr/bin:/bin"})
    lines = done.stdout.splitlines()
    assert lines[0] == f"{CHECKOUT}/.venv/bin/wheelmount", done.stderr
    assert lines[1] == f"/usr/bin:/bin:{CHECKOUT}/.venv/bin", "the user's own Python comes first"
    assert "gone" in lines
    assert "package cache and container launcher" in done.stdout


def test_pictures_are_those_that_their_source_draws() -> None:
    pictures = runpy.run_path(str(CHECKOUT / "docs" / "pictures" / "draw.py"))["PICTURES"]
    assert pictures
    for name, draw in pictures.items():
        file = CHECKOUT / "docs" / "pictures" / name
        assert file.read_text() == draw().svg(), "run: python docs/pictures/draw.py"


def _texts() -> str:
    """All texts in the package's code, each on a line; ``…`` for what is filled in."""
    texts = []
    for module in Path(wheelmount.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.JoinedStr):
                pieces = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                texts.append("".join(map(str, pieces)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    page = (CHECKOUT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 30
    texts = _texts()
    for message in messages:
        for piece in message.split("…"):
            assert piece.strip(" :") in texts, message


def test_directories_that_builds_do_not_see_are_named() -> None:
    page = (CHECKOUT / "docs" / "wheelhouses.md").read_text()
    (sentence,) = (line for line in page.splitlines() if line.startswith("**The sandbox.**"))
    assert {name for name in HIDDEN if f"`{name}`" not in sentence} == set()
