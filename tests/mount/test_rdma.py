"""Blocks by RDMA: by which way they come, and which memory other machines can touch.

There is no device here. What stands in for one is named: ``Device`` does what Monarch's
``RDMABuffer`` does over verbs, and ``Sender`` has no actor around it. The real ones are used in
``tests/rdma/run.sh``.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from monarch.actor import ActorError

from wheelmount.errors import StoreError, TransferError, UnreachableError
from wheelmount.hosts import rdma
from wheelmount.hosts.address import Address
from wheelmount.hosts.sockets import Ticket
from wheelmount.mount.serve.traffic import MESSAGES, RDMA, TLS, Traffic, describe
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.source import Source
from wheelmount.mount.store.store import Store
from wheelmount.mount.transfer import rdma as transfer
from wheelmount.mount.transfer import registered, upstream
from wheelmount.mount.transfer.rdma import Offer, Origin, Ways
from wheelmount.mount.transfer.receiver import Receiver
from wheelmount.mount.transfer.registered import Pool
from wheelmount.mount.transfer.ring import Ring, Staged
from wheelmount.mount.transfer.stream import Pace
from wheelmount.mount.transfer.topology import SHARE, Route
from wheelmount.mount.transfer.upstream import Link, Upstream

REMOTE = Ticket(Address("tls", "10.9.0.2", 1), b"")
HERE = Ticket("@a socket of this machine", b"")
BLOCK = 4096


class Device:
    """In place of an ``RDMABuffer`` over verbs: answers for ever, and can be written to."""

    made: list[Device]
    limits: list[int]
    landing: memoryview
    failure: Exception | None
    while_read: Callable[[], None]
    took = 0.0

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.made.append(self)

    def size(self) -> int:
        return len(self.view)

    async def read_into(self, view: memoryview, *, timeout: int) -> None:
        assert 0 < timeout < 60, "Monarch's own bound is 60 s"
        self.limits.append(timeout)
        type(self).landing = view
        type(self).while_read()
        if self.failure is not None:
            raise self.failure
        view[: len(self.view)] = self.view

    async def drop(self) -> None:
        """What has the number of this memory can read it as before."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    """Have a device at both ends, and no memory registered."""
    pool = Pool()
    monkeypatch.setattr(rdma, "usable", lambda: True)
    monkeypatch.setattr(registered, "RDMABuffer", Device)
    monkeypatch.setattr(transfer, "pool", pool)
    monkeypatch.setattr(upstream, "pool", pool)
    monkeypatch.setattr(Device, "made", [], raising=False)
    monkeypatch.setattr(Device, "limits", [], raising=False)
    monkeypatch.setattr(Device, "failure", None, raising=False)
    monkeypatch.setattr(Device, "while_read", lambda: None, raising=False)
    return Device


class _Answer:
    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    async def as_asyncio(self) -> Any:
        try:
            answer = self._answer()
            return await answer if asyncio.iscoroutine(answer) else answer
        except Exception as error:
            raise ActorError(error) from None  # as Monarch does


class _Endpoint:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def call_one(self, _name: str, *arguments: Any) -> _Answer:
        return _Answer(functools.partial(self._call, *arguments))

    def broadcast(self, _name: str, *arguments: Any) -> None:
        self._call(*arguments)


class Sender:
    """In place of a ``SourceActor``: offers a directory's blocks, by a real ring."""

    def __init__(self, source: Path, ways: Ways, slots: int = 4) -> None:
        self.layout = Layout(scan(os.fsencode(source)), BLOCK)
        self.ring = Ring(Source(os.fsencode(source), self.layout), slots=slots, lease=10)
        self.offer = Offer(self.ring, 10)
        self.ways = _Endpoint(lambda: ways)
        self.stage = _Endpoint(self.offer.stage)
        self.release = _Endpoint(self.offer.release)
        self.arrived = _Endpoint(lambda *_: None)


