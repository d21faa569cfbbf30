"""One delivery after another to some hosts, with what may go wrong, all of it drawn from a seed."""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from blake3 import blake3

from tests.simulation.clock import Loop
from tests.simulation.network import Line, Network, Node, Slots
from wheelmount.errors import StoreError, WheelmountError
from wheelmount.mount.serve.traffic import CLIENT, Traffic
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.tree import Tree
from wheelmount.mount.transfer import relay
from wheelmount.mount.transfer.rdma import BlockInfo
from wheelmount.mount.transfer.receiver import Receiver
from wheelmount.mount.transfer.ring import STUCK_AFTER, Ring, Staged
from wheelmount.mount.transfer.topology import SMALL, routes

BLOCK = 4096
TIMEOUT = 5.0
SLOTS = 4

NOTICED = 4.0
"""Seconds until the client knows of a host that is dead, and tells the others."""

TOO_LONG = 20_000.0
"""Seconds that nothing may take here; a few hundred are usual."""


class BrokenError(AssertionError):
    """A property does not hold."""


@functools.cache
def _tree(blocks: int) -> Tree:
    """A real tree; what its files hold is made up below."""
    with tempfile.TemporaryDirectory() as place:
        for number in range(3):
            (Path(place) / f"file{number}").write_bytes(b"x" * (BLOCK * blocks // 3 + number))
        return scan(os.fsencode(place))


class Bytes:
    """What a layout holds."""

    def __init__(self, random: Random, blocks: int) -> None:
        self.layout = Layout(_tree(blocks), BLOCK)
        self.blocks = [random.randbytes(self.layout.length(b)) for b in range(self.layout.blocks)]
        self.digests = [blake3(block).digest() for block in self.blocks]


class MemoryStore:
    """What ``Receiver`` asks of a ``Store``, in memory; sees to it that only right bytes come."""

    def __init__(self, bytes_: Bytes, broken: list[str]) -> None:
        self.layout = bytes_.layout
        self._bytes = bytes_
        self._broken = broken
        self._have: dict[int, bytearray] = {}
        self.forgotten = False

    def missing(self) -> list[int]:
        return [block for block in range(self.layout.blocks) if block not in self._have]

    def has(self, block: int) -> bool:
        return block in self._have

    def write(self, block: int, data: memoryview, digest: bytes) -> None:
        if self.forgotten:
            raise StoreError("this generation was given up")
        if (bytes(data), digest) != (self._bytes.blocks[block], self._bytes.digests[block]):
            self._broken.append(f"wrong bytes of block {block} were to be shown")
        self._have[block] = bytearray(data)

    def read_block(self, block: int, view: memoryview) -> None:
        view[:] = self._have[block]

    def mark_changed(self, inode: int) -> None:
        self._broken.append(f"file {inode} did not change")

    def rot(self, random: Random) -> None:
        """Flip a byte of what is here."""
        if self._have:
            block = self._have[random.choice(sorted(self._have))]
            block[random.randrange(len(block))] ^= 1


class Client:
    """The client's end: its ring, over a source that may stall."""

    def __init__(self, bytes_: Bytes, readers: Callable[[int], int]) -> None:
        self.layout = bytes_.layout
        self._bytes = bytes_
        self.stalled = asyncio.Event()
        self.going = asyncio.Event()
        self.going.set()
        self._ring = Ring(self, slots=SLOTS, lease=30, readers=readers)

    def fill(self, block: int, view: memoryview) -> BlockInfo:
        view[:] = self._bytes.blocks[block]
        return self._bytes.digests[block], ()

    async def digest(self, block: int, *, urgent: bool = False) -> BlockInfo:
        del urgent  # all are, to the client
        await self.going.wait()
        return self._bytes.digests[block], ()

    @contextmanager
    def lend(self, block: int, packed: bool) -> Iterator[tuple[Staged, memoryview]]:
        with self._ring.lend(block, packed) as lent:
            yield lent


@dataclass
class Host:
    """One host: its node, and its end of the delivery that is on."""

    node: Node
    store: MemoryStore
    receiver: Receiver
    told: dict[int, list[str | None]] = field(default_factory=dict)


class World:
    """What a seed stands for.

    Args:
        seed: any number.
        verbose: print what happens.
    """

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.random = random = Random(seed)  # noqa: S311 - the same every time
        self._verbose = verbose
        self._calm = random.random() < 0.3
        count = random.choice((1, 2, 3, 4, 6, 9))
        self._blocks = random.choice((1, 3, 12, 30))
        self._fanout = random.choice((0, 0, 1, 2, 4))
        self._in_flight = random.choice((1, 2, 6))
        rate = random.choice((2_000, 50_000, 10_000_000))
        worse = 0.0 if self._calm else random.choice((0.0, 0.02, 0.1))
        self.network = Network(random, random.choice((0.0001, 0.05, 0.5)), worse, worse)
        self.names = [f"host{number}" for number in range(count)]
        for name in (CLIENT, *self.names):
            self.network.nodes[name] = Node(name, rate * random.choice((1, 1, 0.3)))
        self.faults: Counter[str] = Counter()
        self._hosts: dict[str, Host] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._own: set[asyncio.Task[Any] | None] = set()
        self._broken: list[str] = []

    def play(self) -> None:
        """Play it to its end.

        Raises:
            BrokenError: a property does not hold.
        """
        loop = Loop()
        try:
            loop.run_until_complete(self._bounded())
        finally:
            loop.close()
        if self._broken:
            raise BrokenError(self._broken[0])

    async def _bounded(self) -> None:
        self._own = {asyncio.current_task()}
        try:
            await asyncio.wait_for(self._play(), TOO_LONG)
        except asyncio.TimeoutError:
            raise BrokenError("it comes to no end") from None

    async def _play(self) -> None:
        for number in range(self.random.choice((1, 2, 3))):  # generations
            await self._deliver(number, give_up=not self._calm and self.random.random() < 0.3)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.sleep(2 * STUCK_AFTER * TIMEOUT)
        left = asyncio.all_tasks() - self._own - {asyncio.current_task()}
        if left:
            raise BrokenError(f"left behind: {left}")

    async def _deliver(self, number: int, *, give_up: bool) -> None:
        bytes_ = Bytes(self.random, self._blocks)
        key = bytes_.layout.key
        living = [name for name in self.names if not self.network.nodes[name].dead]
        if not living:
            return
        size = bytes_.layout.size
        direct = not self._fanout and size * len(living) <= SMALL
        fanout = self._fanout if not direct or self.random.random() < 0.3 else 4
        self._client = Client(bytes_, lambda _: 0)
        client = self.network.nodes[CLIENT]
        client.givers[key] = self._client
        client.slots[key] = Slots(min(SLOTS, bytes_.layout.blocks))
        client.sent = 0
        first = self._wanted(bytes_.layout.blocks)
        ways = routes(dict.fromkeys(living), size, fanout, first=first)
        self._hosts = {}
        for name in living:
            node = self.network.nodes[name]
            store = MemoryStore(bytes_, self._broken)
            told: dict[int, list[str | None]] = {}
            receiver = Receiver(
                name,
                store,  # type: ignore[arg-type]
                Line(self.network, node, key, TIMEOUT),
                ways[name],
                in_flight=self._in_flight,
                compress=self.random.choice(("never", "always")),
                timeout=TIMEOUT,
                traffic=Traffic(),
                tell=functools.partial(_tell, told),
            )
            await receiver.relay.ways()
            node.givers[key] = receiver.relay
            node.slots[key] = Slots(min(relay.STAGED_BLOCKS, bytes_.layout.blocks))
            self._hosts[name] = Host(node, store, receiver, told)
        self._say(f"generation {number}: {len(living)} hosts, {bytes_.layout.blocks} blocks")
        before = sum(self.faults.values()) + self.network.flips
        runs = {name: self._spawn(host.receiver.run()) for name, host in self._hosts.items()}
        going_wrong = self._spawn(self._go_wrong()) if not self._calm else None
        readers = [self._spawn(self._read()) for _ in range(self.random.choice((0, 1, 5)))]
        if give_up:
            await asyncio.sleep(self.random.choice((0.01, 1.0, 10.0)))
            self._give_up()
        await _all([*runs.values(), *readers])
        if going_wrong is not None:
            await going_wrong
        if not give_up:
            await self._repair(runs)
            egress = client.sent
            wrong = sum(self.faults.values()) + self.network.flips - before
            bound = size if self._calm and self.network.resets == 0 else None
            if bound is not None and wrong == 0 and not direct and egress > bound:
                raise BrokenError(f"the client sent {egress} bytes of {size}")
        self._give_up()
        for host in self._hosts.values():
            await host.receiver.stop()

    def _wanted(self, blocks: int) -> tuple[int, ...]:
        """Blocks that are to come first, in any order; some that do not exist."""
        named = self.random.sample(range(blocks + 3), self.random.randrange(blocks + 3))
        return tuple(named) if self.random.random() < 0.5 else ()

    def _give_up(self) -> None:
        """Abandon the generation, as an agent does."""
        for host in self._hosts.values():
            host.receiver.close()
            host.store.forgotten = True

    async def _repair(self, runs: dict[str, asyncio.Task[None]]) -> None:
        """Now that nothing more goes wrong, all that live must get everything."""
        self.network.corruption = self.network.resets = 0.0
        for name, host in self._hosts.items():
            if host.node.dead:
                continue
            error = runs[name].exception() if not runs[name].cancelled() else None
            if error is not None and not isinstance(error, WheelmountError):
                raise error
            if error is None and host.store.missing():
                raise BrokenError(f"{name} was content without blocks {host.store.missing()}")
            if error is None and not host.store.missing():
                continue
            self._say(f"{name} tries again: {error}")
            await host.receiver.run()
            if host.store.missing():
                raise BrokenError(f"{name} lacks blocks {host.store.missing()}")

    async def _read(self) -> None:
        """A reader waits for a block, as the serving process has it."""
        await asyncio.sleep(self.random.choice((0.0, 0.5, 5.0)))
        name = self.random.choice(sorted(self._hosts))
        host = self._hosts[name]
        block = self.random.randrange(host.store.layout.blocks)
        host.told[block] = []
        host.receiver.want(block)
        began = asyncio.get_running_loop().time()
        while not host.told[block]:
            await asyncio.sleep(0.1)
            if host.node.dead or host.store.forgotten:
                return
            if asyncio.get_running_loop().time() > began + STUCK_AFTER * TIMEOUT * 20:
                raise BrokenError(f"nobody told a reader of block {block} on {name}")
        if host.told[block][-1] is None and not host.store.has(block):
            raise BrokenError(f"a reader was told of block {block} that is not there")

    async def _go_wrong(self) -> None:
        """Let some things happen, one after another."""
        for _ in range(self.random.choice((0, 1, 2, 4))):
            await asyncio.sleep(self.random.choice((0.001, 0.3, 3.0)))
            kind = self.random.choice(("die", "cut", "stall", "rot"))
            name = self.random.choice(sorted(self._hosts))
            host = self._hosts[name]
            seconds = self.random.choice((1.0, 2 * TIMEOUT, 8 * TIMEOUT))
            self._say(f"{kind} {name} {seconds}")
            self.faults[kind] += 1
            if kind == "die" and not host.node.dead:
                host.node.dead = True
                host.receiver.close()
                self._background.add(self._spawn(self._notice(name)))
            elif kind == "cut":
                host.node.cut = True
                self._background.add(self._spawn(self._mend(host.node, seconds)))
            elif kind == "stall":
                self._client.going.clear()
                self._background.add(self._spawn(self._go_on(self._client, seconds)))
            elif kind == "rot":
                host.store.rot(self.random)
        while any(node.cut for node in self.network.nodes.values()):
            await asyncio.sleep(1)
        await self._client.going.wait()

    async def _notice(self, name: str) -> None:
        await asyncio.sleep(NOTICED)
        for host in self._hosts.values():
            host.receiver.avoid(name)

    async def _mend(self, node: Node, seconds: float) -> None:
        await asyncio.sleep(seconds)
        node.cut = False

    async def _go_on(self, client: Client, seconds: float) -> None:
        await asyncio.sleep(seconds)
        client.going.set()

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        return asyncio.ensure_future(work)

    def _say(self, text: str) -> None:
        if self._verbose:
            print(f"{asyncio.get_running_loop().time():9.3f} {text}")


def _tell(told: dict[int, list[str | None]], block: int, reason: str | None) -> None:
    if block in told:
        told[block].append(reason)


async def _all(tasks: list[Any]) -> None:
    """Wait for all; what is wrong with one of them is wrong with all."""
    done, _ = await asyncio.wait(tasks)
    for task in done:
        if not task.cancelled() and isinstance(task.exception(), BrokenError):
            raise task.exception()


def play(seed: int, *, verbose: bool = False) -> World:
    """Play what a seed stands for."""
    with mock.patch.object(relay, "block_server", lambda *_: None):  # no sockets here
        world = World(seed, verbose=verbose)
        world.play()
    return world
