"""The snapshot of a directory, and its layout."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from wheelmount.errors import SourceError, TransferError
from wheelmount.mount.layout import PAGE, Layout
from wheelmount.mount.tree import ROOT, Tree, scan


def _walk(tree: Tree, number: int = ROOT, path: bytes = b"") -> dict[bytes, int]:
    found = {path: number}
    for name, child in tree.names.get(number, {}).items():
        found |= _walk(tree, child, os.path.join(path, name))
    return found


def test_has_all_names_and_attributes(source: Path) -> None:
    tree = scan(os.fsencode(source))
    found = _walk(tree)
    expected = {b""}
    for folder, directories, files in os.walk(os.fsencode(source)):
        relative = os.path.relpath(folder, os.fsencode(source))
        prefix = b"" if relative == b"." else relative
        expected |= {os.path.join(prefix, name) for name in directories + files}
    assert set(found) == expected
    for path, number in found.items():
        status = os.lstat(os.path.join(os.fsencode(source), path))
        inode = tree.inodes[number]
        assert inode.mode == status.st_mode
        assert inode.mtime_ns == status.st_mtime_ns
        assert inode.nlink == status.st_nlink
        if stat.S_ISREG(status.st_mode):
            assert inode.size == status.st_size


def test_hardlinks_are_one_inode(source: Path) -> None:
    tree = scan(os.fsencode(source))
    found = _walk(tree)
    assert found[b"hardlink"] == found[b"package/sub/module.py"]


def test_special_files_are_skipped_and_named(source: Path) -> None:
    os.mkfifo(source / "package" / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(source / "socket"))
    tree = scan(os.fsencode(source))
    assert sorted(tree.skipped) == [b"package/pipe", b"socket"]
    assert b"socket" not in tree.names[ROOT]


@pytest.mark.parametrize("name", ["missing", "empty-file"])
def test_refuses_what_is_no_directory(source: Path, name: str) -> None:
    with pytest.raises(SourceError) as error:
        scan(os.fsencode(source / name))
    assert name in error.value.message
    assert error.value.hint


def test_layout_covers_every_byte_once(source: Path) -> None:
    layout = Layout(scan(os.fsencode(source)), 8 * PAGE)
    seen = bytearray(layout.size)
    for block in range(layout.blocks):
        for extent in layout.extents(block):
            begin = layout.start(extent.inode) + extent.file_offset
            assert begin == block * layout.block_size + extent.block_offset
            assert not any(seen[begin : begin + extent.length]), "two files in one place"
            seen[begin : begin + extent.length] = b"\1" * extent.length
    assert sum(seen) == layout.tree.size
    assert sum(map(layout.length, range(layout.blocks))) == layout.size


def test_no_page_holds_two_files(source: Path) -> None:
    layout = Layout(scan(os.fsencode(source)), 8 * PAGE)
    numbers = [n for n, i in enumerate(layout.tree.inodes) if i.is_file]
    assert all(layout.start(number) % PAGE == 0 for number in numbers)


def test_description_comes_back_the_same(source: Path) -> None:
    layout = Layout(scan(os.fsencode(source)), 8 * PAGE)
    again = Layout.decode(layout.encode())
    assert again.tree.inodes == layout.tree.inodes
    assert again.tree.names == layout.tree.names
    assert (again.size, again.block_size) == (layout.size, layout.block_size)


def test_description_of_another_version_is_refused() -> None:
    with pytest.raises(TransferError, match="version 99"):
        Layout.decode(b"\x92\x63\x00")


def test_empty_directory_has_no_blocks(tmp_path: Path) -> None:
    layout = Layout(scan(os.fsencode(tmp_path)), PAGE)
    assert (layout.blocks, layout.size) == (0, 0)
    assert layout.tree.names == {ROOT: {}}
