"""Locks on files of directories that are removed meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lockless import without_locks
from wheelmount.config import Settings
from wheelmount.errors import ConfigError, WaitError, WheelmountError
from wheelmount.lock import has_locks, locked, try_lock


def test_only_one_has_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = try_lock(path)
    assert first is not None
    assert try_lock(path) is None
    os.close(first)
    second = try_lock(path)
    assert second is not None
    os.close(second)


def test_what_was_removed_is_not_locked_and_not_made_anew(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    held = try_lock(place / "lock")
    assert held is not None
    (place / "lock").unlink()
    other = try_lock(place / "lock")
    assert other is not None, "another file of that name"
    shutil.rmtree(place)
    os.close(held)
    os.close(other)
    assert try_lock(place / "lock") is None
    assert not place.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        try_lock(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_that_is_held_is_an_error_in_the_end(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    for _ in range(2):
        with locked(file, 0.1), pytest.raises(WaitError, match="another process has held"):
            locked(file, 0.1).__enter__()
    assert file.stat().st_mode & 0o777 == 0o600


LOCKLESS = """
import sys
from pathlib import Path
from wheelmount.errors import WaitError
from wheelmount.lock import has_locks, locked
place = Path(sys.argv[1])
assert not has_locks(place)
with locked(place / "lock", 0.1):
    try:
        locked(place / "lock", 0.1).__enter__()
    except WaitError:
        print("held")
with locked(place / "lock", 0.1):
    print("free")
"""


def test_where_files_cannot_be_locked_the_existence_of_a_file_is_the_lock(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    assert has_locks(place)
    command = [sys.executable, "-c", LOCKLESS, str(place)]
    done = subprocess.run(
        command, env=without_locks(place, tmp_path), capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("held\nfree\n", "")
    assert not list(place.iterdir())


def refuse(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_file_system_whose_locks_fail_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(WheelmountError, match=f"^{tmp_path} is on a file system without locks"):
        locked(tmp_path / "lock", 0.1).__enter__()


def test_a_runtime_directory_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(runtime_dir=str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="without locks") as caught:
        settings.private_runtime()
    assert str(caught.value.hint).startswith("set WHEELMOUNT_RUNTIME_DIR to another directory")
    monkeypatch.undo()
    assert settings.private_runtime().is_dir()
