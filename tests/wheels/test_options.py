"""What people know of pip and uv, on the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal, TypeAlias

import pytest

from wheelmount.wheels import uvsettings
from wheelmount.wheels.credentials import IndexAuth
from wheelmount.wheels.install import install_command

from .support import Index, make_wheel
from .test_build import BACKEND, make_project

pytestmark = pytest.mark.slow

Tool: TypeAlias = Literal["uv", "pip"]


def run(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "wheelmount.cli.main", *arguments],
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        text=True,
        timeout=60,
    )
    print(done.stderr)
    return done


def wheels(*arguments: str, given: str | None = None) -> list[str]:
    """What a download comes to."""
    done = run("download", "-d", "house", "--json", *arguments, given=given)
    assert done.returncode == 0, done.stderr
    return sorted(name.split("-py3")[0] for name in json.loads(done.stdout)["wheels"])


@pytest.fixture
def more(uv_index: Index) -> Index:
    """An index with ``a`` that needs ``b``; a prerelease of ``b`` is newer."""
    make_wheel(uv_index.directory, "a", requires=["b<2"])
    for version in ("1.0", "1.5rc1", "2.0"):
        make_wheel(uv_index.directory, "b", version)
    return uv_index


def test_pre(more: Index) -> None:
    assert wheels("a") == ["a-1.0", "b-1.0"]
    assert wheels("a", "--pre") == ["a-1.0", "b-1.5rc1"]
    assert run("check", "house").returncode == 0


def test_exclude_newer(more: Index) -> None:
    more.sizes = True
    for file in more.directory.iterdir():
        year = 2026 if "b-2.0" in file.name else 2025
        more.uploaded[file.name] = f"{year}-01-01T00:00:00Z"
    assert wheels("b", "--exclude-newer", "2025-06-01") == ["b-1.0"]
    assert wheels("b", "--exclude-newer", "2026-06-01") == ["b-2.0"]
    assert run("check", "house").returncode == 0


def test_a_version_that_there_is_not(more: Index) -> None:
    make_wheel(more.directory, "b", "3.0", tag="cp27-cp27m-win32")
    for more.sizes in (False, True):
        done = run("download", "-d", "house", "b==9")
        assert done.returncode == 65
        assert "for this target there are b 2.0, 1.5rc1, 1.0\n" in done.stderr


def test_no_deps(more: Index) -> None:
    assert wheels("a", "--no-deps") == ["a-1.0"]
    assert run("check", "house", "a").returncode == 65
    assert run("check", "house").returncode == 0
    assert run("check", "house", "a", "--no-deps").returncode == 0


def test_override(more: Index, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("b==2.0\n")
    assert wheels("a", "--override", "mine.txt") == ["a-1.0", "b-2.0"]
    assert run("check", "house").returncode == 0
    assert run("check", "house", "a", "--override", "mine.txt").returncode == 0


@pytest.mark.parametrize("where", ["variable", "uv.toml", "pyproject.toml"])
def test_overrides_of_uv(more: Index, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    assert wheels("a") == ["a-1.0", "b-1.0"]
    if where == "variable":
        Path("mine.txt").write_text("b==2.0\n")
        monkeypatch.setenv("UV_OVERRIDE", "mine.txt")
    else:
        monkeypatch.delenv("UV_NO_CONFIG", raising=False)
        head = "" if where == "uv.toml" else '[project]\nname = "mine"\nversion = "1"\n[tool.uv]\n'
        Path(where).write_text(f'{head}override-dependencies = ["b==2.0"]\n')
    assert wheels("a") == ["a-1.0", "b-2.0"]
    assert run("check", "house", "a").returncode == 0
    assert run("check", "house").returncode == 0


def test_settings_of_uv_that_change_the_choice(
    more: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wheels("b") == ["b-2.0"]
    monkeypatch.setenv("UV_RESOLUTION", "lowest")
    assert wheels("b") == ["b-1.0"]
    monkeypatch.delenv("UV_RESOLUTION")
    Path("limits.txt").write_text("b<2\n")
    monkeypatch.setenv("UV_CONSTRAINT", "limits.txt")
    assert wheels("b") == ["b-1.0"]
    Path("limits.txt").write_text("b>=2\n")
    assert wheels("b") == ["b-2.0"]
    assert run("check", "house").returncode == 0


@pytest.mark.parametrize("name", ["uv.toml", "pyproject.toml"])
def test_a_pipe_above_is_not_waited_for(
    more: Index, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("UV_NO_CONFIG", raising=False)
    os.mkfifo(name)
    Path("below").mkdir()
    monkeypatch.chdir("below")
    done = run("download", "a", "-d", "house")
    assert (done.returncode, done.stdout) == (78, "")
    assert f"{name} is a pipe" in done.stderr
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    assert wheels("a") == ["a-1.0", "b-1.0"]


@pytest.mark.parametrize(
    "text",
    [
        "tool = 1",
        "tool.uv = 1",
        "[tool.uv]\npip = 1",
        "[tool.uv]\nindex = 1\nallow-insecure-host = 1\nfind-links = 1",
        '[tool.uv]\nindex = ["a"]',
        "[tool.uv]\npip.override-dependencies = 1\noverride-dependencies = 1",
        f"a = {'[' * 900}{']' * 900}",
    ],
    ids=lambda text: text[:20],
)
def test_malformed_settings_are_passed_over(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.delenv("UV_NO_CONFIG", raising=False)
    Path("uv.toml").write_text('[pip]\nindex-url = "https://example.org/simple"\n')
    Path("pyproject.toml").write_text(f"{text}\n")
    (table,) = uvsettings.tables()
    assert table["pip"] == {"index-url": "https://example.org/simple"}
    assert uvsettings.of_choice() == {}
    IndexAuth()


def test_of_directories_the_nearest_with_settings_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_NO_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    below = tmp_path / "above" / "near" / "below"
    below.mkdir(parents=True)
    (tmp_path / "config" / "uv").mkdir(parents=True)
    for folder in (tmp_path / "config" / "uv", tmp_path / "above", tmp_path / "above" / "near"):
        (folder / "uv.toml").write_text('find-links = ["links", "https://a.example/"]\n')
    (below.parent / "pyproject.toml").write_text("[tool.uv]\nno-index = true\n")
    (below / "pyproject.toml").write_text('[project]\nname = "a"\n')  # without settings of uv
    monkeypatch.chdir(below)
    found = [
        [str(tmp_path / place / "links"), "https://a.example/"]
        for place in ("above/near", "config/uv")
    ]
    assert [table["find-links"] for table in uvsettings.tables()] == found
    (below / "pyproject.toml").write_text("[tool.uv]\n")
    assert list(uvsettings.tables()) == [{}, {"find-links": found[1]}]
    monkeypatch.setenv("UV_CONFIG_FILE", "../uv.toml")
    (table,) = uvsettings.tables()
    assert [Path(one).exists() for one in table["find-links"]] == [False, False]
    assert Path(table["find-links"][0]).resolve() == below.parent / "links"


def test_a_member_of_a_workspace_has_the_settings_of_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_NO_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    workspace = '[tool.uv]\nindex-url = "https://root.example/"\n[tool.uv.workspace]\n'
    workspace += 'members = ["packages/*"]\nexclude = ["packages/other"]\n'
    member = '[project]\nname = "a"\n[tool.uv.sources]\nroot = {workspace = true}\n'
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "root"\n{workspace}')
    for name in ("packages/a/below", "packages/other", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "uv.toml").write_text(f'index-url = "https://{name[-1]}.example/"\n')
    for name in ("packages/a", "packages/other"):
        (tmp_path / name / "pyproject.toml").write_text(member)
    found = {}
    for name in ("packages/a/below", "packages/a", "packages/other", "elsewhere"):
        monkeypatch.chdir(tmp_path / name)
        found[name] = uvsettings.of_indexes()["index-url"][8:-9]
    assert found == {
        "packages/a/below": "root",
        "packages/a": "root",
        "packages/other": "r",
        "elsewhere": "root",
    }, "as uv 0.13.9 says with -v"


def test_standard_input_and_urls(more: Index) -> None:
    for _ in range(2):
        assert wheels("-r", "-", given="b<2\n") == ["b-1.0"]
    assert len(json.loads(Path("house/wheelmount.json").read_text())["requests"]) == 1
    Path("others.txt").write_text("b<2\n")
    assert wheels("-r", "-", given="-r others.txt\n-c others.txt\n") == ["b-1.0"]
    (more.directory / "wanted.txt").write_text("b==2.0\n")
    assert wheels("-r", f"{more.address}/files/wanted.txt") == ["b-2.0"]
    done = run("download", "-d", "house", "-r", f"{more.address}/files/nothing.txt")
    assert done.returncode == 66
    assert "404" in done.stderr
    wheel = more.directory / "a-1.0-py3-none-any.whl"
    assert wheels(more.file_url(wheel)) == ["a-1.0", "b-1.0"]


@pytest.mark.costly
@pytest.mark.parametrize("line", ["./near/{}", "near/{}", "own @ ./near/{}", "own @ near/{}"])
def test_relative_paths_in_standard_input(more: Index, tmp_path: Path, line: str) -> None:
    wheel = make_wheel(tmp_path / "near", "own", requires=["b<2"])
    given = f"{line.format(wheel.name)}\n"
    Path("needs.txt").write_text(given)
    assert wheels("-r", "needs.txt") == ["b-1.0", "own-1.0"]
    shutil.rmtree("house")
    assert wheels("-r", "-", given=given) == ["b-1.0", "own-1.0"]
    assert wheels("-r", "-", given="--find-links near\nown\n") == ["b-1.0", "own-1.0"]
    assert run("check", "house").returncode == 0


def test_projects_in_standard_input(more: Index, tmp_path: Path) -> None:
    make_wheel(more.directory, "backend", module=BACKEND.encode())
    make_wheel(more.directory, "needed")
    make_project(tmp_path / "near" / "mine")
    for line in ("./near/mine", "own-name @ ./near/mine"):
        assert wheels("-r", "-", given=f"{line}\n") == ["needed-1.0", "own_name-1.0"]
        shutil.rmtree("house")


def test_a_file_of_what_only_other_targets_need(more: Index) -> None:
    Path("needs.txt").write_text("a; python_version < '3'\n")
    assert wheels("-r", "needs.txt") == []
    for name in ("uv", "pip"):
        assert run("check", "house", "--tool", name).returncode == 0
    assert wheels("-r", "needs.txt", "--prune") == []
    (file,) = Path("house/requests").iterdir()
    options: dict[Tool, list[str]] = {
        "uv": ["--target", "nothing", "--python", sys.executable],
        "pip": ["--dry-run"],
    }
    house = str(Path("house").absolute())
    for tool, further in options.items():
        command = install_command(tool, (), packages=house, file=str(file.absolute()))
        done = subprocess.run([*command, *further], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["--index-url", "-i", "--extra-index-url", "--find-links"])
def test_indexes(more: Index, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"{more.address}/nothing")
    more.passwords["own"] = "secret"
    address = f"{more.address}/own/simple".replace("://", "://me:secret@")
    where = address if how != "--find-links" else str(more.directory)
    assert wheels("b<2", how, where) == ["b-1.0"]


def test_dry_run_and_forgetting(more: Index) -> None:
    done = run("download", "-d", "house", "a", "--dry-run")
    assert done.stdout == "a-1.0-py3-none-any.whl\nb-1.0-py3-none-any.whl\n"
    assert not Path("house").exists()
    wheels("a")
    wheels("b==2.0")
    assert run("download", "-d", "house", "a", "--forget", "--prune").returncode == 0
    assert [path.name for path in Path("house").glob("*.whl")] == ["b-2.0-py3-none-any.whl"]
    done = run("download", "-d", "house", "a", "--forget")
    assert done.returncode == 64
    assert "hint: it was for: b==2.0" in done.stderr


def test_an_index_of_pip_that_is_passed_over(tmp_path: Path) -> None:
    bare = {"UV_NO_CONFIG": "1", "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    named = {**bare, "PIP_INDEX_URL": "https://index.example/simple"}
    assert "PIP_INDEX_URL names the index https://index" in uvsettings.passed_over(named)
    assert uvsettings.passed_over({**named, "UV_DEFAULT_INDEX": "https://other.example"}) == ""
    assert "http://[x" not in uvsettings.passed_over({**bare, "PIP_INDEX_URL": "http://[x"})
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://conf.example/simple\n")
    assert "pip.conf names the index https://conf" in uvsettings.passed_over(bare)
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://pypi.org/simple\n")
    assert "pip.conf" not in uvsettings.passed_over(bare)
