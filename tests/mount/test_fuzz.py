"""What comes from outside a process, made up at random: nothing of it ends the process, or more."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from hypothesis import example
from hypothesis import given as always
from hypothesis import strategies as st

from tests.mount.test_server import Served
from tests.mount.test_stream import _opened
from wheelmount.config import Settings
from wheelmount.errors import StoreError, TransferError
from wheelmount.mount.serve import control, processes
from wheelmount.mount.serve.fuse import abi
from wheelmount.mount.serve.fuse.abi import Op
from wheelmount.mount.serve.fuse.devfuse import DirectFuse
from wheelmount.mount.serve.vfs import Vfs
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.tree import Stamp
from wheelmount.mount.store.store import Store
from wheelmount.mount.transfer.stream import REPLY, REQUEST, BlockServer

# ---- descriptions

ENDINGS = ".tree", ".summary", ".have", ".changed"

ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary()
    | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.binary() | st.integers(0, 9), parts),
    max_leaves=6,
)  # fmt: skip
"""What msgpack can say."""


@functools.cache
def _example() -> tuple[Any, ...]:
    """The description of a small tree, unpacked."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        (root / "directory").mkdir()
        (root / "directory" / "file").write_bytes(b"x" * 5000)
        (root / "second").hardlink_to(root / "directory" / "file")
        (root / "link").symlink_to("second")
        (root / "empty").touch()
        with (root / "sparse").open("wb") as file:
            file.seek(1 << 20)
            file.write(b"x")
        os.setxattr(root / "second", "user.a", b"b")
        described: tuple[Any, ...] = msgpack.unpackb(
            Layout(scan(os.fsencode(root)), 4096).encode(), strict_map_key=False, use_list=False
        )
    return described


def _parts(whole: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways to all parts of what was unpacked."""
    yield path
    if isinstance(whole, tuple):
        for place, part in enumerate(whole):
            yield from _parts(part, (*path, place))
    elif isinstance(whole, dict):
        for key, part in whole.items():
            yield from _parts(part, (*path, key))


def _with(whole: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The same, with another part."""
    if not path:
        return new
    key, *rest = path
    if isinstance(whole, dict):
        return {**whole, key: _with(whole[key], tuple(rest), new)}
    return (*whole[:key], _with(whole[key], tuple(rest), new), *whole[key + 1 :])


def _take(*descriptions: bytes) -> None:
    """Do what a host does with a description and those that follow; they may only be refused."""
    place = Path(tempfile.mkdtemp(prefix="wm-"))
    (place / "store").mkdir()
    try:
        with contextlib.suppress(TransferError, StoreError):
            store = None
            for description in descriptions:
                if store is None:
                    directory = place / "store" / "x"
                    store = Store.create(directory, description, mounted=False, set_attributes=True)
                else:
                    store = store.next(description, set_attributes=True)
                _fill(store)
        left = {path.name for path in (place / "store").glob("x/[0-9]*")}
        made = set(map(str, range(1, 1 + len(list((place / "store").glob("x/*.tree"))))))
        assert left == {f"{n}{end}" for n in made for end in ("", *ENDINGS)}, "parts"
        assert [path.name for path in place.iterdir()] == ["store"], "nothing is made elsewhere"
    finally:
        shutil.rmtree(place)


def _fill(store: Store) -> None:
    """Have bytes arrive, and see that all can be shown."""
    for block in store.missing()[:16]:
        data = memoryview(bytearray(store.layout.length(block)))
        store.write(block, data)
        store.read_block(block, data)
    store.finish()
    seen = Vfs(Store.open(store.directory, store.generation))
    for number in store.layout.tree.inodes:
        abi.attributes(number, seen.inode(number), (0, 0))
        if seen.inode(number).is_file:
            seen.read(number, 0, 1 << 16)
    for path, number in store.layout.tree.walk():
        directory, _, name = path.rpartition(b"/")
        parent = seen.store.tree.find(directory) if directory else 0
        assert parent is not None
        assert seen.lookup(parent, name) == number


@pytest.mark.slow
@always(st.data())
def test_descriptions_with_other_parts(data: st.DataObject) -> None:
    whole = _example()
    path = data.draw(st.sampled_from(list(_parts(whole))))
    _take(msgpack.packb(_with(whole, path, data.draw(ANY))))


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ((7,), ["a"]),
        ((7,), [5]),
        ((7,), {6: None}),
        ((8,), []),
        ((4,), 0),
        ((3,), 0),
        ((5, 1, 2), -1),
        ((5, 0, 7), False),
        ((5, 0, 7), b""),
    ],
)
def test_descriptions_that_were_found(path: tuple[int, ...], new: object) -> None:
    _take(msgpack.packb(_with(_example(), path, new)))


@always(st.data())
def test_descriptions_with_other_bytes(data: st.DataObject) -> None:
    packed = bytearray(msgpack.packb(_example()))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(packed) - 1))
        length = data.draw(st.integers(0, 4))
        packed[place : place + length] = data.draw(st.binary(max_size=4))
    _take(bytes(packed))


@always(st.binary(max_size=50))
def test_descriptions_of_any_bytes(description: bytes) -> None:
    _take(description)


