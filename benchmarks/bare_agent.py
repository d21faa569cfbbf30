"""A stand-in for a mount's agent, for ``benchmarks.clients``: it mounts nothing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from wheelmount.hosts.actor import concurrent_endpoint
from wheelmount.mount.host.agent import Agent, Order, Parts
from wheelmount.mount.serve import control
from wheelmount.mount.store import store as stores
from wheelmount.mount.store.store import Store
from wheelmount.mount.transfer.rdma import Origin, fetch_description
from wheelmount.mount.transfer.receiver import Receiver
from wheelmount.mount.transfer.topology import Route

BINDS = False
"""Whether the store's files are shown by a bind mount."""


class BareAgent(Agent):
    """Receives trees as an agent does, into a directory in place of the mount point.

    There is no serving process, which takes more memory and time than hundreds of hosts on one
    machine can have. What the client sends and gets is the same.
    """

    _binds = BINDS

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def open(self, order: Order, source: Origin, route: Route) -> None:
        """Receive the tree, and prepare to receive its bytes."""
        self._order = order
        description = await fetch_description(source, self._settings.fetch_timeout)
        self._store = await asyncio.to_thread(
            Store.create, Path(order.mntpoint), description, mounted=False
        )
        self._receiver = await self._receive(self._store, source, route)

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def deliver(self, _traced: bool = False) -> Parts:
        """Fetch all bytes."""
        receiver: Receiver = self._receiver  # type: ignore[assignment]
        await receiver.run()
        await asyncio.to_thread(self._shown.finish)
        return []

    def _is_current(self) -> bool:
        return True

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def advance(self, _identity: bytes) -> None:
        """Take the generation that ``prepare`` fetched for the present one."""
        if (made := self._next) is not None:
            key = made.store.layout.key
            self._receivers = {key: self._receivers[key]}
            self._store, self._next = made.store, None
            made.lock.close()

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def status(self) -> control.Message:
        """Return as much as ``Server.status`` does."""
        store = self._shown
        return {
            "host": self._host, "source": self._order.source, "mntpoint": self._order.mntpoint,
            "adapter": "bind", "generation": store.generation, "namespace": 4026531840,
            "apart": False, "pid": 1, "server": 2, "started": time.time(),
            "files": store.summary.files, "size": store.summary.size, "held": store.held(),
            "finished": store.finished,
            "memory": 30 << 20, "kept": {"generations": 0, "bytes": 0, "users": []},
            "delivery": self._traffic.summary() if self._traffic is not None else None,
            "verified": None, "waiting": 0, "fed": True,
            "changed": [],
        }  # fmt: skip

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def close(self, _force: bool) -> Parts:
        """Delete the store."""
        for receiver in self._receivers.values():
            await receiver.stop()
        if self._store is not None:
            await asyncio.to_thread(stores.remove, self._store.directory)
        return []
