"""A mount's agent on a host: an actor in its own process that mounts and receives the bytes.

Another process serves the mount (``server``), because a process that serves a mount must never
use it, and Monarch's processes end with the client, which the mount may outlive.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from wheelmount import linux
from wheelmount.config import MEMORY, Settings
from wheelmount.errors import MountError, StoreError, WheelmountError
from wheelmount.hosts import handshake, process, runtime
from wheelmount.hosts.actor import Actor, concurrent_endpoint
from wheelmount.mount.host.reattach import Adopted
from wheelmount.mount.kernel import points
from wheelmount.mount.kernel.points import View
from wheelmount.mount.serve import control, processes
from wheelmount.mount.serve.adapters import choose
from wheelmount.mount.serve.control import Task
from wheelmount.mount.serve.traffic import RDMA, Traffic
from wheelmount.mount.snapshot.source import file_digest
from wheelmount.mount.store import store as stores
from wheelmount.mount.store import verify
from wheelmount.mount.store.kept import Kept
from wheelmount.mount.store.store import ReblockedStore, Store
from wheelmount.mount.store.verify import Damage, Verified
from wheelmount.mount.transfer import dedup, ring
from wheelmount.mount.transfer.rdma import BlockInfo, LayoutKey, Origin, Ways, fetch_description
from wheelmount.mount.transfer.receiver import Receiver
from wheelmount.mount.transfer.relay import Relay
from wheelmount.mount.transfer.ring import Staged
from wheelmount.mount.transfer.topology import Route
from wheelmount.mount.transfer.upstream import Upstream

T = TypeVar("T")

Parts = list[Any]
"""Parts of files that were read, as ``Trace.end`` returns them."""

POLL_INTERVAL = 0.5
"""Seconds between checks whether a mount is still a process's working directory."""


@dataclass(frozen=True, slots=True)
class Order:
    """A mount to be made.

    Attributes:
        source: the client's directory, to be shown in ``status``.
        mntpoint: absolute path on the host.
        cover: whether a directory that is not empty may be covered.
        keep: whether the mount stays, with the bytes that have arrived, when the client is gone.
    """

    source: str
    mntpoint: str
    cover: bool
    keep: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """A generation that is being made, or that waits to be shown.

    Attributes:
        store: the generation.
        lock: holds the store's lock until the generation is shown or abandoned.
    """

    store: Store
    lock: contextlib.ExitStack


