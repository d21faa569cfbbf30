"""The program that hosts run, ``python -m wheelmount.wheels``: environments made and held."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.lockless import without_locks
from wheelmount.wheels.interpreter import running_version

from .support import make_wheel


def started(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "wheelmount.wheels", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)


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
def test_an_environment_on_a_file_system_without_locks(tmp_path: Path) -> None:
    """uv cannot use a cache there, and hosts take turns by the existence of a file."""
    names = [make_wheel(tmp_path / "house", f"a{n}").name.split("-")[0] for n in range(8)]
    common = ("uv", str(tmp_path / "house"), str(tmp_path / "env"), *names)
    lockless = without_locks(tmp_path / "env", tmp_path)
    lockless["TMPDIR"] = str(tmp_path / "temporary")
    (tmp_path / "temporary").mkdir()
    outcomes = [ended(one) for one in [started(*common, env=lockless) for _ in range(3)]]
    assert outcomes == [(0, said) for _, said in outcomes]
    assert not any("flock" in said for _, said in outcomes), outcomes
    assert not list((tmp_path / "temporary").iterdir())
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-c", f"import {', '.join(names)}"], check=True)


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
