"""Commands that start in a mount, and servers that replace it, exclude each other."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from wheelmount import entry, shared
from wheelmount.config import Settings, private_directory


@pytest.fixture
def mounts(settings: Settings) -> Iterator[list[Path]]:
    """Private directories of two mounts of this user."""
    above = private_directory(settings.private_runtime() / "mounts")
    made = [above / "one-host0", above / "two-host0"]
    for directory in made:
        directory.mkdir()
        entry.make(directory)
    yield made
    for directory in made:
        shutil.rmtree(directory)


def test_a_mount_is_not_replaced_while_a_command_starts(
    mounts: list[Path], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "PATIENCE", 0.1)
    with entry.starting(settings), entry.starting(settings):
        for directory in mounts:
            with entry.replacing(directory) as free:
                assert not free
    for directory in mounts:
        with entry.replacing(directory) as free:
            assert free


def test_mounts_do_not_wait_for_each_other(mounts: list[Path]) -> None:
    with entry.replacing(mounts[0]) as first, entry.replacing(mounts[1]) as second:
        assert first
        assert second


def test_a_command_starts_when_the_mount_has_been_replaced(
    mounts: list[Path], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "PATIENCE", 60.0)
    replaced: list[bool] = []

    def start() -> None:
        with entry.starting(settings):
            replaced.append(done.is_set())

    done, command = threading.Event(), threading.Thread(target=start)
    with entry.replacing(mounts[1]):
        command.start()
        time.sleep(0.2)
        done.set()
    command.join()
    assert replaced == [True]


def test_a_command_waits_for_no_server_that_hangs(
    mounts: list[Path], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "PATIENCE", 0.1)
    with entry.replacing(mounts[0]), entry.starting(settings):
        pass


def test_mounts_of_other_machines_are_not_waited_for(
    mounts: list[Path], settings: Settings
) -> None:
    (mounts[0] / shared.MACHINE).write_text("elsewhere\n")
    with entry.starting(settings):
        with entry.replacing(mounts[0]) as free:
            assert free
        shared.mark(mounts[1])


def test_mounts_of_earlier_versions_have_no_lock(mounts: list[Path], settings: Settings) -> None:
    (mounts[0] / entry.FILE).unlink()
    with entry.starting(settings), entry.replacing(mounts[0]) as free:
        assert free
