"""Locks on files of directories that are removed meanwhile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from wheelmount.errors import WaitError
from wheelmount.lock import locked, try_lock


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
