"""Commands whose directories are full."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Cli, SmallDisk, mounts_shown

Disks = Callable[[Path], SmallDisk]

WORDS = {"bytes": "no space left for ", "inodes": "no inodes left for "}
"""How errors begin to say what is lacking."""


@pytest.fixture
def directory(workplace: Path) -> Path:
    """A small directory with a script."""
    directory = workplace / "source"
    directory.mkdir()
    (directory / "file").write_text("first")
    (directory / "script.sh").write_text("echo ran\n")
    return directory


@pytest.mark.costly
@pytest.mark.fuse
@pytest.mark.hosts
@pytest.mark.parametrize("what", WORDS)
@pytest.mark.parametrize("place", ["runtime", "store"])
def test_a_full_directory_of_hosts_is_named(
    small_disk: Disks, workplace: Path, directory: Path, cli: Cli, place: str, what: str
) -> None:
    full = small_disk(workplace / place)
    shown = workplace / "shown"
    mount = "mount", "--hosts", "local:1", directory, shown
    full.fill(what)
    for command in (mount, ("run", "--hosts", "local:1", directory, directory / "script.sh")):
        done = cli(*command)
        assert done.returncode == 74, done.stderr
        assert WORDS[what] + f"{full.path}" in done.stderr or what == "bytes"
        assert f"{full.path}" in done.stderr
        assert f"set WHEELMOUNT_{place.upper()}" in done.stderr
        assert "\nhint: " in done.stderr
    assert cli("status").returncode == 0
    assert not shown.exists()
    full.free()
    assert cli(*mount).returncode == 0
    full.fill(what)
    (directory / "file").write_text("second and longer")
    code = cli("refresh", directory).returncode
    assert code in (0, 74)  # what is written may just fit
    assert (shown / "file").read_text() == ("first" if code else "second and longer")
    assert len(mounts_shown(cli)) == 1
    done = cli("umount", shown)
    assert done.returncode == 0, done.stderr
    assert mounts_shown(cli) == []


@pytest.mark.hosts
@pytest.mark.parametrize("what", WORDS)
def test_a_session_needs_room(small_disk: Disks, workplace: Path, cli: Cli, what: str) -> None:
    full = small_disk(workplace / "runtime")
    full.fill(what)
    done = cli("up", "--hosts", "local:1")
    assert done.returncode == 74, done.stderr
    assert WORDS[what] + f"{full.path}" in done.stderr
    full.free()
    assert cli("up", "--hosts", "local:1").returncode == 0
    full.fill(what)
    assert cli("status").returncode == 0
    done = cli("down")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("setting", ["runtime_dir", "cache_dir", "state_dir", "store"])
def test_a_directory_that_nobody_can_make(
    directory: Path, cli: Cli, setting: str, workplace: Path
) -> None:
    command = {
        "cache_dir": ("cache", "clean"),
        "state_dir": ("config", "trust", directory),
        "store": ("mount", "--hosts", "local:1", directory, workplace / "shown"),
    }.get(setting, ("status",))
    (directory / "wheelmount.toml").write_text("fanout = 2\n")
    variable = f"WHEELMOUNT_{setting.upper()}"
    done = cli(*command, env={**os.environ, variable: "/proc/nothing"})
    assert done.returncode == 78, done.stderr
    assert "/proc/nothing" in done.stderr
    assert f"hint: set {variable}" in done.stderr
