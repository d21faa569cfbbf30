"""Environments made of unpacked wheels, and what scripts say that they need."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest
import uv

from wheelmount.errors import ConfigError, InputError
from wheelmount.wheels import inline, venv
from wheelmount.wheels.interpreter import base_executable
from wheelmount.wheels.target import Target
from wheelmount.wheels.venv import Environment
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import make_wheel, record_row, spoil

HERE = Target.here()


def full(directory: Path) -> Path:
    """A wheel with a program, data and headers."""
    wheel = make_wheel(directory, "full", module=b"def main():\n    print(__file__)\n")
    more = {
        "full-1.0.data/data/share/full.txt": b"data",
        "full-1.0.data/headers/full.h": b"header",
        "full-1.0.data/scripts/old": b"#!python\nimport full; full.main()\n",
        "full-1.0.dist-info/entry_points.txt": b"[console_scripts]\nfull = full:main\n",
    }
    changed: dict[str, bytes | None] = {**more, "full-1.0.dist-info/RECORD": None}
    spoil(wheel, changed)
    with zipfile.ZipFile(wheel, "a") as archive:
        rows = [record_row(name, archive.read(name)) for name in archive.namelist()]
        text = "\n".join([*rows, "full-1.0.dist-info/RECORD,,", ""])
        archive.writestr("full-1.0.dist-info/RECORD", text)
    return wheel


def make(tmp_path: Path, *wheels: Path) -> tuple[Environment, bool]:
    house = Wheelhouse(tmp_path / "house")
    report = house.add(Wanted.of(map(str, wheels)), targets=[HERE])
    cache = tmp_path / "cache"
    return venv.make(house.directory, report.wheels, HERE, base_executable(), cache)


def said(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_it_is_made_once_and_works_elsewhere(tmp_path: Path) -> None:
    wheels = full(tmp_path / "given"), make_wheel(tmp_path / "given", "needs", requires=["full"])
    made, fresh = make(tmp_path, *wheels)
    assert fresh
    assert made.packages == ("full==1.0", "needs==1.0")
    assert make(tmp_path, *wheels) == (made, False)
    assert list(venv.every(tmp_path / "cache")) == [made]
    folder = tmp_path / "a place"
    made.folder.rename(folder)
    for program in ("full", "old"):
        assert said(folder / "bin" / program).startswith(f"{folder}/lib/")
    python = folder / "bin" / "python"
    assert said(python, "-c", "import sys; print(sys.prefix)") == f"{folder}\n"
    assert (folder / "share" / "full.txt").read_text() == "data"
    assert len(list(folder.rglob("full.h"))) == 1
    assert len(list(folder.rglob("full.*.pyc"))) == 1
    environment = {**os.environ, "UV_CACHE_DIR": str(tmp_path / "uv")}
    pip = [uv.find_uv_bin(), "pip"]
    for verb in ("check", "list"):
        done = subprocess.run(
            [*pip, verb, "-p", str(python)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert "needs" in done.stdout
    # All of its files are in RECORD, and all that RECORD lists are there.
    uninstall = [*pip, "uninstall", "-p", str(python), "full", "needs"]
    subprocess.run(uninstall, env=environment, check=True)
    left = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    names = {path.name for path in left if not path.is_symlink()}
    assert names == {"pyvenv.cfg", venv.NOTE}


def test_environments_in_a_directory_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "environments"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="not a directory of yours alone"):
        make(tmp_path, make_wheel(tmp_path / "given", "one"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("print(1)\n", None),
        ("# /// script\n# dependencies = [\n#   'a>1',\n# ]\n# ///\n", inline.Inline(("a>1",))),
        (
            "#!/usr/bin/env x\n# /// script\r\n# requires-python = '>=3.9'\r\n"
            "# [tool.uv]\r\n# exclude-newer = '2025-01-01'\r\n# ///\r\n",
            inline.Inline((), ">=3.9", "2025-01-01"),
        ),
        ("# /// other\n# x = 1\n# ///\n", None),
    ],
)
def test_script_metadata(text: str, found: inline.Inline | None) -> None:
    assert inline.read(text.encode()) == found


@pytest.mark.parametrize(
    "text",
    [
        "# /// script\n# dependencies = [\n# ///\n",
        "# /// script\n# dependencies = 'a'\n# ///\n",
        "# /// script\n# requires-python = 'new'\n# ///\n",
        "# /// script\n# dependencies = ['/tmp']\n# ///\n",  # it would be built as the user
        "# /// script\n# dependencies = ['--index-url=x']\n# ///\n",
        "# /// script\n# [tool.uv.sources]\n# a = {path = 'x'}\n# ///\n",
        "# /// script\n# ///\n\n# /// script\n# x = 1\n# ///\n# /// script\n# x = 1\n# ///\n",
    ],
)
def test_bad_script_metadata(text: str) -> None:
    with pytest.raises(InputError):
        inline.read(text.encode())
