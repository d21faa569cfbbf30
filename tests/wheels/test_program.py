"""The program that hosts run, ``python -m wheelmount.wheels``: environments made and held."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from wheelmount.wheels.interpreter import running_version

from .support import make_wheel


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "wheelmount.wheels", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said = process.communicate(timeout=120)[1]
    return process.returncode, said


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_hosts_with_one_home_take_turns(tool: str, tmp_path: Path) -> None:
    names = [make_wheel(tmp_path / "house", f"a{n}").name.split("-")[0] for n in range(8)]
    common = (tool, str(tmp_path / "house"), str(tmp_path / "env"))
    outcomes = [ended(one) for one in [started(*common, *names) for _ in range(3)]]
    assert [code for code, _ in outcomes] == [0, 0, 0], outcomes
    python = tmp_path / "env" / "bin" / "python"
    code = f"import sys, {', '.join(names)}; print(sys.prefix)"
    assert subprocess.check_output([python, "-c", code], text=True) == f"{tmp_path / 'env'}\n"
    assert not (tmp_path / "env" / ".wheelmount-cache").exists()


@pytest.mark.slow
def test_an_environment_of_another_python_is_refused(tmp_path: Path) -> None:
    make_wheel(tmp_path / "house", "own")
    common = ("uv", str(tmp_path / "house"), str(tmp_path / "env"), "own")
    assert ended(started(*common))[0] == 0
    code, said = ended(started("--python", "3.8", *common))
    assert code == 65
    assert f"has Python {running_version()}, and the wheels are for 3.8\nhint: " in said


@pytest.mark.slow
def test_a_python_that_is_not_here(tmp_path: Path) -> None:
    make_wheel(tmp_path / "house", "own")
    common = ("uv", str(tmp_path / "house"), str(tmp_path / "env"), "own")
    code, said = ended(started("--python", "3.99", *common))
    assert code == 69
    assert "there is no Python 3.99 here" in said
    assert "\nhint: " in said
    assert not (tmp_path / "env" / "bin").exists()
