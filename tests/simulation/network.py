"""A simulated network: links, switches and processors, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar

from wheelmount.errors import TransferError
from wheelmount.mount.serve.traffic import CLIENT, TCP
from wheelmount.mount.transfer.rdma import BlockInfo
from wheelmount.mount.transfer.ring import STUCK_AFTER, BlockKey, Parts, Staged
from wheelmount.mount.transfer.stream import PULSE, Pace

Result = TypeVar("Result")

CHUNK = 1024
"""Bytes that a link carries at once, unless said otherwise; those of several transfers go by
turns."""

SEGMENT = 1448
"""Bytes of a file in a segment of TCP, in an Ethernet frame of ``FRAME`` bytes."""

FRAME = 1514


@dataclass(frozen=True)
class Costs:
    """Seconds of a processor that work takes; 0 for what is not to count.

    Attributes:
        call: for the client, of a call to an actor and its answer.
        answer: for the actor.
        request: of a block that is sent, whatever its size.
        block: of a block that is received, whatever its size.
        fill: of a byte that is read from the source, and hashed.
        send: of a byte that is sent.
        receive: of a byte that is received.
        keep: of a byte that is hashed, and written to the store.
        filled: of a file in a block that is filled.
        kept: of a file in a block that is kept.
    """

    call: float = 0.0
    answer: float = 0.0
    request: float = 0.0
    block: float = 0.0
    fill: float = 0.0
    send: float = 0.0
    receive: float = 0.0
    keep: float = 0.0
    filled: float = 0.0
    kept: float = 0.0


class Giver(Protocol):
    """What a node gives: a relay, or the client's ring."""

    async def digest(self, block: int, *, urgent: bool = False) -> BlockInfo: ...

    def lend(
        self, block: int, packed: bool
    ) -> AbstractContextManager[tuple[Staged, memoryview]]: ...


class Link:
    """One direction of a link.

    Args:
        rate: bytes a second.
        burst: bytes that it carries at once after a rest.

    Attributes:
        carried: bytes until now.
    """

    def __init__(self, rate: float, burst: float = 0.0) -> None:
        self.rate = rate
        self.carried = 0.0
        self._lead = burst / rate
        self._free = -math.inf

    def book(self, now: float, size: float) -> float:
        """Return when it will have carried so many bytes more."""
        self.carried += size
        self._free = max(now - self._lead, self._free) + size / self.rate
        return max(now, self._free)


class Processors:
    """Processors of one machine; each task goes to the one that is free first.

    Attributes:
        used: seconds of all together.
    """

    def __init__(self, count: int) -> None:
        self.used = 0.0
        self._free = [0.0] * count

    def book(self, now: float, seconds: float) -> float:
        """Return when so much more work will be done."""
        if not seconds:
            return now
        self.used += seconds
        done = max(now, self._free[0]) + seconds
        heapq.heapreplace(self._free, done)
        return done


class Node:
    """One end of the network.

    Args:
        name: of the host, or ``CLIENT``.
        rate: of its link in each direction, bytes a second.
        machine: its processors; they cost nothing if there are none.
        burst: see ``Link``.

    Attributes:
        givers: by key of a layout.
        slots: blocks that it can lend at the same time, by key of a layout.
        dead: it has ended.
        cut: nothing comes from it or goes to it.
        sent: bytes that left it.
        filled: the block that it lent last was read for that.
    """

    def __init__(
        self, name: str, rate: float, machine: Processors | None = None, burst: float = 0.0
    ) -> None:
        self.name = name
        self.up, self.down = Link(rate, burst), Link(rate, burst)
        self.machine = machine or Processors(1)
        self.givers: dict[Any, Giver] = {}
        self.slots: dict[Any, Slots] = {}
        self.dead = self.cut = False
        self.filled = False
        self.sent = 0
        self._interpreter = Processors(1)  # Python code of one process runs on one at a time

    @property
    def silent(self) -> bool:
        return self.dead or self.cut

    def interpret(self, now: float, seconds: float) -> float:
        """Return when so many seconds of Python code will have been run."""
        return max(self._interpreter.book(now, seconds), self.machine.book(now, seconds))


