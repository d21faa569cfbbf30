"""What an agent tells the client of its work, without hosts."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wheelmount.config import Settings
from wheelmount.errors import StoreError, TransferError
from wheelmount.mount.host.agent import Agent
from wheelmount.mount.serve.traffic import Traffic
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.store.store import Store
from wheelmount.mount.transfer.receiver import Receiver
from wheelmount.mount.transfer.topology import Route


class _Client:
    """As much of a delivery as a host reports to."""

    def __init__(self) -> None:
        self.name = "delivery"
        self.told: list[tuple[str, str, int]] = []
        self.actor = SimpleNamespace(arrived=self)

    def call_one(self, *arguments: Any) -> Any:
        self.told.append(arguments)
        return self

    def as_asyncio(self) -> Awaitable[None]:
        return asyncio.sleep(0)


def _reports(work: Callable[[_Client], str]) -> list[tuple[str, str, int]]:
    client = _Client()
    agent = SimpleNamespace(_host="host0", _settings=Settings(fetch_timeout=0.02))
    done: Any = Agent._at_work(agent, client, lambda: work(client))  # type: ignore[arg-type]
    assert asyncio.run(done) == "done"
    return client.told


def test_the_client_is_told_of_work_as_long_as_it_goes_on() -> None:
    def busy(client: _Client) -> str:
        deadline = time.monotonic() + 30
        while len(client.told) < 3 and time.monotonic() < deadline:
            pass
        return "done"

    told = _reports(busy)
    assert len(told) >= 3
    assert set(told) == {("delivery", "host0", 0)}


def test_the_client_is_not_told_of_work_that_a_disk_keeps_waiting() -> None:
    goes_on = threading.Event()
    silent: list[bool] = []

    def watch(client: _Client) -> None:
        deadline = time.monotonic() + 30
        while not silent and time.monotonic() < deadline:
            before = len(client.told)  # it may have been told of the beginning
            time.sleep(0.3)
            silent.extend([True] if len(client.told) == before else [])
        goes_on.set()

    def waits(client: _Client) -> str:
        threading.Thread(target=watch, args=(client,)).start()
        goes_on.wait()
        return "done"

    _reports(waits)
    assert silent


class _SlowWire:
    """A wire by which bytes come, and no whole block before the client was told twice."""

    def __init__(self) -> None:
        self.received = 0
        self.told: list[tuple[str, int]] = []

    async def read(self, *_: Any) -> Any:
        while len(self.told) < 2:
            self.received += 1
            await asyncio.sleep(0.01)
        raise StoreError("the rest does not matter")

    async def report(self, host: str, length: int) -> None:
        self.told.append((host, length))

    def rest(self) -> None: ...


def test_the_client_is_told_that_bytes_of_unfinished_blocks_arrive(
    source: Path, tmp_path: Path
) -> None:
    layout, wire = Layout(scan(os.fsencode(source)), 1 << 20), _SlowWire()
    store = Store.create(tmp_path / "store", layout.encode(), mounted=False)

    async def main() -> None:
        receiver = Receiver(
            "host0",
            store,
            wire,  # type: ignore[arg-type]
            Route(),
            in_flight=2,
            compress="never",
            timeout=0.05,
            traffic=Traffic(),
            tell=lambda *_: None,
        )
        with pytest.raises(TransferError, match="did not arrive"):
            await asyncio.wait_for(receiver.run(), 30)

    asyncio.run(main())
    assert wire.told[:2] == [("host0", 0)] * 2
