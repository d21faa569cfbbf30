"""The generations of a mount on a host: show the newest one, and delete earlier ones when unused.

The serving process owns them: only this process changes the mount from one to another.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import stat
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from wheelmount import entry
from wheelmount.mount.kernel import points, users, views
from wheelmount.mount.kernel.users import Tree, Users
from wheelmount.mount.kernel.views import Root, Space
from wheelmount.mount.serve.adapters import Adapter
from wheelmount.mount.serve.control import Task
from wheelmount.mount.serve.vfs import Vfs
from wheelmount.mount.store import store as stores
from wheelmount.mount.store.store import Store

log = logging.getLogger("wheelmount")

AGAIN, SELDOM = 2.0, 60.0
"""Seconds between searches for users of earlier generations: at first, and at last, after ever
longer pauses. A generation is deleted after two searches that find no user."""

NAMES_AGAIN = 5.0
"""Seconds after which the kernel is to forget names in directories that are gone; then after ever
longer pauses, ``SELDOM`` at last."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Earlier generations that stay for their users.

    Attributes:
        generations: number of earlier generations.
        bytes: bytes of memory that they take beside the current one; 0 if unknown.
        users: descriptions of the processes and mounts that use them.
    """

    generations: int
    bytes: int
    users: list[str]


@dataclass(slots=True)
class Held:
    """The inodes of an earlier generation that stay under FUSE, of those that later ones lack.

    Attributes:
        known: inodes that the kernel holds.
        directories: those of them that are directories.
        below: all that can be reached from such directories. A process there may still look up
            any of it.
    """

    known: set[int]
    directories: set[int] = field(default_factory=set)
    below: set[int] = field(default_factory=set)


class Generations:
    """Changes a mount from one generation, or one way to show it, to the next.

    Args:
        directory: private directory of the mount.
        task: task of the serving process; its store may have several generations if an earlier
            process served it.
    """

    def __init__(self, directory: Path, task: Task) -> None:
        standing = points.standing(directory)
        binds = standing is not None and standing.kind != points.FILE_SYSTEM
        files = Path(task.store)
        # The mount itself tells the generation: a process may have died before it noted a change.
        number = int(Path(standing.root).name) if standing is not None and binds else None
        store = Store.open(files, number)
        earlier = [Store.open(files, n) for n in stores.earlier(files, store.generation)]
        self.vfs = Vfs(store, earlier)
        """The tree that the FUSE server serves."""
        self.bound = store if binds else None
        """The generation that a bind mount shows; None under FUSE."""
        self._directory = directory
        self._task = task
        self._kept = [store, *earlier]
        self._adapter: Adapter | None = None
        self._replaced: Root | None = None  # of the FUSE mount that a bind mount replaced
        self._nursery: trio.Nursery | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        inodes = store.tree.inodes.keys()
        self._held = {each: Held(set(each.tree.inodes.keys() - inodes)) for each in earlier}
        self._leaving: set[Store] = set()
        self._trees: dict[Store, Tree] = {}
        self._users: dict[Store, list[str]] = {}
        self._census = Users()
        self._looking = self._dropping = False
        self.changing = trio.Lock()
        """Lock that is held while the mount is changed or unmounted."""

    @property
    def shown(self) -> Store:
        """The current generation, which new readers see."""
        return self.bound or self.vfs.store

    async def serve(self, adapter: Adapter, nursery: trio.Nursery) -> None:
        """Serve through FUSE as long as it is used.

        Args:
            adapter: the FUSE server.
            nursery: runs the deletion of earlier generations, also after this returns.
        """
        self._adapter, self._nursery = adapter, nursery
        self._token = trio.lowlevel.current_trio_token()
        try:
            await adapter.serve()
        finally:
            self._adapter = None
        # FUSE ended because a bind mount replaces it: wait until that change is complete.
        async with self.changing:
            self._held.clear()
            self._retire()
            await trio.to_thread.run_sync(self.shown.rest)

    @property
    def way(self) -> str:
        """Name of the way in which the mount is shown now."""
        return self._adapter.name if self._adapter and not self.bound else "bind"

    async def drop(self, number: int) -> None:
        """Have the kernel drop cached bytes of a file."""
        if self._adapter is not None and self._adapter.knows(number):
            await trio.to_thread.run_sync(self._adapter.drop, number)

    def end(self) -> None:
        """Stop serving through FUSE, even if it is in use."""
        if self._adapter is not None:
            self._adapter.end()

    @property
    def served(self) -> bool:
        """Whether the FUSE server runs."""
        return self._adapter is not None

    async def show(self, generation: int) -> None:
        """Show a complete generation in the best way that is allowed.

        A FUSE mount stays while a process has its working directory there: if a bind mount
        replaced it, the kernel could no longer tell the process its working directory, which
        programs do not expect.

        Raises:
            OSError: the generation cannot be shown; the mount still shows the earlier one.
        """
        async with self.changing:
            store = before = self.shown
            if generation < store.generation:
                raise OSError(errno.ESTALE, f"generation {store.generation} is shown")
            if generation != store.generation:
                store = store.reopen(generation)
            if store is self.bound:
                return
            note = stores.NextCurrent(store.directory, generation)
            try:
                await self._change(store, note)
            except OSError:
                if self.shown is not store:
                    note.drop()
                    raise
                # Nothing may be deleted now as if it were not shown.
                log.exception("generation %d is shown, but not all was done for it", generation)
            note.take()
            if store is not before:
                self._kept.append(store)
            self._retire()
            await self._trim()

    async def _change(self, store: Store, note: stores.NextCurrent) -> None:
        served = self.bound is None
        binds = self._task.adapter == "bind" and (store.bindable or not served)
        if binds and await trio.to_thread.run_sync(self._bind, store):
            if served and self._nursery is not None:
                self._nursery.start_soon(self._follow)
            log.info("generation %d is shown by the kernel alone", store.generation)
        elif store is not self.shown:
            await self._flip(store, note)
            log.info("generation %d is shown", store.generation)

    def _bind(self, store: Store) -> bool:
        mount = points.standing(self._directory)
        if mount is None:
            raise OSError(errno.ENOENT, "the mount is gone")
        served = mount.kind == points.FILE_SYSTEM
        with entry.replacing(self._directory) as free:
            if served and (not free or users.inhabited(mount)):
                return False
            with views.held(mount):
                return self._take_place(mount, store, served=served)

    def _take_place(self, mount: points.Mounted, store: Store, *, served: bool) -> bool:
        root = Root.of(store.root)
        standing = mount.id, mount.device, mount.root
        made, entered = 0, False

        def may_replace(number: int) -> bool:
            nonlocal made, entered
            made = number
            points.remember(self._directory, standing, (number, root.device, root.path))
            entered = served and users.inhabited(mount)  # since the first search
            return not entered

        if not views.exchange(Space(0, 0), mount, store.root, may_replace):
            points.remember(self._directory, standing)
            if entered:
                return False
            raise OSError(errno.EBUSY, "another mount is above it")
        self.bound = store
        if served:
            self._replaced = Root(mount.device, "/")
        try:
            points.remember(self._directory, (made, root.device, root.path))
            self._exchange_views([each for each in self._kept if each is not store], store, made)
        except OSError:  # the note has both mounts, and the views are looked for again
            log.exception("generation %d is shown, but not in all places", store.generation)
        return True

    async def _follow(self) -> None:
        """Exchange views of the FUSE server's mount that appeared while it was replaced.

        A container that was being started then had a copy of the mount where no search finds it.
        """
        pause = AGAIN
        while self.served:
            await trio.sleep(pause)
            pause = min(2 * pause, SELDOM)
            async with self.changing:
                await trio.to_thread.run_sync(self._exchange_again, [])

    def _exchange_views(self, earlier: Iterable[Store], store: Store, own: int) -> None:
        """Make all other mounts that show an earlier tree of this mount show a generation.

        Args:
            earlier: the earlier trees. What the FUSE server serves counts too, once it is replaced.
            store: the generation to show.
            own: id of the mount itself.
        """
        former = {}
        for each in earlier:
            with contextlib.suppress(FileNotFoundError):  # its files are gone, and so is any view
                former[Root.of(each.root)] = each
        adapter, replaced = self._adapter, self._replaced
        if adapter is not None and replaced is not None:
            former[replaced] = self.vfs.store

        def agree(root: Root, _made: int) -> bool:
            # If the server's file system is still mounted now, after a mount with its device number
            # was found, the mount is of this file system: see ``views.held``.
            return root != replaced or (adapter is not None and adapter.mounted())

        for space in views.spaces():
            for mount in space.reached():
                for root, before in former.items():
                    part = root.below(mount)
                    if part is None or mount.id == own:
                        continue
                    place = store.root / part
                    if not _alike(before.root / part, place):
                        log.debug("%s keeps what it shows: there is no %s", mount.path, part)
                        continue
                    try:
                        done = views.exchange(space, mount, place, partial(agree, root))
                    except OSError as error:
                        done = False
                        log.debug("%s keeps what it shows: %s", mount.path, error)
                    if done:
                        log.info("%s of process %d follows", mount.path, space.process)

    async def _flip(self, store: Store, note: stores.NextCurrent) -> None:
        if self._adapter is None:
            raise OSError("nothing serves the mount any more")
        before = self.vfs.store
        change = await trio.to_thread.run_sync(self.vfs.changes, store)

        def flip() -> None:
            self.vfs.replace(store)
            # A server that takes over must never show the earlier generation again: the kernel may
            # hold inodes of this one by then, and files of the earlier one are deleted next.
            note.take()

        await self._adapter.refresh(change, flip)
        self._hold(before, before.tree.inodes.keys() - store.tree.inodes.keys())
        if self._inhabited and not self._dropping and self._nursery is not None:
            self._dropping = True
            self._nursery.start_soon(self._drop_names)

    @property
    def _inhabited(self) -> bool:
        """Whether the kernel holds a directory that the newest generation lacks."""
        return any(held.directories for held in self._held.values())

    async def _drop_names(self) -> None:
        """Have the kernel forget what was looked up in directories that are gone.

        It would keep them, and these directories for their sake, when their last user has left.
        """
        pause = NAMES_AGAIN
        await trio.sleep(pause)
        while self._inhabited and (adapter := self._adapter) is not None:
            entries = [
                (directory, name)
                for store, held in self._held.items()
                for directory in held.directories | held.below
                if adapter.knows(directory)
                for name in store.tree.names.get(directory, {})
            ]
            await trio.to_thread.run_sync(adapter.drop_names, entries)
            await trio.sleep(pause)
            pause = min(2 * pause, SELDOM)
        self._dropping = False

    def _hold(self, store: Store, gone: Set[int]) -> None:
        """Free the files of ``gone`` that no process can reach any more; hold the others."""
        adapter, inodes, names = self._adapter, store.tree.inodes, store.tree.names
        # Noted before the adapter is asked: otherwise, what the kernel forgets in between is lost.
        self._held[store] = Held(set(gone))
        known = {number for number in gone if adapter is not None and adapter.knows(number)}
        held = Held(known, {number for number in known if inodes[number].is_directory})
        pending = list(held.directories)
        while pending:
            new = set(names.get(pending.pop(), {}).values()) - held.below
            held.below |= new
            pending += new
        reachable = [each.below for each in self._held.values()]
        for number in gone - known - held.below:
            if not any(number in below for below in reachable):
                store.free(number)
        self._held[store] = held

    def forgotten(self, number: int) -> None:
        """Free a file that only the kernel still referred to. May be called on any thread."""
        if self._token is not None and any(
            number in held.known for held in list(self._held.values())
        ):
            self._token.run_sync_soon(self._free, number)

    def _free(self, number: int) -> None:
        for store, held in list(self._held.items()):
            if number not in held.known:
                continue
            held.known.discard(number)
            if number in held.directories:
                held.directories.discard(number)
                if not held.directories:  # only now: a search for each would cost the tree
                    left = (held.known | held.below) - self.shown.tree.inodes.keys()
                    self._hold(store, left)
            elif number not in held.below:
                store.free(number)
        self._retire()

    def _retire(self) -> None:
        """Start deleting generations that no process can reach any more."""
        needed = {self.shown, *(store for store, held in self._held.items() if held.known)}
        if self._adapter is not None:
            needed.add(self.vfs.store)
        for store in self._kept:
            if store not in needed:
                self._leaving.add(store)
        if self._leaving and not self._looking and self._nursery is not None:
            self._looking = True
            self._nursery.start_soon(self._dismiss)

    async def _dismiss(self) -> None:
        """Delete earlier generations, each when its last user has gone."""
        pause = waited = AGAIN
        unused: set[Store] = set()
        while self._leaving:
            everything, count = waited >= pause, len(self._kept)
            if everything:
                pause, waited = min(2 * pause, SELDOM), 0.0
            unused = await self._look(unused, everything=everything)
            if len(self._kept) < count:
                gc.collect()  # otherwise mapped files stay until the next garbage collection
            await trio.sleep(AGAIN)
            waited += AGAIN
        self._looking = False

    async def _look(self, unused: set[Store], *, everything: bool) -> set[Store]:
        """Delete generations unused in two searches; return those unused only in this one."""
        due = [store for store in self._leaving if everything or store not in self._users]
        async with self.changing:
            await trio.to_thread.run_sync(self._exchange_again, due)
        self._users |= await trio.to_thread.run_sync(self._find_users, due)
        free = {store for store in due if not self._users[store]}
        for store in free:
            del self._users[store]
            if store in unused:
                await self._forget(store)
        return free - unused

    def _exchange_again(self, leaving: list[Store]) -> None:
        """Exchange views that appeared during the change, or could not be exchanged then."""
        with contextlib.suppress(OSError):  # the next search tries again
            mount = points.standing(self._directory)
            if self.bound is not None and mount is not None:
                self._exchange_views(leaving, self.bound, mount.id)

    def _find_users(self, leaving: list[Store]) -> dict[Store, list[str]]:
        if self._task.adapter != "bind":  # under FUSE, the kernel reports to the server
            return {store: [] for store in leaving}
        try:
            for store in leaving:
                self._trees.setdefault(store, Tree(store.root))
            found = self._census.find([self._trees[store] for store in leaving])
        except OSError as error:
            log.warning("cannot find the users of earlier generations: %s", error)
            return {store: [str(error)] for store in leaving}
        return {store: found[self._trees[store]] for store in leaving}

    def kept(self) -> Kept:
        """Return the earlier generations that stay, and their users."""
        others = [store for store in self._kept if store is not self.shown]
        if not others:
            return Kept(0, 0, [])
        users = [user for them in self._users.values() for user in them]
        return Kept(len(others), self.shown.beside(), sorted(set(users)))

    async def _forget(self, store: Store) -> None:
        async with self.changing:
            self._leaving.discard(store)
            tree = self._trees.pop(store, None)
            self.vfs.forget(store)
            self._held.pop(store, None)
            self._kept.remove(store)
            try:
                keep = users.covered(tree) if tree else ()
                await trio.to_thread.run_sync(lambda: store.forget(keep))
            except OSError as error:  # a read-only disk: the files go with the mount
                log.warning("generation %d stays: %s", store.generation, error)
            await self._trim()

    async def _trim(self) -> None:
        if len(self._kept) == 1:
            try:
                await trio.to_thread.run_sync(self.shown.trim)
            except OSError as error:  # what it takes too much of is given back later
                log.warning("the store does not shrink: %s", error)


def _alike(before: Path, after: Path) -> bool:
    """Return whether a view of one path can be exchanged for a view of another path."""
    try:
        kinds = {stat.S_IFMT(path.lstat().st_mode) for path in (before, after)}
    except OSError:
        return False
    # A symlink on the way could lead out of the tree.
    return len(kinds) == 1 and os.path.realpath(after) == str(after)
