"""Ways to read many pieces of another's memory: ``python -m benchmarks.rdma``.

Three by ``RDMABuffer``, and one without:

``naive``       pieces are registered for each transfer, and read one after the other
``contiguous``  pieces lie in one buffer that was registered once, and are read as one; the time to
                copy them there is counted
``scattered``   each is registered once, and one ``RDMAAction`` reads them all
``stream``      read from a socket, some at a time (``wheelmount.mount.transfer.stream``)

From one process to another of this machine, or from the first of the named hosts to the second,
again and again, as a mount does it block after block. Pieces are as small files (many, of 9 KiB)
and as blocks (few, of 4 MiB). All bytes are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from blake3 import blake3
from monarch.actor import Actor, endpoint
from monarch.rdma import RDMAAction, RDMABuffer

from wheelmount import config
from wheelmount.hosts import rdma, runtime
from wheelmount.hosts.session import hosts_named
from wheelmount.hosts.sockets import Ticket
from wheelmount.mount.transfer.ring import Staged
from wheelmount.mount.transfer.stream import BlockClient, BlockServer
from wheelmount.operations import pools
from wheelmount.operations.site import Site
from wheelmount.progress import SILENT

KINDS = {"small files": (256, 9 << 10), "blocks": (16, 4 << 20)}
"""Number of pieces, and bytes of each."""

WAYS = ("naive", "contiguous", "scattered", "stream")
TIMEOUT = 120
IN_FLIGHT = 6


class Giver(Actor):  # type: ignore[misc]
    """Has the pieces.

    Args:
        count: how many.
        size: bytes of each.
    """

    def __init__(self, count: int, size: int) -> None:
        self._pieces = [memoryview(bytearray(os.urandom(size))) for _ in range(count)]
        self._registered = [RDMABuffer(piece) for piece in self._pieces]
        self._whole = memoryview(mmap.mmap(-1, count * size))
        self._one = RDMABuffer(self._whole)
        self._block_server = BlockServer(self, TIMEOUT)

    @contextmanager
    def lend(self, block: int, _packed: bool, _urgent: bool) -> Iterator[tuple[Staged, memoryview]]:
        """A piece, as a block; see ``Lender``."""
        piece = self._pieces[block]
        yield Staged(0, len(piece), len(piece), b"", ()), piece

    @endpoint
    def digest(self) -> bytes:
        """The hash of all pieces."""
        return blake3(b"".join(self._pieces)).digest()

    @endpoint
    def naive(self) -> list[Any]:
        """Every piece, registered anew."""
        return [RDMABuffer(piece) for piece in self._pieces]

    @endpoint
    def contiguous(self) -> list[Any]:
        """All pieces, copied into one."""
        end = 0
        for piece in self._pieces:
            self._whole[end : end + len(piece)] = piece
            end += len(piece)
        return [self._one]

    @endpoint
    def scattered(self) -> list[Any]:
        """Every piece, registered long ago."""
        return self._registered

    @endpoint
    def stream(self) -> list[Any]:
        """By what all pieces are read."""
        return [self._block_server.ticket]


class Taker(Actor):  # type: ignore[misc]
    """Reads them; arguments as of ``Giver``."""

    def __init__(self, giver: Any, count: int, size: int) -> None:
        self._giver = giver
        self._whole = memoryview(mmap.mmap(-1, count * size))
        self._pieces = [self._whole[n * size : (n + 1) * size] for n in range(count)]
        self._plan: RDMAAction | None = None
        self._client = BlockClient(TIMEOUT)

    @endpoint
    def take(self, way: str) -> float:
        """Seconds until all bytes are here."""
        start = time.perf_counter()
        if way == "scattered" and self._plan is not None:
            self._plan.submit(timeout=TIMEOUT).get()
            return time.perf_counter() - start
        buffers = getattr(self._giver, way).call_one().get()
        if way == "scattered":
            self._plan = RDMAAction()
            for buffer, piece in zip(buffers, self._pieces, strict=True):
                self._plan.read_remote(piece, buffer)
            self._plan.submit(timeout=TIMEOUT).get()
        elif way == "contiguous":
            buffers[0].read_into(self._whole, timeout=TIMEOUT).get()
        elif way == "stream":
            asyncio.run(self._stream(buffers[0]))
        else:
            for buffer, piece in zip(buffers, self._pieces, strict=True):
                buffer.read_into(piece, timeout=TIMEOUT).get()
        return time.perf_counter() - start

    @endpoint
    def digest(self) -> bytes:
        """The hash of what was read; it is forgotten."""
        found = blake3(self._whole).digest()
        self._whole[:] = bytes(len(self._whole))
        return found

    async def _stream(self, ticket: Ticket) -> None:
        queue = iter(enumerate(self._pieces))

        async def work() -> None:
            for number, piece in queue:
                await self._client.read(ticket, number, False, False, piece, lambda _staged: None)

        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.rdma")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pieces", type=int, default=256, help="most of a kind (%(default)s)")
    parser.add_argument("--hosts", default="local:2", help="two, as of wheelmount's --hosts")
    given = parser.parse_args()
    settings = config.load()
    spec = hosts_named(given.hosts, settings)
    with pools.hold(Site(spec, settings, SILENT), namespaces=False) as held, runtime.quiet():
        first, second = (host.mesh.spawn_procs({"procs": 1}) for host in held.pool.chosen)
        print(f"RDMA devices of this machine: {rdma.devices() or 'none'}")
        for number, (kind, (most, size)) in enumerate(KINDS.items()):
            count = min(most, given.pieces)
            giver = first.spawn(f"giver{number}", Giver, count, size)
            taker = second.spawn(f"taker{number}", Taker, giver, count, size)
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            digest = runtime.one(giver.digest.call_one(), TIMEOUT)
            for way in WAYS:
                for _ in range(given.rounds + 1):
                    found[way].append(runtime.one(taker.take.call_one(way), TIMEOUT))
                    if runtime.one(taker.digest.call_one(), TIMEOUT) != digest:
                        raise SystemExit(f"{kind}: {way} read wrong bytes")
            print(f"\n{kind}: {count} of {size >> 10} KiB")
            for way, seconds in found.items():
                took = median(seconds[1:])  # the first makes the connection
                print(f"  {way:11} {took * 1e3:8.1f} ms {count * size / took / 2**20:7.0f} MiB/s")
    runtime.stop()


if __name__ == "__main__":
    main()
