"""Disks that are full or read-only, and what runs leave that were killed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NOBODY
from wheelmount import disk
from wheelmount.lock import try_lock
from wheelmount.wheels.scratch import abandoned, clear_fresh, scratch

from .support import Fault, Index, make_wheel

root_only = pytest.mark.skipif(os.getuid() != 0, reason="mounts")

KEPT = [".wheelmount.lock", "pylock.toml", "requests", "simple", "wheelmount.json"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "wheelmount.cli.main", *arguments]


def within(mounts: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line where something was mounted, and list the directory then."""
    script = f'{mounts} && {{ "$@"; code=$?; ls -A house; exit $code; }}'
    return subprocess.run(
        [
            "unshare",
            "--mount",
            "--propagation",
            "slave",
            "sh",
            "-c",
            script,
            "sh",
            *command(*arguments),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
@root_only
@pytest.mark.parametrize("told", [True, False])
def test_a_full_disk(uv_index: Index, tmp_path: Path, told: bool) -> None:
    wheel = make_wheel(uv_index.directory, "own", padding=3_000_000)
    uv_index.sizes = told
    (tmp_path / "house").mkdir()
    done = within("mount -t tmpfs -o size=1m tmpfs house", "download", "own", "-d", "house")
    assert done.returncode == 74
    assert "no space left for" in done.stderr
    assert ("3.0 MB are needed" in done.stderr) == told
    assert "\nhint: " in done.stderr
    assert set(done.stdout.split()) <= {".wheelmount.lock", "wheelmount.json", "requests"}
    assert (uv_index.asked(wheel)[-1:] == [None]) == (not told)


@pytest.mark.slow
@root_only
def test_a_complete_directory_that_is_read_only(uv_index: Index, tmp_path: Path) -> None:
    for name in ("own", "other"):
        make_wheel(uv_index.directory, name)
    download = ["download", "own", "-d", "house"]
    subprocess.run(command(*download), check=True, capture_output=True)
    mounts = "mount --bind house house && mount -o remount,bind,ro house"
    done = within(mounts, *download)
    assert done.returncode == 0, done.stderr
    assert "are there already" in done.stderr
    assert within(mounts, "check", "house").returncode == 0
    done = within(mounts, "download", "other", "-d", "house")
    assert done.returncode == 66
    assert "Read-only file system" in done.stderr


@pytest.mark.slow
def test_what_a_killed_run_leaves_is_cleared_by_the_next(uv_index: Index, tmp_path: Path) -> None:
    wheel = make_wheel(uv_index.directory, "own", padding=100_000)
    uv_index.faults[wheel.name] = [Fault(cut=50_000, hang=True, agent="python-httpx")]
    house = tmp_path / "house"
    download = command("download", "own", "-d", "house")
    process = subprocess.Popen(download, stderr=subprocess.DEVNULL)
    part = house / f"{wheel.name}.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (house / ".wheelmount.json.12345").write_text("{")
    assert list(house.glob(".wheelmount-temporary-*"))
    assert list(house.glob("pylock.*.toml"))
    subprocess.run(download, check=True, capture_output=True)
    assert sorted(os.listdir(house)) == sorted([*KEPT, wheel.name])


def test_scratch_of_others_stays_while_they_live(tmp_path: Path) -> None:
    with scratch(tmp_path) as one, scratch(tmp_path) as other:
        assert one.is_dir()
        assert other.is_dir()
    assert not list(tmp_path.iterdir())


def test_scratch_that_was_left_is_locked_while_it_is_deleted(tmp_path: Path) -> None:
    with scratch(tmp_path) as place:
        shutil.copytree(place, tmp_path / f"{place.name}x")
        (left,) = [str(each) for each in abandoned(tmp_path)]
        assert left == f"{place}x"
        for each in abandoned(tmp_path):
            assert list(abandoned(tmp_path)) == []
            shutil.rmtree(each)
            assert list(abandoned(tmp_path)) == []
    assert not list(tmp_path.iterdir())


READ_ONLY = """
import shutil, tempfile
from pathlib import Path
from wheelmount.wheels import scratch
for turn in range(2):
    with scratch.scratch() as place:
        (place / "image" / "usr").mkdir(parents=True)
        (place / "image" / "usr" / "file").touch()
        (place / "image" / "usr").chmod(0o555)
        if turn == 0:  # as a killed run leaves it
            shutil.copytree(place, place.with_name(f"{place.name}0"))
print(len(list(Path(tempfile.gettempdir()).iterdir())))
"""


def test_read_only_directories_do_not_stay() -> None:
    user = NOBODY if os.getuid() == 0 else os.getuid()  # root may do what modes forbid
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        os.chown(temporary, user, -1)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY],
            env={**os.environ, "TMPDIR": temporary},
            user=user,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_scratch_is_locked_by_a_file(tmp_path: Path) -> None:
    """Locks of directories are seen by one machine only on NFS."""
    with scratch(tmp_path) as place:
        held = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not list(abandoned(tmp_path))
        os.close(held)


def test_scratch_that_another_process_sees_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    make = tempfile.mkdtemp

    def watched(**how: Any) -> str:
        seen.append(abandoned(tmp_path))
        place: str = make(**how)
        if len(seen) == 1:
            assert str(next(seen[0])) == place
        return place

    monkeypatch.setattr(tempfile, "mkdtemp", watched)
    with scratch(tmp_path) as place:
        assert len(seen) == 2
        for left in seen[0]:  # the first one goes on
            shutil.rmtree(left)
        assert place.is_dir()
        assert try_lock(place / ".lock") is None


@pytest.mark.slow
def test_scratch_of_many_at_once(tmp_path: Path) -> None:
    def use(_: int) -> bool:
        with scratch(tmp_path) as place:
            (place / "file").touch()
            time.sleep(0.002)
            return (place / "file").exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(400)))
    assert not list(tmp_path.iterdir())