class Agent(Actor):
    """Works for one mount on one host, on behalf of the client.

    Args:
        host: the host's name.
        settings: the client's settings, by name; directories in them are the host's.
        identity: name of a new or an existing mount, unique on the machine.
    """

    def __init__(self, host: str, settings: Mapping[str, Any], identity: str) -> None:
        process.settle()
        runtime.find_address()
        self._host = host
        self._settings = Settings(**settings)
        runtime.restrict(self._settings.transport)
        self._directory = processes.directory(self._settings) / identity
        self._link = Link(self._directory)
        self._store: Store | None = None
        self._next: Prepared | None = None
        self._receiver: Receiver | None = None
        self._receivers: dict[LayoutKey, Receiver] = {}  # also of the generation that is being made
        self._traffic: Traffic | None = None
        self._received = asyncio.Condition()
        self._origin: Origin | None = None  # of the present delivery
        # Of the present receiver: a client asks again where it heard nothing for long.
        self._delivering = asyncio.Lock()
        self._moving: asyncio.Task[None] | None = None
        self._stopping = False  # whether the serving process is asked to unmount
        self._verified: Verified | None = None
        self._traced = False  # whether the client is still to be told what was read

    @concurrent_endpoint
    async def versions(self) -> dict[str, str]:
        """Return what ``Handshake.versions`` does, without one more actor on each host."""
        return dict(handshake.here())

    @concurrent_endpoint
    async def view(self) -> View:
        """Return which file systems this host sees, to compare hosts."""
        return View.here(str(self._settings.private_runtime()))

    @concurrent_endpoint
    async def open(self, order: Order, source: Origin, route: Route) -> None:
        """Mount, with all names and before any bytes."""
        points.available()
        self._link.kept = order.keep
        settings = self._settings
        adapter = choose(settings.adapter)
        if self._directory.exists():  # left by an agent that was lost
            await asyncio.to_thread(processes.stop, self._directory, force=True)
        mntpoint = points.resolve(order.mntpoint)
        await asyncio.to_thread(processes.clear, settings, mntpoint)
        own = settings.store == MEMORY and linux.may_mount()
        store = settings.private_store(mounted=own) / self._directory.name
        description = await fetch_description(source, settings.fetch_timeout)
        made = points.prepare(mntpoint, cover=order.cover)  # last: it is to be taken back
        task = Task(
            self._host,
            order.source,
            mntpoint,
            str(store),
            adapter,
            settings.read_timeout,
            made,
            settings.verify_rate * 1e6,
        )
        try:
            with processes.making(self._directory):
                task.write(self._directory)
                self._store = await asyncio.to_thread(
                    Store.create, store, description, mounted=own, set_attributes=self._binds
                )
                self._receiver = await self._receive(self._store, source, route)
                await asyncio.to_thread(processes.start, self._directory, settings.start_timeout)
                await self._link.open(self._receiver.want)
        except BaseException:
            await asyncio.to_thread(processes.stop, self._directory, force=True)
            processes.discard(self._directory, store, mntpoint if made else None)
            raise

    async def _receive(
        self,
        store: Store | ReblockedStore,
        source: Origin,
        route: Route,
        earlier: Store | None = None,
    ) -> Receiver:
        settings = self._settings
        look = kept = None
        if isinstance(store, Store):
            kept = await asyncio.to_thread(Kept.open, settings)
            look = functools.partial(dedup.find, settings, self._directory, store, kept, earlier)
        key, timeout = store.layout.key, settings.fetch_timeout
        traffic = Traffic(certain=settings.transport == RDMA)
        receiver = Receiver(
            self._host,
            store,
            Upstream(key, source, route.peers, timeout, settings.transport, traffic),
            route,
            in_flight=settings.in_flight,
            processors=len(os.sched_getaffinity(0)),
            compress=settings.compress,
            timeout=timeout,
            traffic=traffic,
            tell=self._link.tell,
            look=look,
            kept=kept,
        )
        if isinstance(store, Store):
            self._traffic = receiver.traffic
            self._origin = source
        async with self._received:
            if before := self._receivers.get(key):
                before.close()
            self._receivers[key] = receiver
            self._received.notify_all()
        return receiver

    async def _relay(self, key: LayoutKey) -> Relay:
        """Return the relay of a tree; waits for it, as another host may hear of the tree sooner."""
        async with self._received:
            await asyncio.wait_for(
                self._received.wait_for(lambda: key in self._receivers),
                self._settings.fetch_timeout,
            )
        return self._receivers[key].relay

    @concurrent_endpoint
    async def ways(self, key: LayoutKey) -> Ways:
        """Return the ways for another host to fetch blocks of a tree from this one."""
        return await (await self._relay(key)).ways()

    @concurrent_endpoint
    async def digest(self, key: LayoutKey, block: int) -> BlockInfo | None:
        """Return hash and changed files of a block; None: not known yet, ask again."""
        return await (await self._relay(key)).say(block)

    @concurrent_endpoint
    async def parts(
        self, key: LayoutKey, block: int, parts: list[tuple[int, int]]
    ) -> ring.Parts | None:
        """Return hash, changed files and some bytes of a block; None: not known yet, ask again."""
        return await (await self._relay(key)).parts(block, parts)

    @concurrent_endpoint
    async def stage(self, key: LayoutKey, block: int, packed: bool) -> tuple[Staged, Any] | None:
        """Stage a block for another host until ``release``; None: not ready, ask again."""
        return await (await self._relay(key)).stage(block, packed)

    @concurrent_endpoint
    async def release(self, key: LayoutKey, block: int, packed: bool, sent: int) -> None:
        """Release a block that ``stage`` returned."""
        if receiver := self._receivers.get(key):
            receiver.relay.release(block, packed, sent)

    @concurrent_endpoint
    async def avoid(self, host: str) -> None:
        """Note that a host is lost or slow, so that nothing waits for it."""
        for receiver in self._receivers.values():
            receiver.avoid(host)

    @concurrent_endpoint
    async def deliver(self, traced: bool = False) -> Parts:
        """Fetch all bytes; return when they are there and shown in the final way.

        Args:
            traced: whether to return what was read meanwhile; if this fails, ``close`` does.
        """
        async with self._delivering:
            store, receiver = self._shown, self._receiver
            if receiver is None or store.finished:  # it had arrived before
                return []
            self._traced = traced
            await receiver.run()
            reads = await self._reads()
            receiver.traffic.write(self._directory)
            try:
                await self._at_work(self._origin, store.finish)
                if self._binds and store.bindable and not await self._show(store):
                    self._moving = asyncio.create_task(self._show_later(store))
            except FileNotFoundError:  # it was taken down meanwhile
                raise MountError("the mount is gone") from None
            return reads

    async def _at_work(self, origin: Origin | None, work: Callable[[], T]) -> T:
        """Run work on many files in a thread, and tell the client of it as long as it goes on.

        A thread that waits for a disk that hangs takes no time of a processor.
        """
        clock = linux.ThreadClock()
        task = asyncio.ensure_future(asyncio.to_thread(clock.run, work))
        timeout, spent = self._settings.fetch_timeout / 2, 0.0
        while not (await asyncio.wait({task}, timeout=timeout))[0]:
            before, spent = spent, clock.seconds()
            if origin is not None and spent > before:
                with contextlib.suppress(WheelmountError):  # only its patience depends on it
                    call = origin.actor.arrived.call_one(origin.name, self._host, 0)
                    await runtime.answer(call, timeout)
        return task.result()

    async def _reads(self) -> Parts:
        """Return what was read in the mount, once, if the client is to know."""
        traced, self._traced = self._traced, False
        if traced:
            with contextlib.suppress(MountError):  # it costs the next delivery time only
                return await asyncio.to_thread(processes.reads, self._directory)
        return []

    async def _show(self, store: Store) -> bool:
        """Show the store's own files by a bind mount, where possible; return whether they are."""
        await asyncio.to_thread(processes.show, self._directory, store.generation)
        status = await asyncio.to_thread(processes.status, self._directory)
        return bool(status["adapter"] == "bind")

    async def _show_later(self, store: Store) -> None:
        with contextlib.suppress(MountError):  # it stays as it is, or is gone
            while self._store is store:
                await asyncio.sleep(POLL_INTERVAL)
                if not self._stopping and await self._show(store):
                    return

    @property
    def _binds(self) -> bool:
        """Whether the mount ends as a bind mount of the store's own files."""
        return Task.read(self._directory).adapter == "bind"

    @concurrent_endpoint
    async def adopt(self) -> Adopted:
        """Take over an existing mount."""
        return await asyncio.to_thread(self._adopt)

    def _adopt(self) -> Adopted:
        task = self._task()
        generation = None
        with contextlib.suppress(MountError):  # its files are there all the same
            generation = processes.status(self._directory)["generation"]
        store = Store.open(Path(task.store), generation)
        if self._store is not None and self._store.generation == store.generation:
            store = self._store  # with its tree, if this host was asked before
        self._store = store
        changed = store.changed_numbers()
        length = store.description.stat().st_size
        cut = store.layout.block_size
        return Adopted(store.layout.identity, length, changed, store.finished, cut, task.mntpoint)

    @concurrent_endpoint
    async def resume(self, source: Origin, route: Route, block_size: int) -> None:
        """Prepare to fetch bytes that were missing when the client ended, and to pass blocks on.

        Where all had arrived, but names or attributes are missing, ``deliver`` adds these.
        """
        store = self._shown
        self._link.kept = True
        if store.finished:
            self._receiver = None
            await self._give(source, block_size)
            return
        for receiver in self._receivers.values():  # if this process began with that client
            receiver.close()
        await self._link.close()
        await asyncio.to_thread(store.resume, set_attributes=self._binds)
        self._receiver = await self._receive(store, source, route)
        self._delivering = asyncio.Lock()
        await self._link.open(self._receiver.want)

    @concurrent_endpoint
    async def give(self, source: Origin, block_size: int) -> None:
        """Prepare to give all bytes of this host to other hosts.

        Args:
            source: the client's delivery, whose hashes check the blocks first.
            block_size: bytes of the blocks that others will ask for.
        """
        await self._give(source, block_size)

    async def _give(self, source: Origin, block_size: int) -> None:
        reblocked = ReblockedStore(self._shown, block_size)
        if reblocked.layout.key not in self._receivers:  # it arrived in blocks of another size
            await self._receive(reblocked, source, Route())

    @concurrent_endpoint
    async def describe(self, offset: int, size: int) -> bytes:
        """Return a piece of the tree's description."""
        with self._shown.description.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    @concurrent_endpoint
    async def digests(self, numbers: list[int]) -> dict[int, bytes]:
        """Return the blake3 of the given files of this host, by number."""
        store = self._shown
        return await asyncio.to_thread(lambda: {n: file_digest(store.path(n)) for n in numbers})

    @concurrent_endpoint
    async def is_current(self, identity: bytes) -> bool:
        """Whether the mount shows a tree, and this agent knows it.

        Another client may have refreshed it; or this one, which an interrupt kept from noting so.

        Args:
            identity: of the tree.
        """
        store = self._shown
        return await asyncio.to_thread(
            lambda: store.layout.identity == identity and self._is_current()
        )

    def _is_current(self) -> bool:
        """Whether the mount shows the generation that this agent has in mind."""
        shown: int = processes.status(self._directory)["generation"]
        return shown == self._shown.generation

    @concurrent_endpoint
    async def prepare(self, source: Origin, route: Route) -> None:
        """Fetch the bytes of the next generation that this one lacks, without showing it."""
        await self._abandon()
        description = await fetch_description(source, self._settings.fetch_timeout)
        lock, made = contextlib.ExitStack(), None
        try:
            await asyncio.to_thread(lock.enter_context, self._shown.growing())
            if not await asyncio.to_thread(self._is_current):
                raise MountError(
                    "the mount was refreshed by another client meanwhile", hint="refresh again"
                )
            make = functools.partial(self._make_next, description)
            store = await self._at_work(source, make)
            self._next = made = Prepared(store, lock)
            receiver = await self._receive(store, source, route, self._shown)
            await receiver.run()
            await self._at_work(source, store.finish)
        except BaseException:
            if made is not None and made is self._next:  # not what a later client prepares
                await self._abandon()
            lock.close()
            raise

    def _make_next(self, description: bytes) -> Store:
        try:
            return self._shown.next(description, set_attributes=self._binds)
        except StoreError as error:
            kept = processes.status(self._directory)["kept"]
            if not kept["generations"]:
                raise
            users = ", ".join(kept["users"]) or "open files"
            raise StoreError(
                f"{error.message}; {kept['generations']} earlier generations "
                f"({kept['bytes'] >> 20} MiB) are still used by {users}",
                hint="end these, and refresh again",
            ) from None

    @concurrent_endpoint
    async def advance(self, identity: bytes) -> None:
        """Show the generation that ``prepare`` fetched.

        Args:
            identity: of its tree.

        Raises:
            MountError: another client abandoned it, or it cannot be shown.
        """
        made = self._next
        if made is None or made.store.layout.identity != identity:
            raise MountError("what this refresh fetched is gone", hint="refresh again")
        store = made.store
        await asyncio.to_thread(processes.show, self._directory, store.generation)
        receiver = self._receivers.pop(store.layout.key)
        for other in self._receivers.values():
            other.close()
        self._receivers = {store.layout.key: receiver}
        self._store, self._next = store, None
        made.lock.close()
        receiver.traffic.write(self._directory)

    @concurrent_endpoint
    async def abandon(self, identity: bytes) -> None:
        """Delete the generation that ``prepare`` fetched, unless it is shown.

        Args:
            identity: of its tree.
        """
        if self._next is not None and self._next.store.layout.identity == identity:
            await self._abandon()

    async def _abandon(self) -> None:
        made, self._next = self._next, None
        if made is not None:
            if receiver := self._receivers.pop(made.store.layout.key, None):
                receiver.close()
            await asyncio.to_thread(processes.forget, self._directory, made.store)
            made.lock.close()

    @property
    def _shown(self) -> Store:
        if self._store is None:
            raise MountError("there is no mount on this host")
        return self._store

    @concurrent_endpoint
    async def keep(self) -> None:
        """Leave the mount in place when the client is gone."""
        await self._link.keep()

    @concurrent_endpoint
    async def verify(self) -> Verified:
        """Compare all bytes that are shown with the hashes they arrived with."""
        task = self._task()
        self._verified = await asyncio.to_thread(verify.verify, Path(task.store))
        verify.note(self._directory, self._verified)
        return self._verified

    @concurrent_endpoint
    async def piece(self, damage: Damage) -> bytes | None:
        """Return the bytes of a piece that is damaged on another host; None if damaged here too."""
        return await asyncio.to_thread(verify.piece, Path(self._task().store), damage)

    @concurrent_endpoint
    async def repair(self, damage: Damage, data: bytes, last: bool) -> None:
        """Replace a damaged piece by the right bytes.

        Args:
            damage: the damaged piece.
            data: the right bytes.
            last: whether this was the last damaged piece of the file.
        """
        store, binds = Path(self._task().store), self._binds
        await asyncio.to_thread(verify.repair, store, damage, data, set_attributes=binds)
        await asyncio.to_thread(processes.drop, self._directory, damage.number)
        if last and self._verified is not None:
            self._verified.repaired.append(os.fsdecode(damage.path))
            verify.note(self._directory, self._verified)

    def _task(self) -> Task:
        return processes.task(self._directory)

    @concurrent_endpoint
    async def status(self) -> control.Message:
        """Return the state of the mount, as ``Server.status`` does."""
        if self._traffic is not None and self._directory.exists():
            self._traffic.write(self._directory)
        return await asyncio.to_thread(processes.status, self._directory)

    @concurrent_endpoint
    async def close(self, force: bool) -> Parts:
        """Unmount, and delete the store; return what ``deliver`` did not."""
        reads = await self._reads()
        self._stopping = True
        try:
            await asyncio.to_thread(processes.stop, self._directory, force=force)
        finally:
            self._stopping = False
        if self._moving is not None:  # not earlier: a mount in use stays, and is to be moved
            self._moving.cancel()
        for receiver in self._receivers.values():
            await receiver.stop()
        if self._receiver is not None and self._store is not None:
            # Bytes that arrived while the serving process deleted the others.
            await asyncio.to_thread(stores.remove, self._store.directory)
        return reads

    @concurrent_endpoint
    async def quit(self) -> None:
        """End this process soon; called by a client that did not start it."""
        runtime.quit_soon()


