"""Environments made of unpacked wheels, and what scripts say that they need."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import uv

from wheelmount.errors import ConfigError, InputError, WheelError
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.tree import ROOT, Inode, Stamp, Tree
from wheelmount.wheels import carried, inline, venv
from wheelmount.wheels.archive import hash_file
from wheelmount.wheels.carried import Carried
from wheelmount.wheels.interpreter import base_executable
from wheelmount.wheels.target import Target
from wheelmount.wheels.unpacked import Unpacked
from wheelmount.wheels.venv import Environment
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import make_wheel, with_files

HERE = Target.here()


def full(directory: Path) -> Path:
    """A wheel with a program, data and headers."""
    wheel = make_wheel(directory, "full", module=b"def main():\n    print(__file__)\n")
    return with_files(
        wheel,
        {
            "full-1.0.data/data/share/full.txt": b"data",
            "full-1.0.data/headers/full.h": b"header",
            "full-1.0.data/scripts/old": b"#!python\nimport full; full.main()\n",
            "full-1.0.dist-info/entry_points.txt": b"[console_scripts]\nfull = full:main\n",
        },
    )


def make(tmp_path: Path, *wheels: Path) -> tuple[Environment, bool]:
    house = Wheelhouse(tmp_path / "house")
    report = house.add(Wanted.of(map(str, wheels)), targets=[HERE])
    cache = tmp_path / "cache"
    planned = venv.plan(house.directory, report.answers[0], HERE, base_executable(), cache)
    planned.make()
    return Environment.read(planned.folder), planned.items is not None


def said(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.slow
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


def seen(tree: Tree) -> dict[bytes, tuple[Inode, Stamp, bytes]]:
    """All that a tree says of each path, but for numbers of inodes; which paths are one file."""
    first: dict[int, bytes] = {}
    found = {b"": (tree.inodes[ROOT], tree.stamps[ROOT], b"")}
    for path, number in sorted(tree.walk()):
        inode = tree.inodes[number]
        if inode.is_file:
            inode = inode._replace(path=b"")
        found[path] = inode, tree.stamps[number], first.setdefault(number, path)
    return found


def test_the_tree_of_a_new_environment_is_what_a_scan_finds(tmp_path: Path) -> None:
    both = {"shared.txt": b"of both", "deep/er/empty.py": b""}
    wheels = [
        with_files(
            full(tmp_path / "given"), {f"full-1.0.data/purelib/a/{k}": v for k, v in both.items()}
        ),
        with_files(make_wheel(tmp_path / "given", "needs"), {f"b/{k}": v for k, v in both.items()}),
    ]
    house = Wheelhouse(tmp_path / "house")
    report = house.add(Wanted.of(map(str, wheels)), targets=[HERE])
    plans = [
        venv.plan(house.directory, report.answers[0], HERE, base_executable(), tmp_path / "cache")
        for _ in range(2)
    ]
    tree = plans[0].make()
    assert tree is not None
    scanned = scan(os.fsencode(plans[0].folder))
    assert seen(tree) == seen(scanned)
    assert len([n for n in tree.inodes.values() if n.is_file and n.nlink > 1]) >= 2
    assert [*map(list, tree.names.values())] == [sorted(names) for names in tree.names.values()]
    assert max(tree.inodes) < tree.limit
    paths = {number: [p for p, n in tree.walk() if n == number] for number in tree.inodes}
    assert all(i.path in paths[n] for n, i in tree.inodes.items() if i.is_file)
    assert plans[1].make() is None, "another process was faster"
    assert seen(scan(os.fsencode(plans[0].folder))).keys() == seen(tree).keys()


LIBRARY = f"lib/python{HERE.minor_release}/site-packages"


@pytest.mark.parametrize(
    ("path", "replaced"),
    [
        ("data/bin/a", "bin/a"),
        (f"data/lib64/{LIBRARY[4:]}/b.py", f"{LIBRARY}/b.py"),
        (f"data/{LIBRARY}/a.py", f"{LIBRARY}/a.py"),
    ],
)
def test_the_cache_stays_as_it_is_whatever_an_environment_replaces(
    tmp_path: Path, path: str, replaced: str
) -> None:
    wheel = with_files(
        make_wheel(tmp_path / "given", "a"),
        {
            f"a-1.0.data/{path}": b"of the wheel\n",
            "a-1.0.data/scripts/a": b"#!python\nprint('script')\n",
        },
    )
    made, _ = make(tmp_path, wheel, make_wheel(tmp_path / "given", "b"))
    assert (made.folder / replaced).is_file()
    objects = tmp_path / "cache" / "unpacked" / "objects"
    for file in objects.glob("*/*"):
        assert hash_file(file) == file.name.removesuffix("x")
    assert Environment.read(made.folder) == made


@pytest.mark.slow
@pytest.mark.parametrize("path", ["needs.py", "full"])
@pytest.mark.parametrize("spoil", [lambda file: file.unlink(), lambda file: file.write_bytes(b"")])
def test_a_file_that_the_cache_lost_is_unpacked_again(
    tmp_path: Path, path: str, spoil: Callable[[Path], object]
) -> None:
    wheels = full(tmp_path / "given"), make_wheel(tmp_path / "given", "needs", requires=["full"])
    made, _ = make(tmp_path, *wheels)
    files = {file: file.read_bytes() for file in made.folder.rglob("*") if file.is_file()}
    unpacked = Unpacked(tmp_path / "cache" / "unpacked")
    for recipe in unpacked.add([(wheel, hash_file(wheel)) for wheel in wheels]):
        for _, contents in recipe.schemes():
            if path in contents:
                spoil(Path(unpacked.object(contents[path])))
    made.folder.rename(tmp_path / "aside")
    assert make(tmp_path, *wheels) == (made, True)
    assert {file: file.read_bytes() for file in files} == files


@pytest.mark.slow
def test_a_damaged_environment_is_replaced(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "given", "a")
    made, _ = make(tmp_path, wheel)
    (made.folder / venv.NOTE).write_bytes(b"")
    (made.folder / "bin" / "python").unlink()
    assert make(tmp_path, wheel) == (made, True)
    assert (made.folder / "bin" / "python").exists()
    assert os.listdir(made.folder.parent) == [made.folder.name]


@pytest.mark.parametrize("path", ["wheelmount.json", "wheelmount.json/a", "pyvenv.cfg/a"])
def test_a_file_of_the_environment_stays(tmp_path: Path, path: str) -> None:
    wheel = with_files(make_wheel(tmp_path / "given", "a"), {f"a-1.0.data/data/{path}": b"{}"})
    own = path.partition("/")[0]
    with pytest.raises(WheelError, match=rf"{wheel.name} would .* place of {own}") as caught:
        make(tmp_path, wheel)
    assert caught.value.hint
    assert list(venv.every(tmp_path / "cache")) == []


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
        f"# /// script\n# a = {'[' * 900}{']' * 900}\n# ///\n",
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


def test_programs_of_a_python_that_is_brought_along_stay(tmp_path: Path) -> None:
    prefix = tmp_path / "python"
    subprocess.run([uv.find_uv_bin(), "venv", "-q", "-p", base_executable(), prefix], check=True)
    (prefix / "bin" / "a").write_text("its own")
    wheel = with_files(make_wheel(tmp_path / "given", "a"), {"a-1.0.data/scripts/a": b"#!python\n"})
    house = Wheelhouse(tmp_path / "house")
    report = house.add(Wanted.of([str(wheel)]), targets=[HERE])
    brought = Carried(HERE.minor_release, HERE.python_version, prefix)
    made = venv.plan(house.directory, report.answers[0], HERE, brought, tmp_path / "cache")
    assert made.make() is None, "what came along is not in its tree"
    assert (made.folder / "bin" / "a").read_text().startswith("#!/bin/sh")
    assert (prefix / "bin" / "a").read_text() == "its own"


def test_a_python_on_another_file_system_is_copied(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        if os.stat(memory).st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is one file system only")
        prefix = Path(memory, "python")
        (prefix / "bin").mkdir(parents=True)
        (prefix / "bin" / "python").write_text("a program")
        (prefix / "bin" / "python").chmod(0o755)
        Carried(HERE.minor_release, HERE.python_version, prefix).place(tmp_path / "there")
    placed = tmp_path / "there" / "bin" / "python"
    assert placed.read_text() == "a program"
    assert placed.stat().st_mode & 0o777 == 0o755


def test_a_python_that_cannot_be_placed_is_one_short_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "python"
    prefix.mkdir()
    for name in "abc":
        (prefix / name).touch()

    def full(source: str, _target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source)

    monkeypatch.setattr(carried, "link", full)
    with pytest.raises(OSError, match="No space") as caught:
        Carried(HERE.minor_release, HERE.python_version, prefix).place(tmp_path / "there")
    assert caught.value.errno == errno.ENOSPC