class Slots:
    """The slots of a ring, which lends at most so many blocks at once; further ones wait.

    A ring itself would have the thread wait, and a simulation has but one.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lent: Counter[BlockKey] = Counter()
        self._waiting: list[Callable[[], None]] = []

    def take(self, key: BlockKey) -> bool:
        """Hold a block of a ring until ``free``; return False if there is no room."""
        if len(self._lent) >= self._count and key not in self._lent:
            return False
        self._lent[key] += 1
        return True

    def wake(self, when_free: Callable[[], None]) -> None:
        """Have a function called when there is room again."""
        self._waiting.append(when_free)

    def free(self, key: BlockKey) -> None:
        self._lent[key] -= 1
        if not self._lent[key]:
            del self._lent[key]
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each()


class Network:
    """All nodes, and what goes wrong between them.

    Args:
        random: of the seed.
        latency: seconds of each way.
        corruption: part of the transfers in which a byte flips.
        resets: part of the transfers that end in the middle.
        loss: part of the segments that are lost; one transfer is at most as fast as TCP then is
            (Mathis and others, 1997).
        framed: bytes on the wire for each byte of a block; see ``FRAME``.
        costs: of work on a node.

    Attributes:
        racks: by node, what connects its rack to others; nothing for nodes of one switch.
        calls: calls of actors.
    """

    def __init__(
        self,
        random: Random,
        latency: float,
        corruption: float = 0.0,
        resets: float = 0.0,
        *,
        loss: float = 0.0,
        framed: float = 1.0,
        costs: Costs | None = None,
    ) -> None:
        self.random = random
        self.latency, self.corruption, self.resets = latency, corruption, resets
        self.costs = costs or Costs()
        self.framed = framed
        self.most = math.inf
        if loss:
            self.most = SEGMENT / (2 * latency) * math.sqrt(1.5 / loss)
        self.nodes: dict[str, Node] = {}
        self.racks: dict[str, tuple[Link, Link]] = {}
        self.flips = self.calls = 0

    def path(self, giver: Node, taker: Node) -> tuple[Link, ...]:
        """Return what bytes pass on their way from one node to another."""
        above, below = self.racks.get(giver.name), self.racks.get(taker.name)
        if above is below or above is None or below is None:
            return giver.up, taker.down
        return giver.up, above[0], below[1], taker.down


class Line:
    """The wire of one host for one layout; see ``Wire``.

    Args:
        network: that it belongs to.
        node: the host.
        key: of the layout.
        timeout: seconds within which another node must answer.
        scale: bytes on the wire for each byte that is really copied.
        files: in each block.
        chunks: pieces of which a block is carried; default pieces of ``CHUNK`` bytes.
    """

    def __init__(
        self,
        network: Network,
        node: Node,
        key: Any,
        timeout: float,
        *,
        scale: float = 1.0,
        files: float = 0.0,
        chunks: int = 0,
    ) -> None:
        self._network, self._node, self._key, self._timeout = network, node, key, timeout
        self._scale, self._files, self._chunks = scale, files, chunks
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._met: set[Node] = set()
        self._waits: set[asyncio.Future[None]] = set()
        self._closed = False
        self.received = 0

    async def digest(self, host: str, block: int) -> BlockInfo:
        """Ask a host for hash and changed files of a block."""
        other = self._network.nodes[host]
        await self._travel(other)
        said: BlockInfo = await self._hear(other, self._giver(other).digest(block))
        await self._travel(other)
        return said

    async def read(
        self,
        host: str,
        block: int,
        packed: bool,
        urgent: bool,
        memory: memoryview,
        then: Callable[[Staged], Result],
    ) -> tuple[Result, Pace, str]:
        """Fetch a block, and process it at once."""
        network, costs = self._network, self._network.costs
        other = network.nodes[host]
        if other not in self._met:
            self._met.add(other)
            await self._call(other)
        await self._travel(other)
        giver, asked = self._giver(other), self._clock()
        await self._until(other.interpret(asked, costs.request))
        await self._hear(other, giver.digest(block, urgent=urgent))
        slots = other.slots.get(self._key)
        while slots is not None and not slots.take((block, packed)):
            turn = self._turn()
            slots.wake(functools.partial(_end, turn))
            await self._wait(turn)
        try:
            with giver.lend(block, packed) as (staged, view):
                size = staged.size * self._scale
                other.sent += round(size)
                await self._fill(other, size)
                waited = self._clock() - asked
                await self._travel(other)
                began = self._clock()
                await self._carry(other, size)
                memory[: len(view)] = view
        finally:
            if slots is not None:
                slots.free((block, packed))
        pace = Pace(waited, self._clock() - began)
        if network.random.random() < network.corruption:
            network.flips += 1
            memory[network.random.randrange(staged.size)] ^= 1 << network.random.randrange(8)
        await self._work(self._node, costs.block + costs.kept * self._files, costs.keep * size)
        return then(staged), pace, TCP

    async def parts(self, host: str, block: int, parts: list[tuple[int, int]]) -> Parts:
        """Refuse: no host has bytes of another mount."""
        raise NotImplementedError

    async def report(self, host: str, length: int) -> None:
        """Call the client."""
        del host, length
        with contextlib.suppress(TransferError):  # it goes on when a line is closed
            await self._call(self._network.nodes[CLIENT])

    def rest(self) -> None:
        """Do nothing: a simulated network has no idle connections."""

    def close(self) -> None:
        """Fail all calls in progress, and later ones."""
        self._closed = True
        for waiting in self._waits:
            _fail(waiting, TransferError("nothing is fetched any more"))

    def _giver(self, other: Node) -> Giver:
        if self._key not in other.givers:
            raise TransferError("it has nothing of that")
        return other.givers[self._key]

    async def _call(self, other: Node) -> None:
        """Call an actor, and wait for its answer."""
        self._network.calls += 1
        await self._travel(other)
        await self._work(other, self._network.costs.answer)
        await self._travel(other)

    async def _fill(self, other: Node, size: float) -> None:
        """Wait for what a giver read to lend it."""
        costs, filled = self._network.costs, other.filled
        other.filled = False
        if filled:
            await self._work(other, costs.filled * self._files, costs.fill * size)

    async def _work(self, node: Node, python: float, seconds: float = 0.0) -> None:
        """Wait for work on a node: of the interpreter, and beside it."""
        if python or seconds:
            now = self._clock()
            await self._until(max(node.interpret(now, python), node.machine.book(now, seconds)))

    async def _travel(self, other: Node) -> None:
        await self._until(
            self._clock() + self._network.latency * self._network.random.uniform(0.5, 2)
        )
        if other.silent or self._node.silent:
            await self._wait_for_a_way(other)

    async def _carry(self, other: Node, size: float) -> None:
        """Wait until the bytes of a block have come."""
        network = self._network
        chunk = size / self._chunks if self._chunks else CHUNK
        reset_at = size / 2 if network.random.random() < network.resets else math.inf
        path = network.path(other, self._node)
        done = self._turn()

        def carried(by: float) -> None:
            """Carry the next chunk; ``by`` bytes have come."""
            if done.done():
                return
            now = self._clock()
            if other.silent or self._node.silent:
                self._resume(other, now + self._timeout, done, lambda: carried(by))
            elif by >= reset_at:
                _fail(done, TransferError("the connection was reset"))
            elif by >= size:
                _end(done)
            else:
                piece = min(chunk, size - by)
                when = max(
                    now + piece / network.most,
                    *(link.book(now, piece * network.framed) for link in path),
                    other.machine.book(now, piece * network.costs.send),
                    self._node.machine.book(now, piece * network.costs.receive),
                )
                self.received += 1
                self._loop.call_at(when, carried, by + piece)

        carried(0.0)
        await self._wait(done)

    def _resume(
        self, other: Node, deadline: float, done: asyncio.Future[None], go_on: Callable[[], None]
    ) -> None:
        """Go on when nothing is in the way; what comes within a time-out was only late."""
        if done.done():
            return
        if not (other.silent or self._node.silent):
            go_on()
        elif self._clock() >= deadline:
            _fail(done, TimeoutError(f"nothing came from {other.name}"))
        else:
            later = self._timeout / 8
            self._loop.call_later(later, self._resume, other, deadline, done, go_on)

    async def _wait_for_a_way(self, other: Node) -> None:
        done = self._turn()
        deadline = self._clock() + self._timeout
        self._resume(other, deadline, done, functools.partial(_end, done))
        await self._wait(done)

    async def _hear(self, other: Node, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for what another node does, as long as it says that it waits itself."""
        task = asyncio.ensure_future(work)  # which goes on if whoever asked is gone
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        for _ in range(round(STUCK_AFTER / PULSE)):
            turn = self._turn()
            end = functools.partial(_end, turn)
            task.add_done_callback(end)
            pulse = self._loop.call_later(PULSE * self._timeout, end)
            try:
                await self._wait(turn)
            finally:
                pulse.cancel()
                task.remove_done_callback(end)
            if other.silent or self._node.silent:
                await self._wait_for_a_way(other)
            if task.done():
                return task.result()
        raise TimeoutError(f"{other.name} says nothing any more")

    def _turn(self) -> asyncio.Future[None]:
        return self._loop.create_future()

    async def _until(self, when: float) -> None:
        if when > self._clock():
            turn = self._turn()
            self._loop.call_at(when, _end, turn)
            await self._wait(turn)

    async def _wait(self, waiting: asyncio.Future[None]) -> None:
        """Wait, unless the line is closed."""
        if self._closed:
            raise TransferError("nothing is fetched any more")
        self._waits.add(waiting)
        try:
            await waiting
        finally:
            self._waits.discard(waiting)


def _end(waiting: asyncio.Future[None], _task: object = None) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _fail(waiting: asyncio.Future[None], error: Exception) -> None:
    if not waiting.done():
        waiting.set_exception(error)