class Receiving:
    """A real ``Upstream`` from such a sender, and what its blocks are compared with."""

    def __init__(self, sender: Sender, transport: str = "auto", timeout: float = 10) -> None:
        self.traffic = Traffic(certain=transport == RDMA)
        self.sender = sender
        key = sender.layout.key
        self.upstream = Upstream(key, Origin(sender, ""), {}, timeout, transport, self.traffic)

    async def read(self, block: int) -> str | None:
        """Fetch a block; return its way, or None if its hash is wrong."""
        memory = memoryview(bytearray(BLOCK))

        def keep(staged: Staged) -> bool:
            return blake3(memory[: staged.length]).digest() == staged.digest

        right, _, way = await self.upstream.read("", block, False, False, memory, keep)
        return way if right else None

    async def streams(self, *_arguments: Any) -> tuple[bool, Pace]:
        """In place of ``BlockClient.read``."""
        return True, Pace(0.0, self.took)

    took = 1e-9

    def stream(self, monkeypatch: pytest.MonkeyPatch, took: float) -> None:
        """Have streams of a speed."""
        self.took = took
        monkeypatch.setattr(self.upstream._client, "read", self.streams)


@pytest.mark.slow
def test_memory_is_registered_once_for_many_deliveries(source: Path, device: type[Device]) -> None:
    async def main() -> None:
        for _ in range(100):
            sender = Sender(source, Ways(None, True))
            received = Receiving(sender)
            assert [await received.read(n) for n in range(sender.layout.blocks)] == [
                RDMA
            ] * sender.layout.blocks
            sender.offer.close()
            await sender.offer.drop()
            sender.ring.close()

    asyncio.run(main())
    assert len(device.made) <= 4, "as many as there are slots"


def test_what_others_can_write_to_is_a_copy(source: Path, device: type[Device]) -> None:
    async def main() -> None:
        sender = Sender(source, Ways(None, True))
        received = Receiving(sender)

        def write() -> None:
            device.made[-1].view[:4] = b"evil"

        device.while_read = write
        assert await received.read(0) is None, "its hash tells"
        device.while_read = lambda: None
        assert await received.read(0) == RDMA, "the next reader has another copy"
        for slot in sender.ring.slots:
            assert b"evil" not in bytes(slot)

    asyncio.run(main())


def test_what_came_is_copied_before_its_hash_is_compared(
    source: Path, device: type[Device]
) -> None:
    async def main() -> None:
        received = Receiving(Sender(source, Ways(None, True)))
        memory = memoryview(bytearray(BLOCK))

        def keep(staged: Staged) -> bool:
            device.landing[:4] = b"evil"  # as another machine can, whenever it likes
            return blake3(memory[: staged.length]).digest() == staged.digest

        right, _, way = await received.upstream.read("", 0, False, False, memory, keep)
        assert (right, way) == (True, RDMA)

    asyncio.run(main())


def test_a_block_that_was_replaced_while_it_is_read_is_found_by_its_hash(
    source: Path, device: type[Device]
) -> None:
    async def main() -> None:
        sender = Sender(source, Ways(None, True), slots=1)
        received = Receiving(sender)
        inner = device.read_into

        async def replaced(self: Device, view: memoryview, *, timeout: int) -> None:
            sender.offer.release(0, False, 0)  # as if its lease were over
            staged = await sender.offer.stage(1, False)
            assert staged is not None
            await inner(self, view, timeout=timeout)

        device.read_into = replaced  # type: ignore[method-assign]
        try:
            assert await received.read(0) is None
        finally:
            device.read_into = inner  # type: ignore[method-assign]

    asyncio.run(main())