@pytest.mark.slow
@always(st.data())
def test_descriptions_of_what_follows(data: st.DataObject) -> None:
    first = Layout.decode(msgpack.packb(_example()))
    tree = first.tree.copy()
    number = tree.limit
    tree.names[0] = {**tree.names[0], b"new": number}
    tree.inodes[number] = tree.inodes[tree.names[0][b"second"]]._replace(path=b"new", nlink=1)
    tree.stamps[number] = Stamp(0, 0, 0)
    tree.limit += 1
    whole = msgpack.unpackb(
        Layout(tree, 4096, {number}).encode(first), strict_map_key=False, use_list=False
    )
    path = data.draw(st.sampled_from(list(_parts(whole))))
    _take(msgpack.packb(_example()), msgpack.packb(_with(whole, path, data.draw(ANY))))


# ---- the control socket


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A mount, for many examples."""
    place = Path(tempfile.mkdtemp(prefix="wm-"))
    for name in ("source", "runtime", "store", "cache", "state"):
        (place / name).mkdir()
    (place / "source" / "file").write_bytes(b"bytes")
    settings = Settings(
        block_size=64 << 10,
        read_timeout=10,
        store=str(place / "store"),
        runtime_dir=str(place / "runtime"),
        cache_dir=str(place / "cache"),
        state_dir=str(place / "state"),
    )
    mount = Served(place / "source", place, settings)
    mount.feed(keep=True)
    mount.arrive(0)
    yield mount
    mount.end()
    shutil.rmtree(place)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
    max_leaves=5,
)
REQUESTS = st.fixed_dictionaries(
    {"op": st.sampled_from(["feed", "show", "status", "nothing"]) | JSON},
    optional={"keep": st.just(True), "generation": JSON, "force": JSON},
)
TOLD = st.dictionaries(st.sampled_from(["have", "failed", "reason"]), JSON) | JSON


@pytest.mark.fuse
@always(st.binary() | st.builds(lambda m: json.dumps(m).encode(), REQUESTS), st.lists(TOLD))
@example(b"[" * 100_000, [])
@example(b"x" * (3 << 20), [])
@example(b'{"op":"show","generation":"\\u0000"}', [])
@example(b'{"op":"feed","keep":true}', ["have", {"have": []}])
def test_the_control_socket(served: Served, request: bytes, then: list[Any]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(served.directory / control.SOCKET))
        with contextlib.suppress(OSError):  # it hangs up on what it does not understand
            connection.sendall(request + b"\n")
            for message in then:
                connection.sendall(json.dumps(message).encode() + b"\n")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    assert processes.status(served.directory)["generation"] == 1
    assert processes.status(served.directory)["fed"], "the agent of the mount stays connected"
    assert (served.mount / "file").read_bytes() == b"bytes"


# ---- requests of the kernel


@pytest.fixture(scope="module")
def kernel_side() -> Iterator[socket.socket]:
    """Where a kernel would be of a server that shows a small tree."""
    place = Path(tempfile.mkdtemp(prefix="wm-"))
    description = msgpack.packb(_example())
    store = Store.create(place / "store", description, mounted=False)
    for block in store.missing():
        store.write(block, memoryview(bytearray(store.layout.length(block))))
    store.finish()
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(10)

    async def wait(_number: int, _offset: int, _size: int) -> bytes:
        raise AssertionError("all bytes are there")

    fuse = DirectFuse(its.fileno(), Vfs(Store.open(store.directory)), wait, (0, 0))
    serving = threading.Thread(target=trio.run, args=(fuse.serve,))
    serving.start()
    yield mine
    mine.close()
    serving.join(10)
    its.close()
    shutil.rmtree(place)
    assert not serving.is_alive()


NODES = st.integers(0, 9) | st.integers(0, 2**64 - 1)
BODIES = st.binary(max_size=80) | st.builds(
    lambda words: b"".join(word.to_bytes(8, "little") for word in words),
    st.lists(NODES, max_size=8),
)


@pytest.mark.slow
@always(st.lists(st.tuples(st.sampled_from(Op) | st.integers(0, 2**32 - 1), NODES, BODIES)))
def test_requests_of_the_kernel(
    kernel_side: socket.socket, requests: list[tuple[int, int, bytes]]
) -> None:
    for unique, (opcode, node, body) in enumerate(requests, 2):
        length = abi.IN_HEADER.size + len(body)
        head = abi.IN_HEADER.pack(length, opcode, unique * 2, node, 0, 0, 0, 0, 0)
        kernel_side.send(head + body)
    last = 2**63
    length = abi.IN_HEADER.size + 16
    kernel_side.send(abi.IN_HEADER.pack(length, Op.GETATTR, last, 1, 0, 0, 0, 0, 0) + bytes(16))
    answered: dict[int, int] = {}
    while last not in answered:
        answer = kernel_side.recv(1 << 21)
        length, error, unique = abi.OUT_HEADER.unpack_from(answer)
        assert length == len(answer)
        assert -4096 < error <= 0
        assert error == 0 or length == abi.OUT_HEADER.size
        assert unique not in answered
        answered[unique] = error
    assert answered[last] == 0


# ---- streams


@pytest.mark.slow
@always(st.lists(st.binary(max_size=60), max_size=4))
def test_requests_of_a_stream(requests: list[bytes]) -> None:
    with _opened() as (block_server, blocks):
        _say(block_server, *requests)
        _say(block_server, block_server.ticket.secret + b"".join(requests))
        asked = REQUEST.pack(block_server.ticket.secret, 1, False, False)
        answer = _say(block_server, asked)
        good, size = REPLY.unpack_from(answer)
        assert good
        assert answer[REPLY.size + size :] == blocks[1]


def _say(block_server: BlockServer, *parts: bytes) -> bytes:
    assert isinstance(block_server.ticket.where, str)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(f"\0{block_server.ticket.where}")
        answer = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 20):
                answer += piece
    return answer
