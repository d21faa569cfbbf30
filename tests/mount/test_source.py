"""The client's ring of staged blocks."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from wheelmount.errors import TransferError, WaitError
from wheelmount.mount.snapshot.encoded import PAGE
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.source import Source, file_digest
from wheelmount.mount.transfer.ring import Ring


class Staging(Ring):
    """The ring of a source."""

    def __init__(self, source: Source, slots: int, lease: float, readers: int) -> None:
        super().__init__(source, slots=slots, lease=lease, readers=lambda _: readers)
        self.source, self.layout = source, source.layout


def _source(
    root: Path,
    *,
    slots: int = 4,
    lease: float = 5.0,
    pages: int = 4,
    readers: int = 0,
    kind: type[Source] = Source,
) -> Staging:
    layout = Layout(scan(os.fsencode(root)), pages * PAGE)
    return Staging(kind(os.fsencode(root), layout), slots, lease, readers)


def _bytes(source: Staging, block: int) -> bytes:
    staged = source.stage(block)
    data = bytes(source.slots[staged.slot][: staged.length])
    assert blake3(data).digest() == staged.digest
    source.release(block)
    return data


def test_blocks_together_are_the_files(source: Path) -> None:
    ring = _source(source)
    files: dict[int, bytearray] = {}
    for block in range(ring.layout.blocks):
        data = _bytes(ring, block)
        for extent in ring.layout.extents(block):
            piece = data[extent.block_offset : extent.block_offset + extent.length]
            file = files.setdefault(extent.inode, bytearray())
            assert len(file) <= extent.file_offset
            file += bytes(extent.file_offset - len(file)) + piece  # a hole, where there is one
    for number, inode in ring.layout.tree.inodes.items():
        if inode.is_file:
            path = Path(os.fsdecode(os.path.join(os.fsencode(source), inode.path)))
            assert files.get(number, b"").ljust(inode.size, b"\0") == path.read_bytes()
    assert not ring.source.changed


def test_holes_do_not_travel(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.seek(5 << 20)
        file.write(b"data")
        file.truncate(64 << 20)
    ring = _source(tmp_path)
    assert ring.layout.size <= 2 * PAGE
    assert b"data" in _bytes(ring, 0)


def test_one_block_is_staged_once_for_all_who_hold_it(source: Path) -> None:
    ring = _source(source)
    assert ring.stage(0).slot == ring.stage(0).slot
    assert len({ring.stage(block).slot for block in (0, 1, 2, 3)}) == 4


def test_a_held_slot_is_not_given_away(source: Path) -> None:
    ring = _source(source, slots=2, lease=30)
    first = ring.stage(0)
    ring.stage(1)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(ring.stage(2).slot))
    thread.start()
    thread.join(0.2)
    assert not got, "it must wait while both are held"
    ring.release(0)
    thread.join(5)
    assert got == [first.slot]


def test_waiting_for_a_slot_is_bounded(source: Path) -> None:
    ring = _source(source, slots=1, lease=0.3)
    ring.stage(0)
    stop = threading.Event()

    def hold() -> None:  # a host that is alive asks again and again
        while not stop.wait(0.05):
            ring.stage(0)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        with pytest.raises(WaitError, match="in use"):
            ring.stage(1)
    finally:
        stop.set()
        thread.join()


def test_a_holder_that_died_is_given_up_after_its_lease(source: Path) -> None:
    ring = _source(source, slots=1, lease=0.2)
    ring.stage(0)
    threading.Event().wait(0.3)
    assert ring.stage(1).slot == 0


def test_what_is_lent_stays_for_as_long_as_a_slow_link_needs(source: Path) -> None:
    ring = _source(source, slots=1, lease=0.2)
    with ring.lend(0, packed=False) as (staged, view):
        threading.Event().wait(0.3)
        with pytest.raises(WaitError, match="in use"):
            ring.stage(1)
        assert blake3(view).digest() == staged.digest
    assert ring.stage(1).slot == staged.slot
    assert ring.sent == len(view)


def test_what_could_not_be_sent_is_let_go_and_not_counted(source: Path) -> None:
    ring = _source(source, slots=1, lease=30)
    with pytest.raises(OSError, match="gone"), ring.lend(0, packed=False):
        raise OSError("gone")
    assert ring.sent == 0
    assert ring.stage(1).slot == 0


def _slots_used(ring: Ring) -> list[int]:
    slots = []
    for block in (0, 1, 0, 1):
        with ring.lend(block, packed=False) as (staged, _):
            slots.append(staged.slot)
    return slots


@pytest.mark.parametrize(("readers", "used"), [(0, 2), (1, 1), (2, 2), (3, 2)])
def test_memory_of_what_all_have_is_used_again_at_once(
    source: Path, readers: int, used: int
) -> None:
    layout = Layout(scan(os.fsencode(source)), 4 * PAGE)
    asked: list[int] = []

    def count(block: int) -> int:
        asked.append(block)
        return readers

    ring = Ring(Source(os.fsencode(source), layout), slots=4, lease=5, readers=count)
    assert len(set(_slots_used(ring))) == used
    assert asked == [0, 1, 0, 1]
    assert len(ring._used) == (0 if readers in (1, 2) else 2)


def test_who_did_not_get_it_does_not_count(source: Path) -> None:
    ring = _source(source, readers=1)
    with pytest.raises(OSError, match="gone"), ring.lend(0, packed=False):
        raise OSError("gone")
    ring.stage(0)
    ring.release(0, sent=0)
    assert (0, False) in ring._used
    ring.stage(0)
    ring.release(0, sent=1)
    assert not ring._used


class Slow(Source):
    """One that takes as long as it is told to."""

    def __init__(self, root: bytes, layout: Layout) -> None:
        super().__init__(root, layout)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def fill(self, block: int, view: memoryview) -> tuple[bytes, tuple[int, ...]]:
        self.begun.set()
        assert self.go_on.wait(10)
        return super().fill(block, view)


def test_who_lets_go_late_does_not_let_go_of_what_is_being_read(source: Path) -> None:
    ring = _source(source, slots=1, lease=0.1, readers=1, kind=Slow)
    slow = ring.source
    assert isinstance(slow, Slow)
    ring.stage(0)
    threading.Event().wait(0.2)
    ring.stage(1)  # in the slot of who said nothing for the length of a lease
    ring.release(1, sent=1)
    slow.begun.clear()
    slow.go_on.clear()
    again = threading.Thread(target=ring.stage, args=(0,))
    again.start()
    assert slow.begun.wait(10)
    ring.release(0, sent=1)
    assert not ring._free, "it is being read"
    slow.go_on.set()
    again.join()
    assert (0, False) in ring._used


def test_what_somebody_still_holds_is_not_used_again(source: Path) -> None:
    ring = _source(source, lease=30, readers=1)
    with ring.lend(0, packed=False) as (held, view):
        before = bytes(view)
        with ring.lend(0, packed=False):
            pass
        assert ring.stage(1).slot != held.slot
        assert bytes(view) == before
    assert (0, False) not in ring._used


def test_a_block_that_is_in_memory_becomes_part_of_the_ring(source: Path) -> None:
    ring = _source(source, slots=2, lease=30)
    made = ring.stage(0)
    data = bytes(ring.slots[made.slot])
    ring.release(0)
    memory = memoryview(bytearray(data))
    assert ring.put(made, 0, packed=False, memory=memory) is memory, "it has that already"
    spare = ring.put(made, 0, packed=True, memory=memory)
    assert spare is not memory
    with ring.lend(0, packed=True) as (staged, view):
        assert (view.obj, bytes(view)) == (memory.obj, data), "nothing was read or compressed"
        assert staged.digest == made.digest
        ring.stage(1)
        assert ring.put(made, 2, packed=False, memory=spare) is spare, "all are held"


def test_there_are_no_more_blocks_than_there_are(source: Path) -> None:
    ring = _source(source)
    with pytest.raises(TransferError, match="there is no block"):
        ring.stage(ring.layout.blocks)


@pytest.mark.parametrize("edit", ["content", "grown", "cut", "gone", "replaced", "symlink"])
def test_a_file_edited_after_the_snapshot_is_named_and_never_torn(
    tmp_path: Path, edit: str
) -> None:
    (tmp_path / "a").write_bytes(b"a" * PAGE * 6)
    (tmp_path / "b").write_bytes(b"b" * 10)
    ring = _source(tmp_path)
    file = tmp_path / "a"
    status = file.stat()
    if edit == "content":
        file.write_bytes(b"X" * PAGE * 6)
    elif edit == "grown":
        file.write_bytes(b"a" * PAGE * 7)
    elif edit == "cut":
        file.write_bytes(b"a")
    elif edit == "gone":
        file.unlink()
    elif edit == "replaced":  # same size and time, another file
        (tmp_path / "new").write_bytes(b"N" * PAGE * 6)
        os.utime(tmp_path / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
        (tmp_path / "new").rename(file)
    elif edit == "symlink":
        file.unlink()
        file.symlink_to("b")
    staged = [ring.stage(0), ring.stage(1)]
    paths = {ring.layout.tree.inodes[n].path for s in staged for n in s.changed}
    assert paths == {b"a"}
    assert bytes(ring.slots[staged[1].slot][: staged[1].length]).strip(b"\0") == b"b" * 10


def test_bytes_that_differ_at_the_same_time_stamp_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"a" * PAGE * 4)
    (tmp_path / "b").write_bytes(b"b")
    ring = _source(tmp_path, slots=1)
    assert _bytes(ring, 0) == b"a" * PAGE * 4
    _bytes(ring, 1)  # takes the only slot, so that the first block must be read again
    status = file.stat()
    file.write_bytes(b"X" * PAGE * 4)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert ring.stage(0).changed


def _overwrite(file: Path, offset: int, data: bytes) -> None:
    """Edit a file where it is, and put its mtime back."""
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("place", [0, 5 * PAGE])
def test_an_edit_between_two_blocks_whose_time_was_put_back_is_never_torn(
    tmp_path: Path, place: int
) -> None:
    (tmp_path / "a").write_bytes(b"a" * PAGE * 6)
    ring = _source(tmp_path)
    assert _bytes(ring, 0) == b"a" * PAGE * 4
    _overwrite(tmp_path / "a", place, b"X" * 100)
    torn = bool(ring.stage(1).changed)
    if place == 0:
        assert torn, "its first block is what it was before"
    else:  # the file as it is now, of which the first block is part
        assert torn or bytes(ring.slots[ring.stage(1).slot][PAGE : PAGE + 100]) == b"X" * 100


def test_an_edit_before_the_first_block_whose_time_was_put_back_arrives_as_a_whole(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").write_bytes(b"a" * PAGE * 6)
    ring = _source(tmp_path)
    _overwrite(tmp_path / "a", PAGE, b"X" * PAGE * 4)
    assert _bytes(ring, 0) + _bytes(ring, 1) == (tmp_path / "a").read_bytes()
    assert not ring.source.changed


def test_an_edit_in_a_hole_whose_time_was_put_back_is_noticed(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.write(b"data")
        file.truncate(1 << 20)
    ring = _source(tmp_path)
    _overwrite(tmp_path / "a", 512 << 10, b"more")
    assert ring.stage(0).changed


def test_a_file_that_never_holds_still_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"a")
    ring = _source(tmp_path)
    read, modes = Source._read_any, itertools.cycle([0o600, 0o640])

    def restless(*arguments: Any) -> os.stat_result | None:
        (tmp_path / "a").chmod(next(modes))
        return read(*arguments)

    monkeypatch.setattr(Source, "_read_any", restless)
    assert ring.stage(0).changed


@pytest.mark.parametrize("before", [0, 1, 2])
def test_new_modes_and_names_while_blocks_are_read_change_no_content(
    tmp_path: Path, before: int
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(os.urandom(PAGE * 3))
    with (tmp_path / "c").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"data")
    ring = _source(tmp_path, slots=1)
    for block in range(before):
        _bytes(ring, block)
    for name in ("a", "b", "c"):
        (tmp_path / name).chmod(0o600)
        (tmp_path / f"{name}{name}").hardlink_to(tmp_path / name)
    for block in range(ring.layout.blocks):
        assert not ring.stage(block).changed
        ring.release(block)


def test_a_changed_mode_is_no_changed_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    ring = _source(tmp_path)
    (tmp_path / "a").chmod(0o600)
    assert not ring.stage(0).changed


def test_new_names_after_each_block_change_no_content(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(os.urandom(PAGE * 40))
    ring = _source(root, slots=1, pages=1)
    for name in range(2 * ring.layout.blocks):
        (tmp_path / str(name)).hardlink_to(root / "a")
        block = name % ring.layout.blocks
        assert not ring.stage(block).changed
        ring.release(block)


class Counting(Source):
    """One that counts what it reads."""

    def __init__(self, root: bytes, layout: Layout) -> None:
        super().__init__(root, layout)
        self.reads = 0

    def _read_any(self, *arguments: Any) -> os.stat_result | None:
        self.reads += 1
        return super()._read_any(*arguments)


def test_new_names_of_all_files_of_a_block_have_it_read_a_few_times(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in range(50):
        (root / str(name)).write_bytes(b"%d" % name)
    ring = _source(root, kind=Counting)
    source = ring.source
    assert isinstance(source, Counting)
    data = _bytes(ring, 0)
    shutil.copytree(root, tmp_path / "links", copy_function=os.link)
    view = memoryview(bytearray(len(data)))
    source.reads = 0
    assert source.fill(0, view)[1] == ()
    assert view == data
    assert source.reads <= 4 * 50
    _overwrite(root / "7", 0, b"8")
    number = source.layout.tree.find(b"7")
    assert source.fill(0, view)[1] == (number,)


def test_what_took_the_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    found = {name: file_digest(os.fsencode(tmp_path / name)) for name in os.listdir(tmp_path)}
    assert found == {"file": blake3(b"bytes").digest(), "link": b"", "pipe": b""}