def test_auto_takes_what_is_faster(
    source: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ways(took: float) -> tuple[list[str | None], str]:
        received = Receiving(Sender(source, Ways(REMOTE, True)))
        received.stream(monkeypatch, took)
        found = [await received.read(n % 2) for n in range(8)]
        for way in found:
            received.traffic.note("", 1, str(way))
        return found, describe(received.traffic.summary() | {"devices": 1000})

    found, said = asyncio.run(ways(1000.0))
    assert (found[:4], found[4:]) == ([RDMA, TLS, RDMA, TLS], [RDMA] * 4)
    assert said == "rdma and tls"
    found, said = asyncio.run(ways(0.0))
    assert (found[:4], found[4:]) == ([RDMA, TLS, RDMA, TLS], [TLS] * 4)
    assert said.startswith("tls and rdma (no rdma from client: it took ")


def test_auto_goes_on_by_stream_where_rdma_fails(
    source: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        received = Receiving(Sender(source, Ways(REMOTE, True)))
        received.stream(monkeypatch, 1.0)
        device.failure = RuntimeError("ibv_reg_mr: Cannot allocate memory")
        assert [await received.read(n) for n in (0, 1, 0)] == [TLS] * 3
        said = describe(received.traffic.summary())
        assert "no rdma from client: it failed: ibv_reg_mr: Cannot allocate memory" in said

    asyncio.run(main())


def test_a_question_without_an_answer_ends_when_nothing_is_fetched_any_more(source: Path) -> None:
    async def main() -> None:
        sender = Sender(source, Ways(None, False))
        asked = asyncio.Event()

        async def silent() -> None:
            asked.set()
            await asyncio.sleep(600)

        sender.ways = _Endpoint(silent)
        received = Receiving(sender, timeout=600)
        read = asyncio.ensure_future(received.read(0))
        await asked.wait()
        received.upstream.close()
        with pytest.raises(TransferError, match="nothing is fetched any more"):
            await asyncio.wait_for(read, 30)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("transport", "ticket", "limit"),
    [("auto", REMOTE, 2), ("auto", None, 12), ("rdma", REMOTE, 12)],
)
def test_a_block_that_can_be_sent_by_stream_has_less_time_by_rdma(
    transport: str, ticket: Ticket | None, limit: int, source: Path, device: type[Device]
) -> None:
    async def main() -> None:
        received = Receiving(Sender(source, Ways(ticket, True)), transport, timeout=12)
        assert await received.read(0) == RDMA
        assert device.limits == [limit]

    asyncio.run(main())


def test_auto_goes_on_by_stream_where_no_memory_can_be_registered(
    source: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_view: memoryview) -> None:
        raise RuntimeError("ibv_reg_mr: Cannot allocate memory")

    monkeypatch.setattr(registered, "RDMABuffer", refuse)

    async def main() -> None:
        sender = Sender(source, Ways(REMOTE, True))
        await sender.offer.prepare()
        received = Receiving(sender)
        received.stream(monkeypatch, 1.0)
        assert await received.read(0) == TLS
        said = describe(received.traffic.summary())
        assert "memory was not registered: ibv_reg_mr: Cannot allocate memory" in said
        assert not any(slot.holders for slot in sender.ring._used.values()), "it is held"

    asyncio.run(main())


def test_a_store_that_is_full_says_nothing_of_rdma(
    source: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_staged: Staged) -> None:
        raise StoreError("no space")

    async def main() -> None:
        received = Receiving(Sender(source, Ways(REMOTE, True)))
        memory = memoryview(bytearray(BLOCK))
        with pytest.raises(StoreError):
            await received.upstream.read("", 0, False, False, memory, full)
        assert not received.traffic.summary()["reasons"]

    asyncio.run(main())


def test_a_peer_to_which_rdma_has_no_way_is_asked_no_more(
    source: Path, device: type[Device], tmp_path: Path
) -> None:
    async def main() -> None:
        client, peer = (Sender(source, Ways(None, True)) for _ in range(2))
        asked = []

        class Silent(Device):
            """In place of the memory of a machine that is gone."""

            failure = RuntimeError("retry counter exceeded")

        async def stage(block: int, packed: bool) -> tuple[Staged, Any] | None:
            asked.append(block)
            staged = await peer.offer.stage(block, packed)
            return None if staged is None else (staged[0], Silent(staged[1].view))

        peer.stage = _Endpoint(stage)
        layout, traffic = client.layout, Traffic(certain=True)
        assert layout.blocks > 4
        store = Store.create(tmp_path / "store", layout.encode(), mounted=False)
        told: list[tuple[int, str | None]] = []
        receiver = Receiver(
            "here",
            store,
            Upstream(layout.key, Origin(client, ""), {"peer": peer}, 10, RDMA, traffic),
            Route((("peer",),), {"peer": peer}),
            in_flight=1,
            compress="never",
            timeout=10,
            traffic=traffic,
            tell=lambda *block: told.append(block),
        )
        await receiver.run()
        assert not store.missing()
        assert sorted(told) == [(block, None) for block in range(layout.blocks)]
        assert len(asked) <= SHARE, "blocks after those in flight would wait as long"

    asyncio.run(main())


def test_a_search_of_local_files_that_fails_costs_no_block(
    source: Path, device: type[Device], tmp_path: Path
) -> None:
    def look() -> None:
        raise TypeError("a mount of another version")

    async def main() -> None:
        client, traffic = Sender(source, Ways(None, True)), Traffic(certain=True)
        layout = client.layout
        store = Store.create(tmp_path / "store", layout.encode(), mounted=False)
        receiver = Receiver(
            "here",
            store,
            Upstream(layout.key, Origin(client, ""), {}, 10, RDMA, traffic),
            Route(),
            in_flight=2,
            compress="never",
            timeout=10,
            traffic=traffic,
            tell=lambda *_: None,
            look=look,
        )
        await receiver.run()
        assert not store.missing()

    asyncio.run(main())


def test_rdma_alone_fails_rather_than_go_another_way(
    source: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        received = Receiving(Sender(source, Ways(REMOTE, True)), "rdma")
        received.stream(monkeypatch, 0.0)
        assert [await received.read(n % 2) for n in range(6)] == [RDMA] * 6
        device.failure = RuntimeError("no such device")
        with pytest.raises(UnreachableError, match="no such device"):
            await received.read(0)
        without = Receiving(Sender(source, Ways(REMOTE, False)), "rdma")
        with pytest.raises(TransferError, match="no RDMA device that Monarch takes"):
            await without.read(0)

    asyncio.run(main())


def test_a_stream_that_does_not_connect_leaves_messages(
    source: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        received = Receiving(Sender(source, Ways(REMOTE, False)))

        async def refused(*_arguments: Any) -> None:
            raise UnreachableError("no way there")

        monkeypatch.setattr(received.upstream._client, "read", refused)
        assert await received.read(0) == MESSAGES

    asyncio.run(main())


def test_devices_are_used_where_both_ends_have_one_and_the_setting_allows(
    device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(ways: Ways, transport: str) -> bool:
        return Link(ways, transport).device

    assert used(Ways(REMOTE, True), "auto")
    assert used(Ways(REMOTE, True), "rdma")
    assert not used(Ways(REMOTE, True), "tcp")
    assert not used(Ways(REMOTE, False), "auto"), "the other end has none"
    assert not used(Ways(HERE, True), "auto"), "it is the same machine"
    assert used(Ways(HERE, True), "rdma")
    monkeypatch.setattr(rdma, "usable", lambda: False)
    assert not used(Ways(REMOTE, True), "auto"), "this end has none"


def test_surplus_memory_is_given_up() -> None:
    async def main() -> None:
        pool = Pool(idle=2 * BLOCK)
        taken = [pool.take(BLOCK) for _ in range(3)]
        for each in taken:
            await pool.give(each)
        assert [pool.take(BLOCK) for _ in range(2)] == [taken[2], taken[1]]
        assert pool.take(BLOCK) not in taken
        await pool.give(taken[1])
        assert pool.take(2 * BLOCK) is not taken[1]

    asyncio.run(main())
