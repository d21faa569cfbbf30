"""From one tree to the next."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from wheelmount.errors import TransferError
from wheelmount.mount.snapshot.diff import Doubt, Succession
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.tree import ROOT, Tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "directory").mkdir()
    for name in ("a", "b", "directory/c"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("a")
    return tmp_path


def _scan(root: Path) -> Tree:
    return scan(os.fsencode(root))


def _next(old: Tree, root: Path, lost: Collection[int] = ()) -> Succession:
    return Succession(old, scan(os.fsencode(root), old, lost), lost)


def _settle(old: Tree, root: Path, *same: Doubt) -> Layout:
    return _next(old, root).settle(same, 4096)


def test_nothing_changed(root: Path) -> None:
    old = _scan(root)
    succession = _next(old, root)
    assert not succession
    layout = succession.settle([], 4096)
    assert layout.tree.inodes == old.inodes
    assert layout.tree.names == old.names
    assert (layout.size, layout.copies) == (0, {})


def test_an_edit_takes_a_new_number_and_travels(root: Path) -> None:
    old = _scan(root)
    (root / "a").write_text("longer")
    layout = _settle(old, root)
    number = layout.tree.names[ROOT][b"a"]
    assert number not in old.inodes
    assert layout.fresh == {number}
    assert layout.tree.names[ROOT][b"b"] == old.names[ROOT][b"b"]


def test_numbers_are_never_used_again(root: Path) -> None:
    tree = _scan(root)
    seen = {tree.names[ROOT][b"a"]}
    for count in range(4):
        (root / "a").write_text("x" * (count + 10))
        tree = _settle(tree, root).tree
        assert tree.names[ROOT][b"a"] not in seen
        seen.add(tree.names[ROOT][b"a"])


def test_numbers_of_what_is_gone_are_not_used_again(root: Path) -> None:
    (root / "z").write_text("last")
    old = _scan(root)
    (root / "z").unlink()
    without = _settle(old, root).tree
    (root / "z").write_text("another")
    assert _settle(without, root).tree.names[ROOT][b"z"] not in old.inodes


def test_hardlinks_that_did_not_change_are_the_same(root: Path) -> None:
    (root / "directory" / "second").hardlink_to(root / "b")
    old = _scan(root)
    assert not _next(old, root)
    (root / "third").hardlink_to(root / "b")
    succession = _next(old, root)
    (doubt,) = succession.doubts
    assert doubt.earlier == old.names[ROOT][b"b"]
    tree = succession.settle([doubt], 4096).tree
    numbers = {tree.names[ROOT][b"b"], tree.names[ROOT][b"third"]}
    assert len(numbers) == 1
    assert tree.inodes[numbers.pop()].nlink == 3


def test_a_hardlink_whose_first_name_moved_away(root: Path) -> None:
    (root / "other").mkdir()
    (root / "other" / "second").hardlink_to(root / "directory" / "c")
    old = _scan(root)
    (root / "directory").rename(root / "zz")
    layout = _settle(old, root)
    number = layout.tree.names[layout.tree.names[ROOT][b"other"]][b"second"]
    assert number in old.inodes, "its bytes are the same"
    assert layout.tree.inodes[number].path == b"other/second"
    (root / "zz").rename(root.parent / f"{root.name}-away")
    gone = _settle(layout.tree, root)
    assert gone.tree.names[gone.tree.names[ROOT][b"other"]][b"second"] not in old.inodes, (
        "it has one name now, and had two"
    )


def test_what_differs_is_described_alone(root: Path) -> None:
    for number in range(100):
        (root / "directory" / f"{number}").write_text("x")
    first = Layout(_scan(root), 4096)
    there = Layout.decode(first.encode())
    (root / "a").write_text("longer")
    (root / "b").unlink()
    (root / "directory").chmod(0o700)
    second = _settle(first.tree, root)
    description = second.encode(first)
    assert len(description) < len(second.encode()) / 10
    followed = Layout.decode(description, there)
    both = Layout.decode(first.encode() + description)
    for layout in (followed, both):
        assert layout.tree.inodes == second.tree.inodes
        assert layout.tree.names == second.tree.names
        assert layout.tree.stamps == second.tree.stamps
        assert layout.tree.limit == second.tree.limit
        assert layout.identity == second.identity
        assert list(layout.extents(0)) == list(second.extents(0))
    with pytest.raises(TransferError, match="shows another tree"):
        Layout.decode(description, Layout(_scan(root), 4096))


def test_a_rename_is_a_doubt_and_keeps_its_number_if_the_bytes_are_the_same(root: Path) -> None:
    old = _scan(root)
    (root / "a").rename(root / "z")
    succession = _next(old, root)
    (doubt,) = succession.doubts
    assert doubt.earlier == old.names[ROOT][b"a"]
    assert succession.path(doubt) == b"z"
    assert succession
    same = succession.settle([doubt], 4096)
    assert same.tree.names[ROOT][b"z"] == doubt.earlier
    assert same.size == 0
    other = _settle(old, root)
    assert other.tree.names[ROOT][b"z"] not in old.inodes
    assert other.size == 1


def test_other_attributes_of_the_same_bytes_are_a_copy(root: Path) -> None:
    old = _scan(root)
    (root / "a").chmod(0o400)
    succession = _next(old, root)
    layout = succession.settle(succession.doubts, 4096)
    number = layout.tree.names[ROOT][b"a"]
    assert layout.copies == {number: old.names[ROOT][b"a"]}
    assert (layout.size, layout.fresh) == (0, frozenset())
    assert Layout.decode(layout.encode()).copies == layout.copies


def test_a_file_below_a_renamed_directory_is_the_same(root: Path) -> None:
    old = _scan(root)
    (root / "directory").rename(root / "moved")
    succession = _next(old, root)
    assert not succession.doubts, "its own times did not change"
    tree = succession.settle([], 4096).tree
    moved = tree.names[ROOT][b"moved"]
    number = tree.names[moved][b"c"]
    assert number == old.names[old.names[ROOT][b"directory"]][b"c"]
    assert tree.inodes[number].path == b"moved/c"


def test_what_hosts_do_not_have_travels_although_it_did_not_change(root: Path) -> None:
    old = _scan(root)
    lost = old.names[ROOT][b"a"]
    succession = _next(old, root, {lost})
    assert succession
    layout = succession.settle([], 4096)
    assert layout.fresh == {layout.tree.names[ROOT][b"a"]}
    assert lost not in layout.tree.inodes


def test_another_file_with_the_same_size_and_time_is_a_doubt(root: Path) -> None:
    old = _scan(root)
    status = (root / "a").stat()
    (root / "new").write_text("A")
    os.utime(root / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (root / "new").rename(root / "a")
    (doubt,) = _next(old, root).doubts
    assert doubt.earlier == old.names[ROOT][b"a"]


def test_types_that_change(root: Path) -> None:
    old = _scan(root)
    (root / "a").unlink()
    (root / "a").mkdir()
    (root / "link").unlink()
    (root / "link").write_text("file")
    tree = _settle(old, root).tree
    for name in (b"a", b"link"):
        assert tree.names[ROOT][name] not in old.inodes
