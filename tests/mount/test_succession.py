"""From one tree to the next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wheelmount.mount.layout import Layout
from wheelmount.mount.succession import Doubt, Succession
from wheelmount.mount.tree import ROOT, Tree, scan


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "directory").mkdir()
    for name in ("a", "b", "directory/c"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("a")
    return tmp_path


def _scan(root: Path) -> Tree:
    return scan(os.fsencode(root))


def _settle(old: Tree, new: Tree, *same: Doubt) -> Layout:
    return Succession(old, new).settle(same, 4096)


def test_nothing_changed(root: Path) -> None:
    old = _scan(root)
    succession = Succession(old, _scan(root))
    assert succession.same_tree()
    layout = succession.settle([], 4096)
    assert layout.tree.inodes == old.inodes
    assert layout.tree.names == old.names
    assert (layout.size, layout.copies) == (0, {})


def test_an_edit_takes_a_new_number_and_travels(root: Path) -> None:
    old = _scan(root)
    (root / "a").write_text("longer")
    layout = _settle(old, _scan(root))
    number = layout.tree.names[ROOT][b"a"]
    assert number not in old.inodes
    assert layout.fresh == {number}
    assert layout.tree.names[ROOT][b"b"] == old.names[ROOT][b"b"]


def test_numbers_are_never_used_again(root: Path) -> None:
    tree = _scan(root)
    seen = {tree.names[ROOT][b"a"]}
    for count in range(4):
        (root / "a").write_text("x" * (count + 10))
        tree = _settle(tree, _scan(root)).tree
        assert tree.names[ROOT][b"a"] not in seen
        seen.add(tree.names[ROOT][b"a"])


def test_a_rename_is_a_doubt_and_keeps_its_number_if_the_bytes_are_the_same(root: Path) -> None:
    old = _scan(root)
    (root / "a").rename(root / "z")
    succession = Succession(old, _scan(root))
    (doubt,) = succession.doubts
    assert doubt.earlier == old.names[ROOT][b"a"]
    assert succession.path(doubt) == b"z"
    assert not succession.same_tree()
    same = succession.settle([doubt], 4096)
    assert same.tree.names[ROOT][b"z"] == doubt.earlier
    assert same.size == 0
    other = succession.settle([], 4096)
    assert other.tree.names[ROOT][b"z"] not in old.inodes
    assert other.size == 1


def test_other_attributes_of_the_same_bytes_are_a_copy(root: Path) -> None:
    old = _scan(root)
    (root / "a").chmod(0o400)
    succession = Succession(old, _scan(root))
    layout = succession.settle(succession.doubts, 4096)
    number = layout.tree.names[ROOT][b"a"]
    assert layout.copies == {number: old.names[ROOT][b"a"]}
    assert (layout.size, layout.fresh) == (0, frozenset())
    assert Layout.decode(layout.encode()).copies == layout.copies


def test_a_file_below_a_renamed_directory_is_the_same(root: Path) -> None:
    old = _scan(root)
    (root / "directory").rename(root / "moved")
    succession = Succession(old, _scan(root))
    assert not succession.doubts, "its own times did not change"
    tree = succession.settle([], 4096).tree
    moved = tree.names[ROOT][b"moved"]
    number = tree.names[moved][b"c"]
    assert number == old.names[old.names[ROOT][b"directory"]][b"c"]
    assert tree.inodes[number].path == b"moved/c"


def test_what_hosts_do_not_have_travels_although_it_did_not_change(root: Path) -> None:
    old = _scan(root)
    lost = old.names[ROOT][b"a"]
    succession = Succession(old, _scan(root), {lost})
    assert not succession.same_tree()
    layout = succession.settle([], 4096)
    assert layout.fresh == {layout.tree.names[ROOT][b"a"]}
    assert lost not in layout.tree.inodes


def test_another_file_with_the_same_size_and_time_is_a_doubt(root: Path) -> None:
    old = _scan(root)
    status = (root / "a").stat()
    (root / "new").write_text("A")
    os.utime(root / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (root / "new").rename(root / "a")
    (doubt,) = Succession(old, _scan(root)).doubts
    assert doubt.earlier == old.names[ROOT][b"a"]


def test_types_that_change(root: Path) -> None:
    old = _scan(root)
    (root / "a").unlink()
    (root / "a").mkdir()
    (root / "link").unlink()
    (root / "link").write_text("file")
    tree = _settle(old, _scan(root)).tree
    for name in (b"a", b"link"):
        assert tree.names[ROOT][name] not in old.inodes
