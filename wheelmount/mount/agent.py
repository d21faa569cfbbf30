"""What happens on a host: an actor of its own process that prepares a mount and receives its bytes.

The mount itself is served by yet another process (``server``): one that serves a mount must never
use it, and one that outlives the client cannot be Monarch's.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from wheelmount.config import Settings
from wheelmount.errors import MountError
from wheelmount.mount import control, point, serving
from wheelmount.mount.layout import Layout
from wheelmount.mount.point import View
from wheelmount.mount.store import Store
from wheelmount.mount.task import Task
from wheelmount.mount.transfer import Receiver, fetch_description


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be mounted.

    Attributes:
        source: the client's directory, for people.
        mntpoint: absolute path on the host.
        cover: whether a directory that is not empty may be covered.
    """

    source: str
    mntpoint: str
    cover: bool


class Agent(Actor):  # type: ignore[misc]
    """The hands of one mount on one host.

    Args:
        host: the host's name.
        settings: of the client; its directories are taken as the host's too.
        identity: name of the mount, unique on the machine; of a new one, or of one that stands.
    """

    def __init__(self, host: str, settings: Settings, identity: str) -> None:
        self._host = host
        self._settings = settings
        self._directory = serving.directory(settings) / identity
        self._receiver: Receiver | None = None
        self._link: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    @concurrent_endpoint
    async def view(self) -> View:
        """What this host sees of file systems."""
        return View.here()

    @concurrent_endpoint
    async def open(self, order: Order, source: Any) -> None:
        """Have the mount stand: with its names, before its bytes."""
        point.available()
        settings = self._settings
        made = point.prepare(order.mntpoint, cover=order.cover)
        store = settings.private_store() / self._directory.name
        try:
            tree = await fetch_description(source, settings.fetch_timeout)
            ring = await asyncio.wait_for(
                source.ring.call_one().as_asyncio(), settings.fetch_timeout
            )
            self._directory.mkdir(mode=0o700)
            (self._directory / "tree").write_bytes(tree)
            task = Task(
                self._host, order.source, order.mntpoint, str(store), settings.read_timeout, made
            )
            task.write(self._directory)
            self._receiver = Receiver(
                self._host,
                Store.create(store, Layout.decode(tree)),
                source,
                ring,
                in_flight=settings.in_flight,
                timeout=settings.fetch_timeout,
                tell=self._tell,
            )
            await asyncio.to_thread(serving.start, self._directory, settings.start_timeout)
            await self._connect(self._receiver)
        except BaseException:
            await asyncio.to_thread(serving.stop, self._directory, force=True)
            serving.discard(self._directory, store, order.mntpoint if made else None)
            raise

    @concurrent_endpoint
    async def deliver(self) -> None:
        """Fetch all bytes; returns when they are there."""
        if self._receiver is None:
            raise MountError("there is no mount to deliver to")
        await self._receiver.run()

    @concurrent_endpoint
    async def keep(self) -> None:
        """Let the mount stay when the client is gone."""
        if self._link is not None:
            self._link.write(control.encode({"keep": True}))
            await self._link.drain()

    @concurrent_endpoint
    async def status(self) -> control.Message:
        """See ``Server.status``."""
        return await asyncio.to_thread(serving.status, self._directory)

    @concurrent_endpoint
    async def close(self, force: bool) -> None:
        """Take the mount down."""
        await asyncio.to_thread(serving.stop, self._directory, force=force)
        if self._receiver is not None:
            await self._receiver.stop()

    async def _connect(self, receiver: Receiver) -> None:
        reader, self._link = await asyncio.open_unix_connection(self._directory / control.SOCKET)
        self._link.write(control.encode({"op": "feed", "keep": False}))
        self._listening = asyncio.create_task(_listen(reader, receiver))

    def _tell(self, block: int, failure: str | None) -> None:
        if self._link is not None and not self._link.is_closing():
            message: control.Message = {"have": block}
            if failure is not None:
                message = {"failed": block, "reason": failure}
            self._link.write(control.encode(message))


async def _listen(reader: asyncio.StreamReader, receiver: Receiver) -> None:
    with contextlib.suppress(OSError):
        async for line in reader:
            receiver.want(control.decode(line)["want"])
