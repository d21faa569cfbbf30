"""Holes of files that the kernel shows from memory: a page fault there takes a page."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.mount.test_server import Served, _arrive_all, _bind
from tests.mount.test_store import arrive
from wheelmount.config import MEMORY, Settings
from wheelmount.errors import StoreError
from wheelmount.mount.serve import processes
from wheelmount.mount.snapshot.diff import Succession
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.store import capacity
from wheelmount.mount.store.store import Store

pytestmark = pytest.mark.fuse

SIZE, DATA = 48 << 20, b"x" * 5000

TOUCH = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(sum(mapped[offset] for offset in range(0, len(mapped), mmap.PAGESIZE)))
"""


def _sparse(path: Path, size: int = SIZE) -> int:
    """Make a file with two holes; gives the sum of the first bytes of its pages."""
    with path.open("wb") as file:
        file.seek(1 << 20)
        file.write(DATA)
        file.truncate(size)
    return 2 * DATA[0]


def _touch(path: Path, readers: int = 2) -> list[str]:
    """What processes say that map a file and read every page of it, all at once."""
    command = [sys.executable, "-S", "-c", TOUCH, str(path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(readers)]
    said = [reader.communicate(timeout=60)[0].strip() for reader in running]
    assert [reader.returncode for reader in running] == [0] * readers
    return said


def _refresh(served: Served, source: Path, store: Store) -> Store:
    """Have the next generation made and shown."""
    tree = scan(os.fsencode(source), served.layout.tree)
    succession = Succession(served.layout.tree, tree)
    layout = succession.settle(succession.doubts, served.layout.block_size)
    made = store.next(layout.encode(served.layout), set_attributes=True)
    arrive(made, source, layout)
    processes.show(served.directory, made.generation)
    served.layout = layout
    return made


@pytest.fixture
def sparse(source: Path, workplace: Path, settings: Settings) -> Iterator[Served]:
    """A mount from memory of a tree with a sparse file."""
    _sparse(source / "big")
    settings = replace(settings, store=MEMORY, block_size=1 << 20)
    served = Served(source, workplace, settings, "bind")
    served.feed(keep=True)
    yield served
    served.end()


def test_are_read_through_maps_by_several(sparse: Served, source: Path) -> None:
    _arrive_all(sparse)
    _bind(sparse)
    usage = os.statvfs(sparse.mount)
    assert usage.f_bfree * usage.f_frsize == sparse.store.summary.holes + capacity.SLACK
    assert (sparse.mount / "big").stat().st_blocks * 512 < 1 << 20
    assert set(_touch(sparse.mount / "big")) == {str(2 * DATA[0])}
    array = np.memmap(sparse.mount / "sparse", mode="r")
    assert array.sum(dtype="u8") == sum((source / "sparse").read_bytes())
    assert np.memmap(sparse.mount / "big", mode="r").sum(dtype="u8") == sum(DATA)


def test_are_read_through_maps_beside_a_refresh_and_after_it(sparse: Served, source: Path) -> None:
    _arrive_all(sparse)
    _bind(sparse)
    (source / "more").write_bytes(os.urandom(3 << 20))
    total = _sparse(source / "another")
    with (sparse.mount / "big").open("rb") as before:
        second = _refresh(sparse, source, sparse.store)
        assert set(_touch(Path(f"/proc/{os.getpid()}/fd/{before.fileno()}"))) == {str(total)}
    assert processes.status(sparse.directory)["adapter"] == "bind"
    for name in ("big", "another"):
        assert set(_touch(sparse.mount / name)) == {str(total)}
    assert (sparse.mount / "more").read_bytes() == (source / "more").read_bytes()
    second.trim()
    (source / "more").write_bytes(b"less")
    _refresh(sparse, source, second)
    assert set(_touch(sparse.mount / "another")) == {str(total)}


def test_take_no_room_from_bytes_that_arrive(sparse: Served, source: Path) -> None:
    _arrive_all(sparse)
    _bind(sparse)
    (source / "more").write_bytes(os.urandom(3 << 20))
    tree = scan(os.fsencode(source), sparse.layout.tree)
    layout = Succession(sparse.layout.tree, tree).settle([], sparse.layout.block_size)
    made = sparse.store.next(layout.encode(sparse.layout), set_attributes=True)
    _touch(sparse.mount / "big", 1)  # takes all the pages that it can
    arrive(made, source, layout)
    assert (made.root / "more").read_bytes() == (source / "more").read_bytes()


def test_that_could_fill_memory_are_not_shown_by_the_kernel_alone(
    source: Path, workplace: Path, settings: Settings
) -> None:
    total = _sparse(source / "huge", capacity.HOLES + (8 << 20))
    settings = replace(settings, store=MEMORY, block_size=1 << 20)
    served = Served(source, workplace, settings, "bind")
    try:
        served.feed(keep=True)
        _arrive_all(served)
        served.store.finish()
        processes.show(served.directory, 1)
        assert processes.status(served.directory)["adapter"] == "devfuse"
        used = served.store._used()
        assert set(_touch(served.mount / "huge")) == {str(total)}
        assert served.store._used() == used
    finally:
        served.end()


def test_that_could_fill_memory_are_refused_where_the_kernel_shows_the_mount_alone(
    sparse: Served, source: Path
) -> None:
    _arrive_all(sparse)
    _bind(sparse)
    _sparse(source / "huge", 1 << 42)
    with pytest.raises(StoreError, match="holes of sparse files") as error:
        _refresh(sparse, source, sparse.store)
    assert "mount" in str(error.value.hint)
    assert not (sparse.store.directory / "2").exists()


def test_a_store_in_the_memory_of_others_is_not_shown_by_the_kernel_alone(
    source: Path, workplace: Path, settings: Settings
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "t", settings.store], check=True)
    try:
        served = Served(source, workplace, settings, "bind")
        try:
            served.feed(keep=True)
            _arrive_all(served)
            served.store.finish()
            processes.show(served.directory, 1)
            assert processes.status(served.directory)["adapter"] == "devfuse"
        finally:
            served.end()
    finally:
        subprocess.run(["umount", "--lazy", settings.store], check=True)
