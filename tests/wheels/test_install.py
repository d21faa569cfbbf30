from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path
from typing import Literal

import pytest
import uv

from wheelmount.errors import InputError
from wheelmount.wheels.install import clean_environment, install_command

from .support import Index, make_wheel

TOOLS: list[Literal["uv", "pip"]] = ["uv", "pip"]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a fresh virtual environment with pip."""
    directory = tmp_path_factory.mktemp("venv")
    venv.create(directory, with_pip=True)
    return str(directory / "bin" / "python")


def run(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(uv.find_uv_bin()).parent}:{os.environ['PATH']}"
    return subprocess.run(
        command,
        env={**clean_environment(), "PATH": path, **more},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_installs_from_the_directory_alone(
    index: Index,
    tmp_path: Path,
    python: str,
    tool: Literal["uv", "pip"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Everything of the caller's points at an index that has a newer version.
    make_wheel(index.directory, "own", "2.0")
    packages = make_wheel(tmp_path / "some packages", "own", requires=["other>=1"]).parent
    make_wheel(packages, "other")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, index.url)
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    for file, text in {
        "pip/pip.conf": f"[global]\nno-index = false\nfind-links = {index.address}\n",
        "uv/uv.toml": f'no-index = false\noffline = false\nindex-url = "{index.url}"\n',
    }.items():
        (tmp_path / ".config" / file).parent.mkdir(parents=True)
        (tmp_path / ".config" / file).write_text(text)

    done = run(install_command(tool, ["own", "other"], packages=str(packages), python=python))
    assert done.returncode == 0, done.stderr
    shown = run([python, "-c", "import own, other; print(own.VALUE, other.VALUE)"])
    assert shown.stdout == "1.0 1.0\n"
    missing = run(install_command(tool, ["nosuch"], packages=str(packages), python=python))
    assert missing.returncode != 0
    assert "nosuch" in missing.stderr
    assert index.requests == []
    run([python, "-m", "pip", "uninstall", "-qy", "own", "other"])


@pytest.mark.slow
def test_variables_of_pip_do_not_matter_to_the_command(tmp_path: Path, python: str) -> None:
    packages = make_wheel(tmp_path / "packages", "own").parent
    command = install_command("pip", ["own"], packages=str(packages), python=python)
    assert run(command, PIP_TARGET=str(tmp_path / "elsewhere")).returncode == 0
    assert not (tmp_path / "elsewhere").exists()
    assert run([python, "-m", "pip", "uninstall", "-qy", "own"]).returncode == 0


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    "requirement", ["--index-url=http://x", "-r/etc/passwd", "", "a\n-e .", "a @ https://x/a.whl"]
)
def test_what_is_no_requirement_is_refused(tool: Literal["uv", "pip"], requirement: str) -> None:
    with pytest.raises(InputError) as caught:
        install_command(tool, ["a", requirement], packages="/packages", python=None)
    assert caught.value.hint


def test_the_command() -> None:
    for tool in TOOLS:
        command = install_command(tool, ["a>=1", "b"], packages="/p", python=None)
        assert command[-3:] == ["--", "a>=1", "b"]
        assert "--python" not in command
        with pytest.raises(InputError, match="nothing is required"):
            install_command(tool, [], packages="/p")
        with pytest.raises(InputError, match="not an absolute path"):
            install_command(tool, ["a"], packages="p")
    with pytest.raises(InputError, match="conda"):
        install_command("conda", ["a"], packages="/p")  # type: ignore[arg-type]


def test_clean_environment() -> None:
    caller = {"PATH": "/bin", "PIP_FIND_LINKS": "/opt", "UV_INDEX": "http://x", "PIPX": "1"}
    cleaned = clean_environment(caller)
    assert cleaned == {
        "PATH": "/bin", "PIPX": "1", "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"
    }  # fmt: skip
    assert "PIP_FIND_LINKS" in caller
