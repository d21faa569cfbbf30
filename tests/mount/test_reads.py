"""What programs read first is remembered, and comes first the next time."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wheelmount import remotemount
from wheelmount.config import Settings
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client import reads
from wheelmount.mount.client.delivery import Delivery
from wheelmount.mount.client.reads import LEAST, Record
from wheelmount.mount.serve.trace import MOST, PART, Trace
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.source import Source
from wheelmount.mount.snapshot.tree import Tree

BLOCK = 64 << 10


@pytest.fixture
def source(workplace: Path) -> Path:
    """40 files of two blocks each, and a large one."""
    source = workplace / "source"
    (source / "below").mkdir(parents=True)
    for number in range(40):
        (source / "below" / f"{number:02}").write_bytes(os.urandom(2 * BLOCK))
    (source / "large").write_bytes(os.urandom(LEAST))
    return source


@pytest.fixture
def tree(source: Path) -> Tree:
    return scan(os.fsencode(source))


def _number(tree: Tree, path: str) -> int:
    number = tree.find(path.encode())
    assert number is not None
    return number


def _parts(tree: Tree, *paths: str) -> list[tuple[int, int]]:
    return [(_number(tree, path), 0) for path in paths]


def _paths(record: Record, tree: Tree) -> list[str]:
    """The files that come first, in the order of their blocks in a new layout."""
    record.pack(tree)
    layout = Layout(tree, BLOCK)
    found = [extent.inode for b in record.blocks(layout) for extent in layout.extents(b)]
    return [tree.inodes[number].path.decode() for number in dict.fromkeys(found)]


def test_a_trace_has_each_part_once_in_the_order_of_the_first_reads() -> None:
    trace = Trace()
    trace.note(7, PART - 1, PART + 1)
    trace.note(3, 0, 1)
    trace.note(7, 0, 3 * PART)
    assert trace.end() == [(7, 0), (7, 1), (3, 0), (7, 2)]
    trace.note(1, 0, 1)
    assert trace.end() == []


def test_a_trace_is_bounded() -> None:
    trace = Trace()
    for number in range(2 * MOST):
        trace.note(number, 0, 1)
    assert len(trace.end()) == MOST


def test_what_was_read_last_comes_first_and_then_what_was_read_before(
    settings: Settings, source: Path, tree: Tree
) -> None:
    place = os.fsencode(source)
    assert _paths(Record(settings, place), scan(place)) == []
    names = [f"below/{number:02}" for number in range(10)]
    Record(settings, place).add(tree, [_parts(tree, *names[5:0:-1])])
    assert _paths(Record(settings, place), scan(place)) == names[5:0:-1]
    Record(settings, place).add(tree, [_parts(tree, names[9], names[2]), _parts(tree, names[7])])
    expected = [names[n] for n in (9, 2, 7, 5, 4, 3, 1)]
    assert _paths(Record(settings, place), scan(place)) == expected
    assert _paths(Record(settings, place + b"2"), scan(place)) == [], "another directory"


def test_wanted_parts_of_a_large_file_come_first_and_its_others_do_not(
    settings: Settings, source: Path, tree: Tree
) -> None:
    place = os.fsencode(source)
    (source / "below" / "03").unlink()
    large = _number(tree, "large")
    Record(settings, place).add(tree, [[*_parts(tree, "below/03"), (large, 9), (large, 1)]])
    record, after = Record(settings, place), scan(place)
    record.pack(after)
    layout, large = Layout(after, BLOCK), _number(after, "large")
    expected = [
        *layout.covering(large, 9 * PART, 10 * PART),
        *layout.covering(large, PART, 2 * PART),
    ]
    assert list(record.blocks(layout)) == expected
    assert len(expected) < 2 * (PART // BLOCK + 1) + 1


@pytest.mark.parametrize(
    "answer",
    [None, 7, "text", {}, [None], [[1]], [["0", "0"]], [[10**9, 0]], [[-1, 0]], [[1, 1 << 70]],
     [[1, -1]], [[True, 0]], [[[], {}]], [[0, 0]]],
)  # fmt: skip
def test_a_host_can_name_files_of_the_tree_only(
    settings: Settings, source: Path, tree: Tree, answer: Any
) -> None:
    record = Record(settings, os.fsencode(source))
    record.add(tree, [answer])
    assert not (Path(settings.cache_dir) / reads.PLACE).is_dir() or not list(
        (Path(settings.cache_dir) / reads.PLACE).iterdir()
    )
    record.add(tree, [answer, _parts(tree, "large")])
    assert _paths(Record(settings, os.fsencode(source)), tree) == ["large"]


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"\x92\x91\xa1a\x91\x92\x00\x00", b"\x92\x90\x91\x92\x05\x00"]
)
def test_a_damaged_record_is_none(
    settings: Settings, source: Path, tree: Tree, content: bytes
) -> None:
    place = os.fsencode(source)
    Record(settings, place).add(tree, [_parts(tree, "large")])
    (file,) = (Path(settings.cache_dir) / reads.PLACE).iterdir()
    assert file.stat().st_mode & 0o077 == 0
    file.write_bytes(content)
    record = Record(settings, place)
    assert record.blocks(Layout(tree, BLOCK)) == ()
    record.add(tree, [_parts(tree, "below/07")])
    assert _paths(Record(settings, place), tree) == ["below/07"]


def test_where_others_may_write_nothing_is_read_or_kept(
    settings: Settings, source: Path, tree: Tree
) -> None:
    place = os.fsencode(source)
    Record(settings, place).add(tree, [_parts(tree, "large")])
    Path(settings.cache_dir).chmod(0o777)
    record = Record(settings, place)
    assert record.blocks(Layout(tree, BLOCK)) == ()
    record.add(tree, [_parts(tree, "below/07")])


def test_few_records_are_kept(
    settings: Settings, source: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "KEPT", 3)
    place = os.fsencode(source)
    for number in range(5):
        tree = scan(place)
        Record(settings, place + b"%d" % number).add(tree, [_parts(tree, "large")])
        Record(settings, place + b"0").pack(tree)  # used again
    assert len(list((Path(settings.cache_dir) / reads.PLACE).iterdir())) == 3
    assert _paths(Record(settings, place + b"0"), tree) == ["large"]


@pytest.mark.fuse
@pytest.mark.hosts
def test_what_is_read_while_bytes_arrive_comes_first_the_next_time(
    source: Path, workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, deliver = replace(settings, adapter="devfuse"), Delivery.deliver
    wanted = ["below/31", "below/04", "below/17"]
    with LocalHosts(2, settings, namespaces=False) as hosts:
        for known in (False, True):
            monkeypatch.setattr(Delivery, "deliver", lambda *_: None)
            with remotemount(hosts, source, f"{workplace}/{{host}}", settings=held) as mount:
                for path in wanted:
                    there = Path(mount.mntpoints["host1"]) / path
                    assert there.read_bytes() == (source / path).read_bytes()
                delivery, agents = mount._delivery, mount._agents
                assert delivery is not None
                layout = delivery.layout
                numbers = [_number(layout.tree, path) for path in wanted]
                first = [b for n in numbers for b in layout.covering(n, 0, 2 * BLOCK)]
                routes = delivery.routes(agents)
                assert {route.first for route in routes.values()} == {
                    tuple(dict.fromkeys(first)) if known else ()
                }
                deliver(delivery, set(agents), agents)
                mount.wait(60)
                for path in mount.mntpoints.values():
                    subprocess.run(["diff", "-r", source, path], check=True, timeout=60)


@pytest.mark.fuse
@pytest.mark.hosts
def test_a_mount_that_is_closed_while_bytes_arrive_tells_what_was_read(
    source: Path, workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, going = Source.fill, threading.Event()
    begun = threading.Event()

    def wait(self: Source, block: int, view: memoryview) -> Any:
        if not any(e.inode == number for e in self.layout.extents(block)):
            begun.set()
            going.wait(60)
        return fill(self, block, view)

    number = _number(scan(os.fsencode(source)), "below/31")
    monkeypatch.setattr(Source, "fill", wait)
    try:
        with (
            LocalHosts(1, settings, namespaces=False) as hosts,
            remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings) as mount,
        ):
            assert begun.wait(60), "it is delivering"
            path = Path(mount.mntpoints["host0"]) / "below/31"
            assert path.read_bytes() == (source / "below/31").read_bytes()
            mount.close()
    finally:
        going.set()
    tree = scan(os.fsencode(source))
    assert _paths(Record(settings, os.fsencode(source)), tree)[0] == "below/31"


@pytest.mark.fuse
@pytest.mark.hosts
def test_without_a_cache_a_mount_is_as_before(
    source: Path, workplace: Path, settings: Settings
) -> None:
    Path(settings.cache_dir).chmod(0o777)
    with (
        LocalHosts(1, settings, namespaces=False) as hosts,
        remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings) as mount,
    ):
        (path,) = mount.mntpoints.values()
        subprocess.run(["diff", "-r", source, path], check=True, timeout=60)
        mount.wait(60)
