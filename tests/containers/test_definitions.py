"""The definitions that come with the package, by name, and what a shell offers for words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import uv

from tests.conftest import CHECKOUT, Cli
from wheelmount.containers import definitions
from wheelmount.containers.overlay import Overlay
from wheelmount.errors import InputError

NAMES = ["baked", "ci", "gpu", "python", "python-docker"]


def test_they_go_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert definitions.names() == NAMES
    assert definitions.find("ci") == CHECKOUT / "images" / "ci.def"
    assert definitions.find("ci.def") == Path("ci.def"), "a file"
    assert definitions.arguments(definitions.find("ci")) == {"base"}
    with pytest.raises(InputError, match="no definition wrong"):
        definitions.find("wrong")


def test_no_file_of_the_working_directory_takes_the_place_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").touch()
    (tmp_path / "ci").mkdir()
    for name in ("python", "ci"):
        assert definitions.find(name) == CHECKOUT / "images" / f"{name}.def"
    assert definitions.find("./python") == Path("python")
    assert definitions.copy("python", tmp_path / "mine")


@pytest.mark.slow
def test_they_are_part_of_the_wheel(tmp_path: Path) -> None:
    build = [uv.find_uv_bin(), "build", "--wheel", "-o", str(tmp_path), str(CHECKOUT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"wheelmount/images/{name}.def" for name in NAMES} <= names
    assert {"wheelmount/images/uv.toml", "wheelmount/pip.conf"} <= names


@pytest.mark.slow
def test_one_is_built_from_anywhere(cli: Cli, workplace: Path, fake_apptainer: Path) -> None:
    """By a program that only looks like apptainer: what is built by it is the definition's text."""
    work = workplace / "work"
    done = cli("image", "build", "ci", env=os.environ)
    assert done.stdout == "ci.sif: built\n", done.stderr
    assert sorted(path.name for path in work.glob("*.sif")) == ["ci.sif", "python.sif"]
    assert json.loads(cli("image", "build", "python", "--json", env=os.environ).stdout) == {
        "path": "python.sif",
        "built": False,
    }
    assert "one of baked, ci, gpu" in cli("image", "build", "wrong", env=os.environ).stderr


@pytest.mark.slow
@pytest.mark.parametrize("stamped", [True, False], ids=["built here", "copied from elsewhere"])
def test_a_base_of_the_user_is_used_as_it_is(
    stamped: bool, cli: Cli, workplace: Path, fake_apptainer: Path
) -> None:
    base = workplace / "work" / "python.sif"
    assert cli("image", "init", "python", "mine").returncode == 0
    assert cli("image", "build", "mine/python.def", env=os.environ).returncode == 0
    if not stamped:
        base.with_name("python.sif.stamp").unlink()
    before = base.stat()
    done = cli("image", "build", "ci", env=os.environ)
    assert done.stdout == "ci.sif: built\n", done.stderr
    assert f"{base} is used as it is" in done.stderr
    assert (base.stat().st_ino, base.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.slow
def test_one_is_written_to_be_edited(cli: Cli, workplace: Path) -> None:
    work = workplace / "work"
    done = cli("image", "init", "python", "mine")
    assert done.stdout == "mine/python.def\nmine/uv.toml\nmine/pip.conf\n", done.stderr
    text = (work / "mine" / "python.def").read_text()
    assert "\n    pip.conf /etc/pip.conf\n" in text
    assert ".." not in text.replace("...", "")
    assert "is there already" in cli("image", "init", "python", "mine").stderr
    assert cli("image", "init", "ci").stdout == "ci.def\n"
    assert "base=python.sif" in (work / "ci.def").read_text()


@pytest.mark.slow
def test_overlays_that_were_not_used_go(cli: Cli, workplace: Path) -> None:
    state = workplace / "state"
    for name in ("old", "used", "young"):
        Overlay(state, name, "host0").create()
        with Overlay(state, name, "host0").lock("a test"):
            (state / "overlays" / name / "host0" / "upper").mkdir(exist_ok=True)
        if name != "young":
            os.utime(state / "overlays" / name / ".host0.lock", (1, 1))
    with Overlay(state, "used", "host0").lock("a test"):
        os.utime(state / "overlays" / "used" / ".host0.lock", (1, 1))
        done = cli("overlay", "prune", "--json")
    assert [each["name"] for each in json.loads(done.stdout)] == ["old"], done.stderr
    assert [each.name for each in Overlay.all(state)] == ["used", "young"]
    assert cli("overlay", "prune", "--unused", "0").stdout.count(" removed ") == 2


def _offered(words: str, workplace: Path) -> list[str]:
    environment = {
        **os.environ,
        "_WHEELMOUNT_COMPLETE": "bash_complete",
        "COMP_WORDS": f"wheelmount {words}",
        "COMP_CWORD": str(len(words.split(" "))),
    }
    program = Path(sys.executable).with_name("wheelmount")
    done = subprocess.run(
        [program],
        env=environment,
        cwd=workplace / "work",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.costly
@pytest.mark.fuse
@pytest.mark.hosts
def test_a_shell_completes_names_of_what_there_is(cli: Cli, workplace: Path, source: Path) -> None:
    Overlay(workplace / "state", "kept", "host0").create()
    (workplace / "work" / "mine.sif").touch()
    (workplace / "work" / "mine.def").touch()
    assert _offered("overlay rm ", workplace) == ["kept"]
    assert _offered("image build p", workplace) == ["python", "python-docker"]
    assert _offered("image build m", workplace) == ["mine.def"]
    assert _offered("exec --image m", workplace) == ["mine.sif"]
    assert _offered("exec --overlay k", workplace) == ["kept"]
    assert _offered("down ", workplace) == []
    assert cli("up", "--hosts", "local:1").returncode == 0
    assert cli("mount", source, f"{workplace}/w").returncode == 0
    try:
        assert _offered("down d", workplace) == ["default"]
        assert set(_offered(f"umount {workplace}/", workplace)) == {f"{workplace}/w", str(source)}
    finally:
        assert cli("down").returncode == 0
    (workplace / "wheelmount.toml").write_text("nonsense")
    assert _offered("overlay rm k", workplace) in ([], ["kept"])