def test_two_writers_with_one_number_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers that share a directory."""
    file, replace = tmp_path / "file", Path.replace
    written: list[str] = []

    def other_writes_first(fresh: Path, target: Path) -> Path:
        if not written:
            written.append("other")
            disk.write(file, "of the other")
            assert file.read_text() == "of the other"
        return replace(fresh, target)

    monkeypatch.setattr(Path, "replace", other_writes_first)
    disk.write(file, "own")
    assert file.read_text() == "own"
    assert list(tmp_path.iterdir()) == [file]


def test_what_killed_writers_left_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, kept = tmp_path / "file", tmp_path / ".other.12"
    kept.touch()
    with monkeypatch.context() as killed, pytest.raises(ZeroDivisionError):
        killed.setattr(Path, "replace", lambda *_: 1 / 0)
        killed.setattr(Path, "unlink", lambda *_: None)
        disk.write(file, "")
    assert len(list(tmp_path.iterdir())) == 2
    clear_fresh(tmp_path, re.compile("file"))
    assert list(tmp_path.iterdir()) == [kept]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="directory"):
        disk.write(tmp_path / "file", b"x")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.slow
@root_only
@pytest.mark.parametrize("options", ["size=4k", "nr_inodes=3"])
def test_a_full_cache_of_uv_is_not_called_a_conflict(
    uv_index: Index, tmp_path: Path, options: str
) -> None:
    make_wheel(uv_index.directory, "own", padding=100_000)
    full = tmp_path / "full"
    for name in ("house", "full"):
        (tmp_path / name).mkdir()
    done = within(
        f"mount -t tmpfs -o {options} tmpfs full && export UV_CACHE_DIR={full}",
        "download", "own", "-d", "house",
    )  # fmt: skip
    assert done.returncode == 74, done.stderr
    assert f"left for {full}" in done.stderr
    assert "\nhint: " in done.stderr
