"""Bytes that a host has in other mounts do not travel."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.test_store import arrive
from wheelmount import remotemount
from wheelmount.config import Settings
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.mount.snapshot.diff import Succession
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.store.store import Store
from wheelmount.mount.transfer.dedup import SEARCHED, LocalCopies, find

BLOCK = 64 << 10
WHEEL = 1 << 20


def _wheels(root: Path, **contents: bytes) -> Path:
    for name, content in contents.items():
        path = root / f"{name.replace('__', '/')}.whl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


@pytest.mark.fuse
@pytest.mark.hosts
class TestOnHosts:
    """Two mounts on real hosts."""

    @pytest.fixture
    def hosts(self, settings: Settings) -> Iterator[LocalHosts]:
        with LocalHosts(2, settings, namespaces=False) as made:
            yield made

    @pytest.fixture
    def wheel(self) -> bytes:
        return os.urandom(WHEEL)

    @pytest.fixture
    def first(
        self, hosts: LocalHosts, workplace: Path, settings: Settings, wheel: bytes
    ) -> Iterator[RemoteMount]:
        """A mount, whole."""
        source = _wheels(workplace / "first", a=wheel, b=os.urandom(WHEEL), c=b"c" * 100)
        with remotemount(hosts, source, f"{workplace}/1-{{host}}", settings=settings) as mount:
            mount.wait(30)
            yield mount

    def _second(
        self, hosts: LocalHosts, source: Path, workplace: Path, settings: Settings
    ) -> tuple[int, list[dict[str, Any]]]:
        """Bytes that the client sent, and each host's traffic, for a second mount."""
        with remotemount(hosts, source, f"{workplace}/2-{{host}}", settings=settings) as mount:
            mount.wait(30)
            for path in mount.mntpoints.values():
                subprocess.run(["diff", "-r", source, path], check=True, timeout=60)
            return mount.sent, [found["delivery"] for found in mount.status().values()]

    def test_of_the_same_tree(
        self, first: RemoteMount, hosts: LocalHosts, workplace: Path, settings: Settings
    ) -> None:
        source = Path(first.source)
        sent, found = self._second(hosts, source, workplace, settings)
        assert sent == 0
        assert [each["reused"] for each in found] == [2 * WHEEL + 100] * 2
        assert [each["received"] for each in found] == [{}, {}]

    @pytest.mark.usefixtures("first")
    def test_of_another_tree_with_a_wheel_of_the_first(
        self,
        hosts: LocalHosts,
        workplace: Path,
        settings: Settings,
        wheel: bytes,
    ) -> None:
        # "b" has the name and the size of another, "wheels/a" is the same elsewhere.
        source = _wheels(workplace / "other", b=os.urandom(WHEEL), wheels__a=wheel, z=b"z" * 5)
        sent, found = self._second(hosts, source, workplace, settings)
        assert WHEEL <= sent <= WHEEL + 2 * BLOCK
        assert all(each["reused"] >= WHEEL - 2 * BLOCK for each in found)

    def test_what_rotted_there_travels(
        self, first: RemoteMount, hosts: LocalHosts, workplace: Path, settings: Settings
    ) -> None:
        for store in (workplace / "store").glob(f"*/{first.identity}-*"):
            with (store / "1" / "a.whl").open("r+b") as file:
                file.write(bytes(BLOCK))
        sent, found = self._second(hosts, Path(first.source), workplace, settings)
        assert 0 < sent <= 2 * BLOCK
        assert all(each["reused"] >= 2 * WHEEL - 2 * BLOCK for each in found)

    def test_a_file_that_was_written_again_as_it_was_does_not_travel(
        self, first: RemoteMount, wheel: bytes
    ) -> None:
        source = Path(first.source)
        (source / "a.whl").unlink()
        (source / "a.whl").write_bytes(wheel)
        assert first.refresh()
        assert first.sent == 0
        for path in first.mntpoints.values():
            subprocess.run(["diff", "-r", source, path], check=True, timeout=60)


@pytest.fixture
def trees(workplace: Path) -> tuple[Path, Layout, Store]:
    """A directory, its layout, and a store of it without a byte."""
    source = _wheels(workplace / "source", a=os.urandom(3 * BLOCK), b=b"b" * 10)
    layout = Layout(scan(os.fsencode(source)), BLOCK)
    store = Store.create(workplace / "store" / "one", layout.encode(), mounted=False)
    return source, layout, store


def test_what_has_not_arrived_or_is_gone_is_not_found(trees: tuple[Path, Layout, Store]) -> None:
    source, layout, store = trees
    memory = memoryview(bytearray(BLOCK))
    found = LocalCopies(layout)
    found.search([store])
    assert list(found.tries(0)) == [[]]
    assert not list(found.candidates(0, b"", memory))
    arrive(store, source, layout)
    assert list(found.candidates(0, b"", memory)) == [0]
    assert bytes(memory) == (source / "a.whl").read_bytes()[:BLOCK]
    shutil.rmtree(store.directory)
    assert not list(found.candidates(0, b"", memory))


@pytest.mark.parametrize(
    ("size", "searched"), [(150 * SEARCHED, False), (250 * SEARCHED, True)], ids=["few", "many"]
)
def test_all_files_are_searched_only_for_many_bytes(
    size: int, searched: bool, workplace: Path, settings: Settings
) -> None:
    content = os.urandom(size)
    source = _wheels(workplace / "source", a=content, **{f"s{n}": b"s" for n in range(199)})
    layout = Layout(scan(os.fsencode(source)), BLOCK)
    store = Store.create(workplace / "store" / "one", layout.encode(), mounted=False)
    arrive(store, source, layout)
    _wheels(source, copy__a=content)
    succession = Succession(layout.tree, scan(os.fsencode(source), layout.tree))
    following = store.next(succession.settle([], BLOCK).encode(layout))
    found = find(settings, workplace / "mount-host0", following, before=store)
    assert (found is not None) == searched
    # At its own path it is found in any case.
    _wheels(source, a=content)
    succession = Succession(layout.tree, scan(os.fsencode(source), layout.tree))
    following = store.next(succession.settle([], BLOCK).encode(layout))
    found = find(settings, workplace / "mount-host0", following, before=store)
    assert found is not None
    memory = memoryview(bytearray(BLOCK))
    assert list(found.candidates(0, b"", memory)) == [0]
    assert bytes(memory) == content[:BLOCK]
    shutil.rmtree(store.directory)


def test_a_path_is_a_better_guess_than_a_name(workplace: Path) -> None:
    source = _wheels(workplace / "source", x__a=b"1" * 10, y__a=b"2" * 10)
    layout = Layout(scan(os.fsencode(source)), BLOCK)
    store = Store.create(workplace / "store" / "one", layout.encode(), mounted=False)
    arrive(store, source, layout)
    memory = memoryview(bytearray(BLOCK))
    found = LocalCopies(layout)
    found.search([store])
    assert list(found.candidates(0, b"", memory[:20])) == [0]
    assert bytes(memory[:20]) == b"1" * 10 + b"2" * 10
    shutil.rmtree(store.directory)
