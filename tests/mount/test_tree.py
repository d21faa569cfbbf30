"""The snapshot of a directory, and its layout."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path
from random import Random

import pytest

from wheelmount.errors import SourceError, TransferError
from wheelmount.mount.snapshot.encoded import PAGE
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import data_pieces, scan, stamp_of
from wheelmount.mount.snapshot.tree import ROOT, Tree


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
    seen = {n: bytearray(i.size) for n, i in layout.tree.inodes.items() if i.is_file}
    for block in range(layout.blocks):
        end = 0
        for extent in layout.extents(block):
            assert extent.block_offset == end
            end += extent.length
            begin = extent.file_offset
            assert not any(seen[extent.inode][begin : begin + extent.length])
            seen[extent.inode][begin : begin + extent.length] = b"\1" * extent.length
            assert block in layout.covering(extent.inode, begin, begin + 1)
            assert block in layout.covering(extent.inode, begin, begin + extent.length)
        assert end == layout.length(block)
    for number, file in seen.items():
        data = layout.tree.inodes[number].data
        assert all(all(file[offset : offset + length]) for offset, length in data)
        assert sum(file) == sum(length for _, length in data)
    assert sum(map(layout.length, range(layout.blocks))) == layout.size == layout.tree.size


def test_blocks_that_cover_a_piece_of_a_sparse_file(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        for offset in (0, 1 << 20, 2 << 20):
            file.seek(offset)
            file.write(b"x" * 8 * PAGE)
        file.truncate(4 << 20)
    (tmp_path / "tail").write_bytes(b"y")
    layout = Layout(scan(os.fsencode(tmp_path)), 8 * PAGE)
    number = layout.tree.names[ROOT][b"sparse"]
    assert layout.tree.inodes[number].data == tuple(
        (offset, 8 * PAGE) for offset in (0, 1 << 20, 2 << 20)
    )
    assert list(layout.covering(number, 0, 4 << 20)) == [0, 1, 2]
    assert list(layout.covering(number, 1 << 20, (1 << 20) + 1)) == [1]
    assert list(layout.covering(number, 16 * PAGE, 1 << 20)) == []
    assert list(layout.covering(number, 3 << 20, 4 << 20)) == []


@pytest.mark.parametrize("size", [0, 3000, 9000, 20_000])
def test_a_sparse_file_that_changes_while_it_is_looked_at(tmp_path: Path, size: int) -> None:
    path = tmp_path / "growing"
    with path.open("wb") as file:
        file.truncate(5000)
    status = path.stat()
    with path.open("r+b") as file:
        file.truncate(size)
        if size > 16_384:
            file.seek(16_384)
            file.write(b"data")
    assert data_pieces(os.fsencode(path), status) == ()
    with path.open("r+b") as file:
        file.write(b"x" * 20_000)
    assert data_pieces(os.fsencode(path), status) is None


def test_files_that_are_written_while_a_tree_is_scanned(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}" for number in range(40)]
    ended = threading.Event()

    def write() -> None:
        random = Random(1)  # noqa: S311 - the same every time
        while not ended.is_set():
            with random.choice(files).open("r+b") as file:
                file.truncate(random.choice([0, 10_000, 100_000]))
                file.seek(random.randrange(200_000))
                file.write(b"x" * random.randrange(9000))

    for path in files:
        path.touch()
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            tree = scan(os.fsencode(tmp_path))
            for inode in tree.inodes.values():
                ends = [0]
                for begin, length in inode.data:
                    assert begin >= ends[-1], "pieces are in order"
                    assert length > 0
                    ends.append(begin + length)
                assert ends[-1] <= inode.size
            Layout.decode(Layout(tree, PAGE).encode())
    finally:
        ended.set()
        writer.join()


def test_extended_attributes_of_the_user_are_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.setxattr(tmp_path / "file", "user.b", b"\0\xff")
    os.setxattr(tmp_path / "file", "user.a", b"")
    os.setxattr(tmp_path, "user.root", b"r")
    tree = scan(os.fsencode(tmp_path))
    assert tree.inodes[ROOT].xattrs == ((b"user.root", b"r"),)
    assert tree.inodes[1].xattrs == ((b"user.a", b""), (b"user.b", b"\0\xff"))


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/etc", b"a\0b"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: bytes) -> None:
    (tmp_path / "file").touch()
    tree = scan(os.fsencode(tmp_path))
    tree.names[ROOT] = {name: 1}
    with pytest.raises(TransferError):
        list(tree.walk())


def test_directories_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    tree = scan(os.fsencode(tmp_path))
    for number in (ROOT, 1, 99):
        tree.names[1] = {b"again": number}
        with pytest.raises(TransferError):
            list(tree.walk())


def test_description_comes_back_the_same(source: Path) -> None:
    layout = Layout(scan(os.fsencode(source)), 8 * PAGE)
    again = Layout.decode(layout.encode())
    assert again.tree.inodes == layout.tree.inodes
    assert again.tree.names == layout.tree.names
    assert again.tree.stamps == layout.tree.stamps
    assert (again.size, again.block_size) == (layout.size, layout.block_size)


def test_description_of_another_version_is_refused() -> None:
    with pytest.raises(TransferError, match="version 99"):
        Layout.decode(b"\x92\x63\x00")


def test_empty_directory_has_no_blocks(tmp_path: Path) -> None:
    layout = Layout(scan(os.fsencode(tmp_path)), PAGE)
    assert (layout.blocks, layout.size) == (0, 0)
    assert layout.tree.names == {ROOT: {}}


def test_an_earlier_snapshot_changes_nothing_but_the_work(source: Path) -> None:
    before = scan(os.fsencode(source))
    (source / "page").write_bytes(b"changed")
    (source / "package" / "small7").unlink()
    (source / "package" / "small8").rename(source / "package" / "small7")
    (source / "new").mkdir()
    (source / "package" / "small9").chmod(0o600)
    (source / "package" / "small10").unlink()
    (source / "package" / "small10").mkdir()
    (source / "package" / "small11").unlink()
    (source / "package" / "small11").symlink_to("small12")
    fresh, again = scan(os.fsencode(source)), scan(os.fsencode(source), before)
    expected, found = _walk(fresh), _walk(again)
    assert found.keys() == expected.keys()
    for path, number in found.items():
        assert again.inodes[number] == fresh.inodes[expected[path]], path
        assert again.stamps[number] == fresh.stamps[expected[path]], path
    blank = found[b"with blank"]
    assert again.inodes[blank] is before.inodes[before.names[ROOT][b"with blank"]]
    assert found[b"page"] not in before.inodes
    assert again.limit > max(again.inodes)


@pytest.mark.parametrize("change", [b"first, and more", b"other"])
def test_a_change_within_a_tick_of_the_clock_of_ctimes(tmp_path: Path, change: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first")
    before = scan(os.fsencode(tmp_path))
    number = before.names[ROOT][b"file"]
    path.write_bytes(change)
    before.stamps[number] = stamp_of(path.lstat())
    after = scan(os.fsencode(tmp_path), before)
    assert after.names[ROOT][b"file"] != number
    assert after.inodes[after.names[ROOT][b"file"]].size == len(change)
