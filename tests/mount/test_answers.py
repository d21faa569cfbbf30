"""Answers of hosts that cannot be true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from wheelmount.config import Settings
from wheelmount.errors import MountError, TransferError
from wheelmount.hosts.host import Host
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.mount.host import reattach
from wheelmount.mount.host.reattach import Adopted
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.store.verify import Damage, Verified
from wheelmount.progress import SILENT

SECRET = b"a key"


class _Answer:
    """As much of a future of Monarch as is awaited."""

    def __init__(self, value: object) -> None:
        self._value = value

    def as_asyncio(self) -> Awaitable[object]:
        return asyncio.sleep(0, self._value)


class _Endpoint:
    """Answers each call as it is told, and keeps the arguments."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def call_one(self, *arguments: Any) -> _Answer:
        self.calls.append(arguments)
        return _Answer(self._answer)


class _Agent:
    """An agent that says of one file that a piece of it is damaged."""

    def __init__(self, layout: Layout, damage: Damage) -> None:
        identity, length = layout.identity, len(layout.encode())
        self.adopt = _Endpoint(Adopted(identity, length, [], True, layout.block_size, "/mnt"))
        self.describe = _Endpoint(b"")
        self.verify = _Endpoint(Verified(damaged=[damage]))
        self.repair = _Endpoint(None)
        self.piece = _Endpoint(None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_bytes(SECRET)
    source = tmp_path / "source"
    (source / "folder").mkdir(parents=True)
    (source / "folder" / "file").write_bytes(b"right")
    (source / "link").symlink_to(tmp_path / "elsewhere")
    return source


def _damage(layout: Layout, path: bytes, data: bytes, offset: int = 0) -> Damage:
    """A piece of the only file of a tree."""
    (number,) = (number for number, inode in layout.tree.inodes.items() if inode.is_file)
    return Damage(number, path, offset, len(data), blake3(data).digest())


def _mount(source: Path, layout: Layout, agent: _Agent) -> RemoteMount:
    mount = RemoteMount([Host("host0", None)], str(source), None, Settings(), SILENT)
    mount._layout = layout
    mount._agents.take({"host0": agent}, mount.hosts)
    return mount


def test_a_host_gets_no_bytes_of_the_path_that_it_names(source: Path) -> None:
    layout = Layout(scan(bytes(source)), 1 << 20)
    agent = _Agent(layout, _damage(layout, b"../secret", SECRET))
    found = _mount(source, layout, agent).verify(repair=True)
    assert agent.repair.calls == []
    assert found["host0"].wrong == ["folder/file"], "its path in the client's tree"
    agent = _Agent(layout, _damage(layout, b"../secret", b"right"))
    found = _mount(source, layout, agent).verify(repair=True)
    ((damage, data, last),) = agent.repair.calls
    assert (damage.path, data, last) == (b"folder/file", b"right", True)
    assert found["host0"].wrong == []


@pytest.mark.parametrize(
    "path", [b"../secret", b"link/secret", b"/absolute", b"folder/../../secret"]
)
def test_a_tree_that_came_from_a_host_names_no_other_files(source: Path, path: bytes) -> None:
    layout = Layout(scan(bytes(source)), 1 << 20)
    damage = _damage(layout, path, SECRET)
    inode = layout.tree.inodes[damage.number]
    absolute = bytes(source.parent / "secret")
    layout.tree.inodes[damage.number] = inode._replace(path=path.replace(b"/absolute", absolute))
    agent = _Agent(layout, damage)
    _mount(source, layout, agent).verify(repair=True)
    assert agent.repair.calls == []


@pytest.mark.parametrize(
    "wrong",
    [{"number": 99}, {"number": 0}, {"offset": -1}, {"length": 6}, {"offset": 1}, {"length": -1}],
)
def test_a_piece_that_is_in_no_file_is_refused(source: Path, wrong: dict[str, Any]) -> None:
    layout = Layout(scan(bytes(source)), 1 << 20)
    agent = _Agent(layout, replace(_damage(layout, b"folder/file", b"right"), **wrong))
    mount = _mount(source, layout, agent)
    with pytest.raises(TransferError, match="host0 names a damaged piece that is in no file"):
        mount.verify(repair=True)
    assert agent.repair.calls == []


def test_a_description_that_ends_early_is_an_error(source: Path) -> None:
    layout = Layout(scan(bytes(source)), 1 << 20)
    agent = _Agent(layout, _damage(layout, b"folder/file", b"right"))
    with pytest.raises(MountError, match="host0: the description of its tree ends after 0 of"):
        reattach.find({"host0": agent}, 5)
    assert len(agent.describe.calls) == 1
