"""Overlays: one writer, private, and gone when removed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from wheelmount.containers.overlay import Overlay, remove_tree
from wheelmount.errors import ConfigError, ContainerError, InputError


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    return Overlay(tmp_path / "state", "mine", "n1")


def test_create_list_remove(overlay: Overlay) -> None:
    assert Overlay.all(overlay.state_dir) == []
    assert overlay.create() == overlay.path
    assert overlay.create() == overlay.path
    assert overlay.path.stat().st_mode & 0o777 == 0o700
    other = Overlay(overlay.state_dir, "mine", "n2")
    other.create()
    assert Overlay.all(overlay.state_dir) == [overlay, other]
    assert overlay.remove()
    assert not overlay.remove()
    assert Overlay.all(overlay.state_dir) == [other]
    other.remove()
    assert list((overlay.state_dir / "overlays").iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a:b", "-x", "a b", "x" * 200])
def test_names_that_are_no_file_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        Overlay(tmp_path, name, "n1")
    with pytest.raises(InputError):
        Overlay(tmp_path, "mine", name)


def test_somebody_elses_directory_is_not_taken(overlay: Overlay) -> None:
    overlay.create()
    overlay.path.chmod(0o777)
    with pytest.raises(ConfigError):
        overlay.create()


def test_second_writer_is_told_who_has_it(overlay: Overlay) -> None:
    overlay.create()
    with overlay.lock("pip install x"):
        writer = rf"pip install x \(process {os.getpid()}"
        with pytest.raises(ContainerError, match=writer), overlay.lock("another"):
            pass
        with pytest.raises(ContainerError, match="in use"):
            overlay.remove()
        with Overlay(overlay.state_dir, "mine", "n2").lock("the same on another host"):
            pass
    with overlay.lock("later"):
        pass


def test_lock_lives_as_long_as_the_container(overlay: Overlay) -> None:
    with overlay.lock("container") as descriptor:
        child = subprocess.Popen(["sleep", "60"], pass_fds=[descriptor])
    try:
        with pytest.raises(ContainerError), overlay.lock("second"):
            pass
    finally:
        child.kill()
        child.wait()
    with overlay.lock("second"):
        pass


def test_lock_after_removal_is_a_new_one(overlay: Overlay) -> None:
    for _ in range(2):
        overlay.create()
        with overlay.lock("write"):
            pass
        assert overlay.remove()


def test_directories_their_owner_may_not_enter_are_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "work" / "work").mkdir(parents=True)
    (tree / "work" / "work" / "file").touch()
    (tree / "link").symlink_to(tmp_path / "nowhere")
    (tree / "work" / "work").chmod(0)
    remove_tree(tree)
    assert not tree.exists()
