"""What a host gives to others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from tests.mount.test_store import arrive
from wheelmount.errors import TransferError, WheelmountError
from wheelmount.hosts import runtime
from wheelmount.mount.serve.traffic import Traffic
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.store import store as stores
from wheelmount.mount.store.store import Store
from wheelmount.mount.transfer.rdma import BlockInfo
from wheelmount.mount.transfer.relay import Relay
from wheelmount.mount.transfer.ring import Staged

BLOCK = 64 << 10


@pytest.fixture
def store(source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """All of ``source``, in several blocks."""
    monkeypatch.setattr(runtime, "address", lambda: None)  # sockets of this machine will do
    layout = Layout(scan(os.fsencode(source)), BLOCK)
    made = Store.create(workplace / "store" / "test", layout.encode(), mounted=False)
    arrive(made, source, layout)
    yield made
    stores.remove(made.directory)


def _relay(store: Store, below: tuple[int, ...]) -> Relay:
    async def ensure(_block: int, _urgent: bool) -> WheelmountError | None:
        return None

    async def confirm(block: int) -> BlockInfo:
        view = memoryview(bytearray(store.layout.length(block)))
        store.read_block(block, view)
        return blake3(view).digest(), ()

    return Relay(store, ensure, confirm, Traffic(), 10, below)


def test_only_what_others_are_to_ask_for_is_kept_in_memory(store: Store) -> None:
    async def main() -> None:
        relay = _relay(store, (0, 1))
        memory = memoryview(bytearray(BLOCK))
        staged = Staged(0, BLOCK, BLOCK, b"digest", ())
        assert relay.put(staged, 1, False, memory) is memory, "nobody asked for anything yet"
        await relay.ways()
        assert relay.put(staged, 0, False, memory) is memory
        relay.note(1, (b"digest", ()))
        assert relay.put(staged, 1, False, memory) is not memory
        with relay.lend(1, packed=False) as (lent, view):
            assert (lent.digest, view.obj) == (b"digest", memory.obj)
        relay.close()

    asyncio.run(main())


def test_what_is_not_in_memory_is_read_again(store: Store) -> None:
    async def main() -> None:
        relay = _relay(store, (1,))
        with (
            pytest.raises(TransferError, match="has asked for the address"),
            relay.lend(0, packed=False),
        ):
            pass
        await relay.ways()

        def twice() -> list[bytes]:
            found = []
            for _ in range(2):  # to more than it was expected to
                with relay.lend(1, packed=False) as (staged, view):
                    assert blake3(view).digest() == staged.digest
                    found.append(bytes(view))
            return found

        first, second = await asyncio.to_thread(twice)
        assert first == second
        relay.close()
        with pytest.raises(TransferError, match="no longer serves"), relay.lend(1, packed=False):
            pass

    asyncio.run(main())
