"""A host's store, filled by hand: its directories, its generations, what it costs."""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import shutil
import subprocess
import threading
import tracemalloc
from concurrent import futures
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import make_source
from tests.mount.test_ordinary_user import as_nobody
from wheelmount.errors import StoreError, TransferError
from wheelmount.mount.serve.fuse.references import References
from wheelmount.mount.snapshot.diff import Succession
from wheelmount.mount.snapshot.encoded import Mapped
from wheelmount.mount.snapshot.layout import Extent, Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.source import Source
from wheelmount.mount.snapshot.tree import ROOT, Inode, Stamp, Tree, TreeView
from wheelmount.mount.store import capacity, proofs
from wheelmount.mount.store import store as stores
from wheelmount.mount.store.capacity import Need
from wheelmount.mount.store.files import NewFiles
from wheelmount.mount.store.store import Store

BLOCK = 64 << 10


def arrive(store: Store, source: Path, layout: Layout) -> None:
    """Have all bytes of a generation arrive."""
    reading = Source(os.fsencode(source), layout)
    for block in store.missing():
        _fill(store, reading, block)
    store.finish()


def _fill(store: Store, reading: Source, block: int) -> None:
    view = memoryview(bytearray(store.layout.length(block)))
    reading.fill(block, view)
    store.write(block, view)


