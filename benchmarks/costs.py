"""Seconds of a processor that the parts of a delivery take here: ``python -m benchmarks.costs``.

Each part is run by itself, by wheelmount's own code, and its process's own time is counted, so that
other work on the machine matters little: a source that is read into blocks, blocks over TCP on
loopback, blocks that are hashed and written to a store, calls of actors. The simulation of a
delivery (``tests.simulation.delivery``) is given them. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from blake3 import blake3
from monarch.actor import Actor, endpoint

from benchmarks.delivery import make
from benchmarks.trees import MIB
from tests.simulation.network import Costs
from wheelmount.hosts import runtime
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.source import Source
from wheelmount.mount.store.store import Store
from wheelmount.mount.transfer.ring import Staged
from wheelmount.mount.transfer.stream import BlockClient, BlockServer

BLOCK = 4 * MIB
SMALL, LARGE = 1, BLOCK
"""Bytes of blocks that are sent, to tell what a byte costs from what a block costs."""

COUNTS = {SMALL: 400, LARGE: 60}
SIZE = 96 * MIB
"""Bytes of the trees."""

CALLS = 400
TIMEOUT = 60.0


class Giver:
    """Lends one block, again and again."""

    def __init__(self, size: int) -> None:
        self._memory = memoryview(bytearray(os.urandom(size)))

    @contextlib.contextmanager
    def lend(
        self, _block: int, _packed: bool, _urgent: bool
    ) -> Iterator[tuple[Staged, memoryview]]:
        """Lend the block, whichever is asked for."""
        size = len(self._memory)
        yield Staged(0, size, size, bytes(32), ()), self._memory


class Called(Actor):  # type: ignore[misc]
    """Answers calls."""

    @endpoint
    def used(self) -> float:
        """Seconds of a processor of this process until now."""
        return time.process_time()

    @endpoint
    def take(self, data: bytes) -> int:
        """Take some bytes."""
        return len(data)


def measure(rounds: int) -> Costs:
    """Measure all, in turn in each round; medians."""
    found: dict[str, list[float]] = {}

    def note(costs: dict[str, float]) -> None:
        for name, seconds in costs.items():
            found.setdefault(name, []).append(seconds)

    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as place:
        for kind in ("file", "files"):
            make(Path(place) / kind, kind, SIZE)
        for _ in range(rounds):
            note(_source_and_store(Path(place)))
            note(_streams())
    note(_calls())
    return Costs(**{name: max(0.0, median(seconds)) for name, seconds in found.items()})


def _source_and_store(place: Path) -> dict[str, float]:
    """Blocks from a source to a store: a tree of one file, and one of many more."""
    taken = {}
    for kind in ("file", "files"):
        layout = Layout(scan(os.fsencode(place / kind)), BLOCK)
        source, memory = Source(os.fsencode(place / kind), layout), memoryview(bytearray(BLOCK))
        store = Store.create(place / "store", layout.encode(), mounted=False)
        fill = keep = 0.0
        for block in range(layout.blocks):
            view = memory[: layout.length(block)]
            began = time.thread_time()
            digest, _ = source.fill(block, view)
            filled = time.thread_time()
            if blake3(view).digest() != digest:
                raise SystemExit("wrong bytes were read")
            store.write(block, view, digest)
            fill, keep = fill + filled - began, keep + time.thread_time() - filled
        taken[kind] = fill, keep, layout.size, layout.tree.files
        shutil.rmtree(place / "store")
    fill, keep, size, _ = taken["file"]
    fills, keeps, sizes, files = taken["files"]
    return {
        "fill": fill / size,
        "keep": keep / size,
        "filled": (fills - fill * sizes / size) / files,
        "kept": (keeps - keep * sizes / size) / files,
    }


def _streams() -> dict[str, float]:
    """Blocks from one process to another, over TCP on loopback."""
    taken = {size: _stream(size) for size in COUNTS}
    (request, block), (sent, received) = taken[SMALL], taken[LARGE]
    return {
        "request": request,
        "block": block,
        "send": (sent - request) / LARGE,
        "receive": (received - block) / LARGE,
    }


def _stream(size: int) -> tuple[float, float]:
    """Seconds of the giver, and of the taker, for a block."""
    environment = {**os.environ, runtime.ADDRESS: "tcp://127.0.0.1:0"}
    command = [sys.executable, "-m", "benchmarks.costs", "--give", str(size)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as giver:
        asking, answering = typing.cast("Any", giver.stdin), typing.cast("Any", giver.stdout)
        ticket = pickle.loads(bytes.fromhex(answering.readline().decode()))  # noqa: S301
        memory, count = memoryview(bytearray(size)), COUNTS[size]

        async def take(number: int) -> None:
            client = BlockClient(TIMEOUT)
            for block in range(number):
                await client.read(ticket, block, False, False, memory, lambda _staged: None)
            client.close()

        def used() -> float:
            asking.write(b"\n")
            asking.flush()
            return float(answering.readline())

        asyncio.run(take(3))
        before, began = used(), time.process_time()
        asyncio.run(take(count))
        took = time.process_time() - began
        given = used() - before
        asking.close()
    return given / count, took / count


def _give(size: int) -> None:
    """Serve, and say at each line what that took."""
    server = BlockServer(Giver(size), TIMEOUT)
    print(pickle.dumps(server.ticket).hex(), flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


def _calls() -> dict[str, float]:
    """Calls of an actor on a local host."""
    from wheelmount import config
    from wheelmount.hosts.session import hosts_named
    from wheelmount.operations import pools
    from wheelmount.operations.site import Site
    from wheelmount.progress import SILENT

    settings = config.load()
    with (
        pools.hold(
            Site(hosts_named("local:1", settings), settings, SILENT), namespaces=False
        ) as held,
        runtime.quiet(),
    ):
        (host,) = held.pool.chosen
        actor: Any = host.mesh.spawn_procs({"procs": 1}).spawn("called", Called)
        runtime.one(actor.used.call_one(), TIMEOUT)
        before, began = runtime.one(actor.used.call_one(), TIMEOUT), time.process_time()
        for _ in range(CALLS):
            runtime.one(actor.take.call_one(b""), TIMEOUT)
        call = (time.process_time() - began) / CALLS
        answer = (runtime.one(actor.used.call_one(), TIMEOUT) - before) / CALLS
    runtime.stop()
    return {"call": call, "answer": answer}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.costs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write them to a file")
    parser.add_argument("--give", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.give:
        _give(given.give)
        return
    costs = asdict(measure(given.rounds))
    for name, seconds in costs.items():
        if name in ("fill", "send", "receive", "keep"):
            print(f"{name:8} {seconds * 1e9:8.3f} ns a byte")
        else:
            print(f"{name:8} {seconds * 1e6:8.1f} us each")
    if given.json:
        given.json.write_text(json.dumps(costs, indent=1))
    sys.stdout.flush()
    os._exit(0)  # what Monarch has left to say is of no interest


if __name__ == "__main__":
    main()