RECONNECT, SELDOM = 0.1, 1.0
"""Seconds between attempts to reach a serving process that took over: at first, and at last, after
ever longer pauses. It reads the tree before it can be reached, which takes seconds if it is large,
and then waits ``server.FEED_TIMEOUT``."""


class Link:
    """A connection to the serving process, made again when that process is replaced.

    Args:
        directory: the mount's private directory.

    Attributes:
        kept: whether the mount stays when this connection ends.
    """

    def __init__(self, directory: Path) -> None:
        self.kept = False
        self._directory = directory
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    async def open(self, want: Callable[[int], None]) -> None:
        """Connect to the mount as its receiver; call ``want`` for each block that a read needs."""
        reader, self._writer = await asyncio.open_unix_connection(self._directory / control.SOCKET)
        self._writer.write(control.encode({"op": "feed", "keep": self.kept}))
        self._listening = asyncio.create_task(self._listen(reader, want))

    async def close(self) -> None:
        """Disconnect, so that another agent can take over."""
        if self._listening is not None:
            self._listening.cancel()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._keep(self._writer)
            self._writer.close()
            self._writer = None

    async def keep(self) -> None:
        """Leave the mount in place when this connection ends."""
        self.kept = True
        if self._writer is not None:
            await self._keep(self._writer)

    async def _keep(self, writer: asyncio.StreamWriter) -> None:
        writer.write(control.encode({"keep": True}))
        await writer.drain()

    def tell(self, block: int, failure: str | None) -> None:
        """Tell the serving process that a block has arrived, or failed."""
        if self._writer is not None and not self._writer.is_closing():
            message: control.Message = {"have": block}
            if failure is not None:
                message = {"failed": block, "reason": failure}
            self._writer.write(control.encode(message))

    async def _listen(self, reader: asyncio.StreamReader, want: Callable[[int], None]) -> None:
        with contextlib.suppress(OSError):
            async for line in reader:
                want(control.decode(line)["want"])
        # It has unmounted, or it died and another takes its place.
        pause = RECONNECT
        while self._directory.exists():
            await asyncio.sleep(pause)
            pause = min(2 * pause, SELDOM)
            with contextlib.suppress(OSError):
                await self.open(want)
                return