def _same(source: Path, store: Store) -> None:
    """Names, bytes, modes and times are those of the source."""
    diff = ["diff", "--recursive", "--no-dereference", str(source), str(store.root)]
    done = subprocess.run(diff, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    for folder, names, files in os.walk(source):
        for name in [".", *names, *files]:
            path = Path(folder, name)
            expected, found = path.lstat(), (store.root / path.relative_to(source)).lstat()
            assert found.st_mode == expected.st_mode, path
            assert found.st_mtime_ns == expected.st_mtime_ns, path


@pytest.fixture
def first(source: Path, workplace: Path) -> tuple[Store, Layout]:
    """A store of ``source`` with all its bytes."""
    layout = Layout(scan(os.fsencode(source)), BLOCK)
    place = workplace / "store" / "test"
    store = Store.create(place, layout.encode(), mounted=False, set_attributes=True)
    arrive(store, source, layout)
    return store, layout


def follow(
    store: Store, layout: Layout, source: Path, *, set_attributes: bool = True
) -> tuple[Store, Layout]:
    """Have the next generation of a store arrive, with what the source is now."""
    tree = scan(os.fsencode(source), layout.tree)
    succession = Succession(layout.tree, tree)
    after = succession.settle(succession.doubts, BLOCK)
    made = store.next(after.encode(layout), set_attributes=set_attributes)
    arrive(made, source, after)
    return made, after


def test_a_store_is_not_locked_while_its_tree_is_read_to_trim_it(
    first: tuple[Store, Layout], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layout = first
    (source / "page").write_bytes(b"1" * 4096)
    made, _ = follow(store, layout, source)
    store.forget()
    monkeypatch.setattr(proofs, "_MIN_SIZE", 0)
    proofs.copy(store.directory, 1, dict.fromkeys(range(10_000, 12_000), 9999))
    free = []

    def look(store: Store) -> TreeView:
        with store.growing(wait=0):
            free.append(True)
        return store.cut.tree

    monkeypatch.setattr(Store, "tree", property(look))
    made.trim()
    assert free == [True]
    monkeypatch.undo()
    with_bytes = {n for n, inode in made.tree.inodes.items() if inode.is_file and inode.held}
    assert proofs.read(made.directory).keys() == with_bytes
    _clear(store)


def _clear(store: Store) -> None:
    shutil.rmtree(store.directory)


def test_is_a_directory_like_the_source(first: tuple[Store, Layout], source: Path) -> None:
    _same(source, first[0])
    _clear(first[0])


def test_a_file_that_arrives_at_once_has_its_attributes_then(source: Path, workplace: Path) -> None:
    (source / "program").chmod(0o4555)
    layout = Layout(scan(os.fsencode(source)), BLOCK)
    place = workplace / "store" / "test"
    store = Store.create(place, layout.encode(), mounted=False, set_attributes=True)
    reading = Source(os.fsencode(source), layout)
    for block in store.missing():
        _fill(store, reading, block)
    _fill(store, reading, 0)  # again, as after a failure
    for name, dressed in [("program", True), ("with blank", True), ("page", True), ("odd", False)]:
        expected, found = (source / name).stat(), (store.root / name).stat()
        assert (found.st_mode == expected.st_mode) is dressed, name
        assert (found.st_mtime_ns == expected.st_mtime_ns) is dressed, name
    assert os.getxattr(store.root / "with blank", "user.test") == b"\0value\xff"
    assert not (store.root / "package" / "sub" / "module.py").exists(), "a second name"
    assert not Store.open(place).finished
    store.finish()
    assert Store.open(place).finished
    _same(source, store)
    _clear(store)


def test_an_ordinary_user_can_go_on_with_files_that_are_not_for_writing() -> None:
    def work(place: Path) -> None:
        source = make_source(place / "source")
        for name in ("program", "sparse"):
            (source / name).chmod(0o444)
        layout = Layout(scan(os.fsencode(source)), BLOCK)
        store = Store.create(place / "store", layout.encode(), mounted=False, set_attributes=True)
        reading = Source(os.fsencode(source), layout)
        for block in store.missing():
            _fill(store, reading, block)
        again = Store.open(store.directory)
        again.resume(set_attributes=True)
        for block in range(layout.blocks):
            _fill(again, reading, block)
        again.finish()
        _same(source, again)
        again = Store.open(store.directory)
        again.resume(set_attributes=True)
        again.finish()  # as if the first call had been interrupted
        _same(source, again)

    as_nobody(work)


def test_what_belongs_to_an_abandoned_generation_is_written_nowhere(
    first: tuple[Store, Layout], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layout = first
    (source / "page").write_bytes(b"1" * 4096)
    succession = Succession(layout.tree, scan(os.fsencode(source), layout.tree))
    after = succession.settle(succession.doubts, BLOCK)
    made = store.next(after.encode(layout), set_attributes=True)
    begun, held = threading.Event(), threading.Event()
    write = NewFiles.write

    def slow(files: NewFiles, extent: Extent, data: memoryview) -> None:
        begun.set()
        assert held.wait(30)
        write(files, extent, data)

    block = memoryview(bytearray(b"1" * after.length(0)))
    with ThreadPoolExecutor() as threads, monkeypatch.context() as patch:
        patch.setattr(NewFiles, "write", slow)
        writing = threads.submit(made.write, 0, block)
        assert begun.wait(30)
        forgetting = threads.submit(made.forget)
        with pytest.raises(futures.TimeoutError):
            forgetting.result(0.2)
        held.set()
        writing.result(30)
        forgetting.result(30)
    assert not made.root.exists()
    with pytest.raises(StoreError, match="was discarded"):
        made.write(0, block)
    again = store.next(after.encode(layout), set_attributes=True)
    assert again.generation > made.generation
    again.forget()
    assert store.next(after.encode(layout), set_attributes=True).generation > again.generation
    _same_after(store.reopen(again.generation + 1), after, source)
    _clear(store)


def _same_after(store: Store, layout: Layout, source: Path) -> None:
    """A generation that another process made is filled, and read by what went before it."""
    assert store.layout.identity == layout.identity
    filled = Store.open(store.directory, store.generation)
    assert filled.layout.identity == layout.identity
    arrive(filled, source, layout)
    assert (store.root / "page").read_bytes() == (source / "page").read_bytes()


def test_generations_follow_the_source(first: tuple[Store, Layout], source: Path) -> None:
    store, layout = first
    (source / "page").write_bytes(b"other")
    (source / "package").rename(source / "moved")
    (source / "moved" / "new").mkdir()
    (source / "moved" / "new" / "file").write_text("new")
    (source / "link").unlink()
    (source / "link").mkdir(mode=0o750)
    os.removexattr(source / "moved", "user.directory")
    second, layout = follow(store, layout, source)
    _same(source, second)
    assert "user.directory" not in os.listxattr(second.root / "moved")
    kept = b"with blank"
    assert (second.root / os.fsdecode(kept)).samefile(store.root / os.fsdecode(kept))
    (source / "moved").rename(source / "package")
    shutil.rmtree(source / "link")
    (source / "odd").rename(source / "package" / "odd")
    third, _ = follow(second, layout, source)
    _same(source, third)
    again = Store.open(third.directory, 3)
    assert again.layout.tree.inodes == third.layout.tree.inodes
    assert again.layout.tree.names == third.layout.tree.names
    _clear(third)


def test_a_mapped_tree_says_what_the_full_one_does(
    first: tuple[Store, Layout], source: Path
) -> None:
    store, layout = first
    followed = Store.open(store.directory, 1)
    _assert_mapped(followed, layout)
    for change in ("edited", "deleted", "made"):
        if change == "deleted":
            shutil.rmtree(source / "package")
        else:
            (source / "page").write_text(change)
            (source / change).mkdir()
            (source / change / "file").write_bytes(change.encode() * 50_000)
        store, layout = follow(store, layout, source)
        followed = followed.reopen(store.generation)
        assert store.summary.follows
        _assert_mapped(followed, layout)
        _assert_mapped(Store.open(store.directory, store.generation), layout)
    _clear(store)


def _assert_mapped(store: Store, layout: Layout) -> None:
    mapped = store.cut
    assert isinstance(mapped, Mapped)
    assert dict(mapped.tree.inodes) == layout.tree.inodes
    assert dict(mapped.tree.names) == layout.tree.names
    assert list(mapped.tree.walk()) == list(layout.tree.walk())
    assert (mapped.identity, mapped.copies) == (layout.identity, layout.copies)
    assert (mapped.size, mapped.block_size) == (layout.size, layout.block_size)
    for block in range(layout.blocks):
        assert list(mapped.extents(block)) == list(layout.extents(block))
    for number in (-2, -1, mapped.tree.limit):
        assert number not in mapped.tree.inodes
        with pytest.raises(KeyError):
            mapped.tree.inodes[number]


@pytest.mark.slow
def test_a_mapped_tree_takes_a_few_bytes_a_file(workplace: Path) -> None:
    count = 20_000
    inodes = {n: Inode(0o100644, n, n, 1, b"a/path/to/file-%d" % n) for n in range(1, count)}
    inodes[ROOT] = Inode(0o040755, 0, 0, 2)
    names = {ROOT: {b"%d" % n: n for n in range(1, count)}}
    stamps = {n: Stamp(1, n, n) for n in inodes}
    path = workplace / "description"
    path.write_bytes(Layout(Tree(inodes, names, stamps, limit=count), 4096).encode())
    # In a process of its own: Monarch's threads in this one may end it where memory is traced.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        sizes, taken = other.submit(_read_traced, path, list(inodes)).result(60)
    assert sizes == sum(inodes)
    assert taken < 60 * count


def _read_traced(path: Path, numbers: list[int]) -> tuple[int, int]:
    """The sum of the sizes of some inodes of a mapped tree, and the bytes that it takes then."""
    tracemalloc.start()
    mapped = Mapped(path)
    sizes = sum(mapped.tree.inodes[number].size for number in numbers)
    gc.collect()
    return sizes, tracemalloc.get_traced_memory()[0]


@pytest.mark.slow
def test_a_description_of_many_steps_is_written_anew(
    first: tuple[Store, Layout], source: Path
) -> None:
    store, layout = first
    sizes = []
    for number in range(60):
        (source / "page").write_text(f"{number}" * number * 100)
        (source / "package" / f"small{number}").write_text(f"changed {number}")
        made, layout = follow(store, layout, source)
        store.forget()
        store = made
        sizes.append(store.description.stat().st_size)
    assert any(after < before for before, after in pairwise(sizes))
    assert max(sizes) < 3 * len(layout.encode())
    _same(source, Store.open(store.directory, store.generation))
    _clear(store)


def test_what_there_is_to_say_of_a_whole_mount_needs_no_tree(first: tuple[Store, Layout]) -> None:
    store, layout = first
    store.rest()
    assert store.held() == layout.tree.size
    assert not store.missing()
    assert not store.changed()
    assert store._layout is None
    _clear(store)


def _with(tree: Tree, name: bytes, path: bytes) -> Layout:
    """A tree in which ``page`` has another name and lies elsewhere."""
    names = dict(tree.names[ROOT])
    number = names[name] = names.pop(b"page")
    tree.names[ROOT] = names
    tree.inodes[number] = tree.inodes[number]._replace(path=path)
    return Layout(tree, BLOCK)


@pytest.mark.parametrize(
    ("name", "path"),
    [(b"..", b".."), (b"a/b", b"a/b"), (b"page", b"../../escaped"), (b"page", b"/tmp/escaped")],
)
def test_a_description_that_leads_elsewhere_is_refused(
    source: Path, workplace: Path, name: bytes, path: bytes
) -> None:
    layout = _with(scan(os.fsencode(source)), name, path)
    place = workplace / "store" / "bad"
    with pytest.raises(TransferError):
        Store.create(place, layout.encode(), mounted=False)
    assert list(place.iterdir()) == []
    assert not (workplace / "escaped").exists()
    place.rmdir()


def test_so_is_one_of_what_follows(first: tuple[Store, Layout], source: Path) -> None:
    store, layout = first
    bad = _with(layout.tree.copy(), b"page", b"../../escaped")
    with pytest.raises(TransferError):
        store.next(bad.encode(layout))
    assert not (store.directory / "2").exists()
    _clear(store)


def test_a_file_that_is_gone_from_a_store_is_an_error(first: tuple[Store, Layout]) -> None:
    store, layout = first
    block = next(layout.covering(layout.tree.names[ROOT][b"odd"], 0, 1))
    (store.root / "odd").unlink()
    with pytest.raises(StoreError, match="cannot be read again"):
        store.read_block(block, memoryview(bytearray(BLOCK)))
    _clear(store)


def test_files_with_several_names_are_freed_without_a_walk_for_each(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = workplace / "source"
    source.mkdir()
    for number in range(50):
        (source / f"{number}").write_text("x")
        (source / f"second-{number}").hardlink_to(source / f"{number}")
    layout = Layout(scan(os.fsencode(source)), BLOCK)
    store = Store.create(workplace / "store" / "test", layout.encode(), mounted=False)
    arrive(store, source, layout)
    served = Store.open(store.directory)  # as a serving process has it
    walks = 0
    walk = TreeView.walk

    def counted(tree: TreeView, *arguments: Any) -> Any:
        nonlocal walks
        walks += 1
        return walk(tree, *arguments)

    monkeypatch.setattr(TreeView, "walk", counted)
    for number in list(layout.tree.inodes):
        served.free(number)
    assert list(store.root.iterdir()) == []
    assert walks == 1
    _clear(store)


@pytest.mark.slow
def test_many_empty_files_fit(workplace: Path) -> None:
    count = 40_000
    inodes = {n: Inode(0o100644, 0, n, 1, b"%d" % n + b"-" * 200) for n in range(1, count)}
    inodes[ROOT] = Inode(0o040755, 0, 0, 2)
    names = {ROOT: {inodes[n].path: n for n in range(1, count)}}
    layout = Layout(Tree(inodes, names, {n: Stamp(1, n, n) for n in inodes}, limit=count), BLOCK)
    description = layout.encode()
    need = Need.of(layout, len(description), copied=True)
    assert len(description) > 10 << 20
    assert need.kernel > count << 10
    store = Store.create(
        workplace / "store" / "test", description, mounted=True, set_attributes=True
    )
    try:
        assert len(os.listdir(store.root)) == count - 1
        assert store._used() <= need.file_system
    finally:
        stores.remove(store.directory)


def test_room_is_asked_for_before_files_are_copied(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = workplace / "source"
    source.mkdir()
    (source / "file").write_bytes(b"x" * (8 << 20))
    layout = Layout(scan(os.fsencode(source)), BLOCK)
    for set_attributes in (False, True):
        place = workplace / "store" / f"{set_attributes}"
        store = Store.create(place, layout.encode(), mounted=True, set_attributes=set_attributes)
        try:
            arrive(store, source, layout)
            (source / "file").chmod(0o700 + set_attributes)
            second, after = follow(store, layout, source, set_attributes=set_attributes)
            assert after.copies
            shared = (store.root / "file").samefile(second.root / "file")
            assert shared is not set_attributes, (
                "only what shows attributes needs a file of its own"
            )
            assert (second.root / "file").read_bytes() == (source / "file").read_bytes()
            monkeypatch.setattr(capacity, "_free", lambda *_, **__: 4 << 20)
            (source / "file").chmod(0o500 + set_attributes)
            if set_attributes:
                with pytest.raises(StoreError, match="do not fit into memory"):
                    follow(second, after, source)
            else:
                follow(second, after, source, set_attributes=False)
            monkeypatch.undo()
        finally:
            stores.remove(store.directory)


def test_numbers_that_grow_for_ever_take_no_memory(first: tuple[Store, Layout]) -> None:
    store, layout = first
    tree = layout.tree.copy()
    number = tree.names[ROOT][b"page"]
    tree.names[ROOT] = {**tree.names[ROOT], b"page": 1 << 40}
    tree.inodes[1 << 40] = tree.inodes.pop(number)
    tree.stamps[1 << 40] = tree.stamps.pop(number)
    tree.limit = (1 << 40) + 1
    described = Layout(tree, BLOCK, {1 << 40}).encode(layout)
    before = psutil.Process().memory_info().rss
    try:
        second = store.next(described, set_attributes=True)
        second.mark_changed(1 << 40)
        seen = Store.open(store.directory, 1)
        assert number in seen.tree.inodes
        seen = seen.reopen(2)
        assert seen.tree.inodes[1 << 40].path == b"page"
        assert number not in seen.tree.inodes
        assert (1 << 40) + 1 not in seen.tree.inodes
        assert seen.changed() == [b"page"]
        references = References(lambda _: None)
        for told in range((1 << 40) - 3, 1 << 40):
            references.add(told)
        assert references.of((1 << 40) - 1) == 1
        references.forget((1 << 40) - 1, 1)
        assert references.of((1 << 40) - 1) == 0
        assert psutil.Process().memory_info().rss - before < 64 << 20
    finally:
        _clear(store)


def test_a_trimmed_store_in_memory_has_room_for_its_notes(source: Path, workplace: Path) -> None:
    (source / "sparse").unlink()  # no room is left for holes
    layout = Layout(scan(os.fsencode(source)), BLOCK)
    store = Store.create(workplace / "store" / "test", layout.encode(), mounted=True)
    try:
        arrive(store, source, layout)
        store.trim()
        stores.NextCurrent(store.directory, 1).take()
        assert stores.current(store.directory) == 1
        assert (store.directory / "current").read_text() == "1"
        store.trim()
        proofs.copy(store.directory, 1, dict.fromkeys(range(10_000, 24_000), 9999))
        store.trim()
        assert proofs.size(store.directory) < 1000 * proofs.RECORD.size
        assert not (store.directory / "proofs.new").exists()
    finally:
        stores.remove(store.directory)


def test_a_log_without_room_keeps_whole_records_only(
    first: tuple[Store, Layout], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = first
    before, write = proofs.read(store.directory), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) - 10]))
    with pytest.raises(OSError, match="No space"):
        proofs.copy(store.directory, 1, {10_000: 9999, 10_001: 9999})
    monkeypatch.undo()
    proofs.copy(store.directory, 1, {10_000: min(before)})
    assert proofs.read(store.directory) == before | {10_000: before[min(before)]}
    _clear(store)


def test_a_store_on_a_file_system_without_locks(
    first: tuple[Store, Layout], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layout = first

    def flock(_descriptor: int, _kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with store.growing(wait=0):
        made, _ = follow(store, layout, source)
    _same(source, made)
    assert stores.in_use(store.directory), "that no process has it open cannot be known"
    monkeypatch.undo()
    _clear(store)


def test_an_ordinary_user_can_delete_directories_that_are_not_for_writing() -> None:
    def act(place: Path) -> None:
        (place / "store" / "1" / "outer" / "inner").mkdir(parents=True)
        (place / "store" / "1" / "outer" / "inner" / "file").touch()
        for folder in ("outer/inner", "outer"):
            (place / "store" / "1" / folder).chmod(0o555)
        stores.remove(place / "store")
        assert not (place / "store").exists()

    as_nobody(act)
