"""The tree as plain operations, without a mount: the same suite that every mount must pass."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.conftest import make_source
from tests.mount.conformance import Bare, assert_shown
from tests.mount.test_ordinary_user import as_nobody
from tests.mount.test_store import BLOCK, arrive, follow
from wheelmount.mount.serve.vfs import Vfs
from wheelmount.mount.snapshot.encoded import Mapped
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.store import store as stores
from wheelmount.mount.store.store import Store


def _store(source: Path, place: Path, *, mounted: bool) -> tuple[Store, Layout]:
    layout = Layout(scan(os.fsencode(source)), BLOCK)
    store = Store.create(place / "kept", layout.encode(), mounted=mounted)
    return store, layout


@pytest.mark.parametrize("mounted", [False, True], ids=["disk", "memory"])
def test_shows_the_tree(source: Path, workplace: Path, mounted: bool) -> None:
    store, layout = _store(source, workplace, mounted=mounted)
    try:
        arrive(store, source, layout)
        assert_shown(source, Bare(Vfs(store)))
        again = Store.open(store.directory)
        assert_shown(source, Bare(Vfs(again)))
        assert isinstance(again.cut, Mapped)
    finally:
        stores.remove(store.directory)


def test_shows_the_tree_to_an_ordinary_user() -> None:
    def work(place: Path) -> None:
        source = make_source(place / "source")
        store, layout = _store(source, place, mounted=False)
        arrive(store, source, layout)
        assert_shown(source, Bare(Vfs(Store.open(store.directory))))

    as_nobody(work)


def test_shows_the_next_tree_and_keeps_the_files_of_the_last(source: Path, workplace: Path) -> None:
    store, layout = _store(source, workplace, mounted=False)
    arrive(store, source, layout)
    first = Store.open(store.directory)
    vfs = Vfs(first)
    number = layout.tree.find(b"page")
    assert number is not None
    (source / "page").write_bytes(b"other")
    (source / "package" / "sub").rename(source / "moved")
    second, _ = follow(store, layout, source, set_attributes=False)
    vfs.replace(first.reopen(second.generation))
    assert_shown(source, Bare(vfs))
    assert vfs.read(number, 0, 5) == b"ppppp"
    vfs.forget(first)
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        vfs.inode(number)


def test_bytes_that_have_not_come_are_told(source: Path, workplace: Path) -> None:
    store, layout = _store(source, workplace, mounted=False)
    vfs = Vfs(Store.open(store.directory))
    number = layout.tree.find(b"odd")
    assert number is not None
    block = vfs.absent(number, 0, 1)
    assert block == next(layout.covering(number, 0, 1))
    assert vfs.read(number, 0, 1) is None
    arrive(store, source, layout)
    assert vfs.absent(number, 0, 1) is None
    assert vfs.read(number, 0, 10) == (source / "odd").read_bytes()[:10]
