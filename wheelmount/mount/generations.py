"""The generations of a mount on a host: which is shown, how, and when an earlier one can go."""

from __future__ import annotations

import logging
from pathlib import Path

import trio

from wheelmount.mount import kernel, point
from wheelmount.mount import store as stores
from wheelmount.mount.adapter import Adapter
from wheelmount.mount.store import Store
from wheelmount.mount.task import Task
from wheelmount.mount.vfs import Vfs

log = logging.getLogger("wheelmount")

LINGER = 2.0
"""Seconds that a generation stays after nobody can come to it any more.

Who was on the way to one of its files still finds it, and who lists one of its directories gets to
the end. Open files stay for as long as they are open, whatever becomes of their names. Meanwhile
files that two generations share show the links of both.
"""


class Generations:
    """Moves a mount from one generation, or one way to show it, to the next.

    Args:
        task: of the mount; its store may have several generations if another process went before.
    """

    def __init__(self, task: Task) -> None:
        directory = Path(task.store)
        store = Store.open(directory)
        earlier = [Store.open(directory, n) for n in stores.earlier(directory, store.generation)]
        self.vfs = Vfs(store, earlier)
        """What the FUSE server serves."""
        self.bound = store if point.shows(task.mntpoint, directory) else None
        """The generation that the kernel shows alone."""
        self._task = task
        self._kept = [store, *earlier]
        self._adapter: Adapter | None = None
        self._nursery: trio.Nursery | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        # Of earlier generations, what the newest has no more but the kernel still knows.
        inodes = store.tree.inodes.keys()
        self._held = {before: set(before.tree.inodes.keys() - inodes) for before in earlier}
        self._leaving: set[Store] = set()
        self._turn = trio.Lock()

    @property
    def shown(self) -> Store:
        """The generation that whoever comes now sees."""
        return self.bound or self.vfs.store

    async def serve(self, adapter: Adapter, nursery: trio.Nursery) -> None:
        """Serve through FUSE for as long as anybody uses that.

        Args:
            adapter: what serves.
            nursery: where earlier generations are deleted in time, also after that.
        """
        self._adapter, self._nursery = adapter, nursery
        self._token = trio.lowlevel.current_trio_token()
        try:
            await adapter.serve()
        finally:
            self._adapter = None
        async with self._turn:  # it ends because another way took over, which may not be done yet
            self._held.clear()
            self._retire()
            await trio.to_thread.run_sync(self.shown.rest)

    @property
    def way(self) -> str:
        """Name of the way that the mount is shown now."""
        return self._adapter.name if self._adapter and not self.bound else "bind"

    async def drop(self, number: int) -> None:
        """Have the kernel forget what it keeps of a file's bytes."""
        if self._adapter is not None and self._adapter.knows(number):
            await trio.to_thread.run_sync(self._adapter.drop, number)

    def end(self) -> None:
        """Stop to serve through FUSE, whoever uses it."""
        if self._adapter is not None:
            self._adapter.end()

    @property
    def served(self) -> bool:
        """Whether the FUSE server is at work."""
        return self._adapter is not None

    async def show(self, generation: int) -> None:
        """Show a generation, of which all bytes are there, in the best way that is allowed.

        As long as FUSE shows the mount and a process has its working directory there, it goes on:
        where another mount takes the place of that one, the kernel cannot tell the process any
        more where it is, which programs do not expect.

        Raises:
            OSError: it cannot be shown; what was shown before still is.
        """
        async with self._turn:
            store = self.shown
            if generation != store.generation:
                store = store.reopen(generation)
                self._kept.append(store)
            if store is self.bound:
                return
            binds = self._task.adapter == "bind" and (store.bindable or self._adapter is None)
            if binds and await trio.to_thread.run_sync(self._bind, store):
                self.bound = store
                log.info("generation %d is shown by the kernel alone", generation)
            elif store is not self.shown:
                await self._flip(store)
                log.info("generation %d is shown", generation)
            (store.directory / "current").write_text(str(generation))
            self._retire()
            await self._trim()

    def _bind(self, store: Store) -> bool:
        mntpoint = self._task.mntpoint
        if self.bound is None and point.inhabited(mntpoint):
            return False
        kernel.show(store.root, mntpoint, below=True)
        return True

    async def _flip(self, store: Store) -> None:
        if self._adapter is None:
            raise OSError("nothing serves the mount any more")
        before = self.vfs.store
        change = await trio.to_thread.run_sync(self.vfs.changes, store)
        await self._adapter.refresh(change, lambda: self.vfs.replace(store))
        held = set()
        for number in before.tree.inodes.keys() - store.tree.inodes.keys():
            if self._adapter.knows(number):
                held.add(number)
            else:
                before.free(number)
        self._held[before] = held

    def forgotten(self, number: int) -> None:
        """Free what only the kernel still referred to. May be called on any thread."""
        if self._token is not None and any(number in held for held in list(self._held.values())):
            self._token.run_sync_soon(self._free, number)

    def _free(self, number: int) -> None:
        for store, held in self._held.items():
            if number in held:
                held.discard(number)
                store.free(number)
        self._retire()

    def _retire(self) -> None:
        """See to it that generations go which nobody can come to any more."""
        needed = {self.shown, *(store for store, held in self._held.items() if held)}
        if self._adapter is not None:
            needed.add(self.vfs.store)
        for store in self._kept:
            if store not in needed and store not in self._leaving and self._nursery is not None:
                self._leaving.add(store)
                self._nursery.start_soon(self._forget, store)

    async def _forget(self, store: Store) -> None:
        await trio.sleep(LINGER)
        async with self._turn:
            self.vfs.forget(store)
            self._held.pop(store, None)
            self._kept.remove(store)
            await trio.to_thread.run_sync(store.forget)
            await self._trim()

    async def _trim(self) -> None:
        if len(self._kept) == 1:
            await trio.to_thread.run_sync(self.shown.trim)
