"""``remotemount``: mounts a directory of the client read-only on every host."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from wheelmount import config
from wheelmount.config import Settings
from wheelmount.errors import (
    HostError,
    InputError,
    MountError,
    TransferError,
    WaitError,
    WheelmountError,
)
from wheelmount.hosts import rdma, runtime
from wheelmount.hosts.host import Host, as_hosts
from wheelmount.mount.client.agents import Agents
from wheelmount.mount.client.delivery import Delivery
from wheelmount.mount.client.reads import Record
from wheelmount.mount.client.seen import Seen, read
from wheelmount.mount.host import reattach
from wheelmount.mount.host.reattach import Apart
from wheelmount.mount.kernel import points
from wheelmount.mount.serve import adapters
from wheelmount.mount.snapshot import access
from wheelmount.mount.snapshot.diff import Doubt, Succession
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.source import file_digest, unreadable
from wheelmount.mount.snapshot.tree import Tree
from wheelmount.mount.store.verify import Damage, Verified, right
from wheelmount.mount.transfer import topology
from wheelmount.progress import SILENT, Progress, number_of

log = logging.getLogger("wheelmount")

VERIFY_TIMEOUT = 24 * 3600.0
"""Seconds that hosts may take to read their whole store; a dead host ends the wait at once."""

NAMED = 10
"""Number of files that an error lists by name; of more, it gives the number."""

Handles = dict[str, Any]
"""Agents by host."""


def remotemount(
    host_mesh: Any,
    sourcepath: str | os.PathLike[str],
    mntpoint: str | None = None,
    *,
    settings: Settings | None = None,
    progress: Progress = SILENT,
) -> RemoteMount:
    """Mount a directory of this machine read-only on every host.

    ::

        with remotemount(hosts, "/scratch/venv") as mount:
            ...                     # all names are there; a read waits for the bytes it needs
            mount.wait()            # all bytes are there

    In a running event loop (a notebook, an actor) ``async with`` and ``await mount.arrived()`` do
    the same without blocking the loop.

    Args:
        host_mesh: hosts of ``wheelmount.hosts``, or a Monarch ``HostMesh``.
        sourcepath: the directory.
        mntpoint: absolute path on the hosts; default the path of the source. ``{host}`` in it is
            replaced by the host's name. If hosts share one view of the file system (several on
            one machine, without namespaces of their own) and the path is the same for them, the
            host's name is appended to it.
        settings: settings of the mount; default those of the environment and ``pyproject.toml``.
        progress: receives the progress of delivery.

    Returns:
        The mount, to be opened as a context manager or with ``open()``.
    """
    return RemoteMount(host_mesh, sourcepath, mntpoint, settings or config.load(), progress)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _checked(method: _Method) -> _Method:
    """Have a method end with an error once the hosts are gone, as a cluster's own methods do."""

    @functools.wraps(method)
    def watched(self: RemoteMount, *arguments: Any, **options: Any) -> Any:
        with runtime.watched(self._checks or runtime.checks()):
            return method(self, *arguments, **options)

    return cast(_Method, watched)


class RemoteMount:
    """One directory mounted on several hosts; made by ``remotemount``."""

    def __init__(
        self,
        host_mesh: Any,
        sourcepath: str | os.PathLike[str],
        mntpoint: str | None,
        settings: Settings,
        progress: Progress,
        *,
        identity: str | None = None,
    ) -> None:
        self.hosts: list[Host] = as_hosts(host_mesh)
        self.source = os.path.abspath(sourcepath)  # noqa: PTH100 - resolve() would follow symlinks
        self.identity = identity or secrets.token_hex(4)
        """Name of the mount. On a host, the mount is named ``<identity>-<host>``."""
        self.skipped: list[bytes] = []
        """Paths of the source that are not shown: sockets, pipes and devices."""
        self.delivering = False
        """Whether this process delivers the bytes, or has delivered them."""
        self.killed = False
        """Whether the hosts are killed after this mount's context, which then stops no agents."""
        self.make: Callable[[], Tree | None] | None = None
        """Makes the directory, while agents start, and may return its tree, which saves a scan."""
        self._mntpoint = mntpoint or self.source
        self._settings = settings
        self._progress = progress
        self._agents = Agents(self.identity, settings)
        self._checks = runtime.checks()  # of its hosts, for calls outside of a cluster's methods
        self._points: dict[str, str] = {}
        self._racks = topology.named_racks(settings.racks)
        self._layout: Layout | None = None
        self._unreadable: set[int] = set()  # numbers of files whose bytes some hosts do not have
        self._behind: Set[str] = set()  # hosts that could not change over
        # Hosts that another client's refresh left out, or refreshed alone.
        self._apart: list[Apart] = []
        # Errors of lost hosts, to be raised by ``refresh``.
        self._dropped: dict[str, WheelmountError] = {}
        self._record = Record(settings, os.fsencode(self.source))
        self._keep = False
        self._ending = False  # whether the agents are about to be killed with their hosts
        self._delivery: Delivery | None = None
        self._seen: Seen | None = None  # for the first refresh

    @property
    def mntpoints(self) -> dict[str, str]:
        """Mount points by host."""
        return dict(self._points)

    def open(self, *, keep: bool = False) -> None:
        """Mount the directory on all hosts, and begin to deliver its bytes.

        Returns when all mounts show all names. Bytes arrive later; a read waits for the bytes that
        it needs.

        Args:
            keep: keep the mounts, with the bytes that have arrived, if this process is killed;
                ``adopt`` can then continue the delivery.

        Raises:
            SourceError: the directory cannot be read.
            InputError, MountError: the mount point cannot be used.
            UnavailableError: a host cannot mount FUSE file systems.
            StoreError: a host has no room for the bytes.
            HostError, WaitError: a host is lost. After any error nothing stays mounted.
        """
        self._keep = keep
        runtime.start()
        try:
            self._agents.spawn(self.hosts)  # agents start while this process reads the tree
            tree = self.make() if self.make is not None else None
            if tree is None:
                tree = self._scan()
            else:
                access.limit(tree, self.source, self._settings.access, None)
            self._record.pack(tree)
            layout = Layout(tree, self._block_size(tree))
            self._delivery = delivery = self._offer(layout)
            self._mount([host.name for host in self.hosts], delivery)
        except BaseException:
            self.clear()
            raise
        self._layout = layout
        self._begin(delivery, list(self._agents))

    def add(self, host_mesh: Any) -> None:
        """Mount on more hosts the tree that the present hosts show.

        Returns when the new mounts show all names. Bytes arrive later, from hosts that have them
        or else from this process; ``wait`` waits for these hosts too. A file that was edited after
        it was sent to the present hosts cannot be read on the new hosts until ``refresh``.

        Args:
            host_mesh: as for ``remotemount``, or one host. A host with the name of a lost host
                replaces it.

        Raises:
            InputError: a host has the mount already.
            MountError: the mount is not open.
            UnavailableError, StoreError, HostError, WaitError: as ``open`` raises. Nothing stays
                mounted on any of the new hosts; the mounts of the others do not change.
        """
        if self._layout is None:
            raise MountError("the mount is not open", hint="call open() first")
        hosts = [host_mesh] if isinstance(host_mesh, Host) else as_hosts(host_mesh)
        names = [host.name for host in hosts]
        self._drop_replaced(names)
        before, layout = self._layout, self._current(self._layout)
        if self._apart:
            raise MountError("hosts do not all show the same tree", hint="refresh the mount first")
        if self._delivery is None or self._delivery.ended or layout is not before:
            if self._delivery is not None:
                self._delivery.end()
            self._delivery = self._offer_again(layout)
        try:
            self._agents.spawn(hosts)
            self._mount(names, self._delivery)
        except BaseException:
            _warn(self._close(names, force=True))
            self._agents.forget([name for name in names if name in self._agents])
            for name in names:
                self._points.pop(name, None)
            raise
        self.hosts = [host for host in self.hosts if host.name not in names] + hosts
        self._begin(self._delivery, names)

    def _drop_replaced(self, names: list[str]) -> None:
        """Drop lost hosts that new hosts of the same names replace."""
        if len(set(names)) < len(names):
            raise InputError("two hosts have the same name", hint="give each a name of its own")
        present = [name for name in names if name in self._agents]
        lost = self._find_lost(present)
        for name in present:
            if name not in lost:
                raise InputError(f"{name} has the mount already", hint="add other hosts")
        self._drop(lost)

    def _find_lost(self, names: Iterable[str]) -> set[str]:
        """Return those of the named hosts whose agents no longer answer."""
        names = list(names)
        if not names:
            return set()
        return set(runtime.errors(self._agents.call(lambda agent: agent.view.call_one(), names)))

    def _drop(self, names: Iterable[str]) -> None:
        """Drop lost hosts from the mount; the other hosts stay mounted."""
        names = set(names)
        self._agents.forget(names)
        self._behind -= names
        for name in names:
            self._points.pop(name, None)
            if self._delivery is not None:
                self._delivery.forget(name)
        self.hosts = [host for host in self.hosts if host.name not in names]

    def _offer_again(self, layout: Layout) -> Delivery:
        """Offer all of a tree that some hosts have already, for other hosts."""
        whole = Layout(layout.tree, self._block_size(layout.tree), identity=layout.identity)
        delivery = self._offer(whole, read_before=True)
        self._agents.call(lambda agent: agent.give.call_one(delivery.origin, whole.block_size))
        return delivery

    def _block_size(self, tree: Tree) -> int:
        device = self._settings.transport != "tcp" and rdma.usable()
        fanout = self._settings.fanout
        best = topology.block_size(tree.size, len(self.hosts), fanout, device=device)
        return self._settings.block_size or best

    def _offer(
        self, layout: Layout, before: Layout | None = None, *, read_before: bool = False
    ) -> Delivery:
        root, settings = os.fsencode(self.source), self._settings
        # Hosts show a later generation when they have all of it, so its order does not matter.
        record = self._record if before is None else None
        return Delivery(
            root, layout, settings, self._progress, before,
            read_before=read_before, racks=self._racks, record=record,
        )  # fmt: skip

    def _begin(self, delivery: Delivery, names: list[str]) -> None:
        self.delivering = True
        delivery.begin(names, self._agents)

    def _scan(self, before: Tree | None = None, to_send: Set[int] = frozenset()) -> Tree:
        """Read the tree of the directory.

        Args:
            before: the tree that hosts show, whose numbers unchanged files keep.
            to_send: numbers of files in it that are to be sent even if they did not change.
        """
        seen, self._seen = self._seen, None
        if seen is not None and seen.shown.tree is before and not to_send:
            tree = seen.tree if seen.holds(self.source) else None
        else:
            tree = None
        if tree is None:
            tree = read(self.source, self._settings, self._progress, before, to_send)
        self.skipped = tree.skipped
        return tree

    @property
    def handles(self) -> Handles:
        """References to the agents, which another process may use."""
        return dict(self._agents)

    @property
    def mntpoint(self) -> str:
        """The requested mount point, maybe with ``{host}``; ``mntpoints`` has the actual ones."""
        return self._mntpoint

    def take(self, handles: Handles | None) -> None:
        """Use agents of a mount, which may be half made, for ``status`` or ``close``.

        Args:
            handles: agents that another process started; None: start some.
        """
        if handles is None:
            runtime.start()
            self._agents.spawn(self.hosts)
        else:
            self._agents.take(handles, self.hosts)

    def adopt(
        self, handles: Handles | None = None, *, fixed: bool = False, seen: Seen | None = None
    ) -> None:
        """Take over an existing mount that another process made.

        Missing bytes are delivered, as after ``open``. The other process must have ended.

        Args:
            handles: the other process's agents, if they still run.
            fixed: whether the directory never changes. If so, and if all its bytes have arrived,
                the tree is not fetched from a host, and this process cannot refresh the mount.
            seen: what hosts showed shortly before, and the directory after it. If they still show
                it, the tree is not fetched from a host, and the next ``refresh`` does not scan the
                directory again unless one of the changed files was changed again.

        Raises:
            MountError: a host has no such mount.
            HostError, WaitError: a host is lost.
        """
        runtime.start()
        self._keep = True
        try:
            self.take(handles)
            self._agents.greet()
            if fixed:
                found = reattach.ask(self._agents, self._settings.start_timeout)
                if reattach.is_whole(found.values()):
                    self._points = {name: each.mntpoint for name, each in found.items()}
                    return
            known = seen.shown if seen is not None else None
            standing = reattach.find(self._agents, self._settings.start_timeout, known)
            self._layout, self._unreadable, self._seen = standing.layout, standing.lost, seen
            self._points, self._apart = standing.points, standing.apart
            if standing.missing:
                self._resume(standing.layout, standing.missing)
        except BaseException:
            if handles is None:
                self.release()
            raise

    def _resume(self, layout: Layout, block_size: int) -> None:
        """Continue the delivery of a first generation.

        Later generations are shown only when all their bytes have arrived.
        """
        whole = Layout(layout.tree, block_size, identity=layout.identity)
        self._delivery = delivery = self._offer(whole, read_before=True)
        routes = delivery.routes(self._agents)
        calls = {
            name: agent.resume.call_one(delivery.origin, routes[name], block_size)
            for name, agent in self._agents.items()
        }
        bound = self._settings.start_timeout
        runtime.raise_first(runtime.gather(calls, bound, lost=self._agents.lost))
        self._begin(delivery, list(self._agents))

    def _mount(self, names: list[str], delivery: Delivery) -> None:
        """Mount on the named hosts, whose agents have no mount yet."""
        from wheelmount.mount.host.agent import Order

        self._agents.greet()
        client = points.View.here()
        views = self._agents.call(lambda agent: agent.view.call_one())
        runtime.raise_first({name: views[name] for name in names})
        views = {name: view for name, view in views.items() if isinstance(view, points.View)}
        if not self._settings.racks:
            self._racks.update({name: view.rack for name, view in views.items()})
        paths = points.place(self._mntpoint, list(views), list(views.values()), self.source, client)
        places = dict(zip(views, paths, strict=True))
        later = names if len(names) < len(views) else []
        routes = delivery.routes({name: self._agents[name] for name in views}, later)
        calls = {}
        for name in names:
            self._points[name] = path = places[name]
            cover = path == self.source and views[name] != client
            order = Order(self.source, path, cover, self._keep)
            calls[name] = self._agents[name].open.call_one(order, delivery.origin, routes[name])
        bound = self._settings.start_timeout + self._settings.fetch_timeout
        runtime.raise_first(runtime.gather(calls, bound, lost=self._agents.lost))

    @property
    def sent(self) -> int:
        """Bytes of files that this process sent to hosts since the last refresh, or the start."""
        return self._delivery.sent if self._delivery is not None else 0

    def wait(self, timeout: float | None = None, *, warn: bool = True) -> None:
        """Wait until all bytes are on all hosts.

        Args:
            timeout: seconds; default: no limit as long as blocks keep arriving.
            warn: log a warning that names the files of ``unreadable``.

        Raises:
            WaitError: the time-out ran out; delivery goes on. Or nothing was heard of a host for
                long, as its disk hangs; the others have all bytes.
            HostError, TransferError, StoreError: a host lacks bytes; the others have all of them.
        """
        if self._delivery is None:
            raise MountError("the mount is not open", hint="call open() first")
        self._delivery.wait(timeout)
        if warn and (error := self.shortfall()):
            log.warning("%s", error.message)

    @property
    def unreadable(self) -> list[str]:
        """Sorted paths of the files whose bytes hosts do not have; reading them there fails.

        They could not be read at the source, or were edited or truncated after the mount was made.
        The list is complete when ``wait`` returns. ``refresh`` sends the files that can be read
        again.
        """
        if self._layout is None:
            return []
        changed = self._delivery.changed if self._delivery is not None else set()
        numbers, inodes = self._unreadable | changed, self._layout.tree.inodes
        return sorted(os.fsdecode(inodes[number].path) for number in numbers if number in inodes)

    def shortfall(self) -> TransferError | None:
        """Return an error that names the files of ``unreadable``; None if there are none."""
        names = self.unreadable
        if not names:
            return None
        count = number_of(len(names), "file")
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return TransferError(
            f"{count} of {self.source} cannot be read on the hosts: {', '.join(names[:NAMED])}"
            f"{more}; edited while being copied, or not readable here",
            hint="refresh the mount when they can be read and are no longer edited",
        )

    def failure(self) -> WheelmountError | None:
        """Return the error that left hosts without some bytes; None if none is known so far."""
        failed: dict[str, WheelmountError] = {}
        if self._delivery is not None:
            with contextlib.suppress(WaitError):  # bytes are still arriving
                failed = self._delivery.failures(0)
        try:
            runtime.raise_first(failed)
        except WheelmountError as error:
            return error
        return self.shortfall()

    @_checked
    def refresh(self, *, warn: bool = True) -> bool:
        """Update the mount to the current state of the directory.

        Each host shows the old tree until all bytes of the new one are there, then changes over
        in one step. Open files keep their bytes. Files that cannot be read at the source are in
        ``unreadable`` afterwards; all others are refreshed.

        Args:
            warn: log a warning that names the files of ``unreadable``.

        Returns:
            Whether anything had changed.

        Raises:
            SourceError: the directory cannot be read.
            TransferError: a file was edited while it was copied; hosts show the old tree.
            HostError: hosts are lost and dropped from the mount; the others show the new tree.
            WaitError, StoreError, MountError: a host could not change over. If only this last step
                failed, or nothing was heard of the host for long, the others show the new tree, and
                the next refresh repeats it on the host.
        """
        if self._layout is None:
            raise MountError("the mount is not open", hint="call open() first")
        self._catch_up()
        changed = self._send_changes(self._current(self._layout))
        if warn and (error := self.shortfall()):
            log.warning("%s", error.message)
        dropped, self._dropped = self._dropped, {}
        if dropped:
            raise HostError(
                f"{', '.join(dropped)}: lost, and no longer part of the mount; the other hosts "
                f"show the directory as it is now ({next(iter(dropped.values())).message})",
                hint="add() brings a host back",
            )
        return changed

    def _catch_up(self) -> None:
        """Have all hosts that are not lost get all bytes of what they show."""
        failed: dict[str, WheelmountError] = {}
        if self._delivery is not None:
            failed = self._delivery.repair(self._agents)
            self._unreadable |= self._delivery.changed
        self._drop_lost(failed)

    def _current(self, layout: Layout) -> Layout:
        """Return the layout that hosts show: ``layout`` unless they were refreshed since."""
        answers = self._agents.call(lambda agent: agent.is_current.call_one(layout.identity))
        failed = runtime.errors(answers)
        self._drop_lost({name: failed[name] for name in self._find_lost(failed)})
        if self._behind or any(answer is False for answer in answers.values()):
            standing = reattach.find(self._agents, self._settings.start_timeout, layout)
            self._layout, self._unreadable = standing.layout, standing.lost
            self._apart, self._behind = standing.apart, set()
            return standing.layout
        return layout

    def _drop_lost(self, failed: dict[str, WheelmountError]) -> None:
        """Drop those of the failed hosts that are lost.

        Raises:
            WheelmountError: a host failed that is not lost, or no host is left.
        """
        lost = self._find_lost(failed)
        runtime.raise_first({name: error for name, error in failed.items() if name not in lost})
        if len(lost) == len(self._agents):
            runtime.raise_first(failed)
        self._drop(lost)
        self._dropped |= {name: failed[name] for name in lost}

    def _send_changes(self, before: Layout) -> bool:
        """Have all hosts show the directory as it is now.

        Args:
            before: the layout that hosts show.

        Returns:
            Whether any host showed something else.
        """
        inodes, root = before.tree.inodes, os.fsencode(self.source)
        # A number must stand for the same file on all hosts.
        ambiguous = {number for each in self._apart for number in each.other(before.tree)}
        missing = self._unreadable & inodes.keys()
        still_unreadable = {n for n in missing - ambiguous if unreadable(root, before.tree, n)}
        missing |= ambiguous
        tree = self._scan(before.tree, missing - still_unreadable)
        if not Succession(before.tree, tree, missing):
            return self._unite(before)
        # Without this, the zeros that hosts have for these files would count as their bytes.
        tree.take_as_new(still_unreadable & tree.inodes.keys())
        succession = Succession(before.tree, tree, missing)
        agents = self._agents.only(self._with_common_tree)
        layout = succession.settle(self._same_bytes(succession, agents), self._block_size(tree))
        delivery = self._offer(layout, before)
        failed = delivery.advance(agents, self._find_lost)
        if self._delivery is not None:
            self._delivery.end()
        self._delivery, self._layout, self._unreadable = delivery, layout, set()
        self._behind = failed.keys() - self._find_lost(failed)
        self._drop_lost(failed)
        self._unite(layout)
        return True

    @property
    def _with_common_tree(self) -> list[str]:
        """Names of the hosts that show the same tree, unlike those of ``_apart``."""
        apart = {name for each in self._apart for name in each.hosts}
        return [name for name in self._agents if name not in apart]

    def _unite(self, layout: Layout) -> bool:
        """Have hosts that show another tree show this one; return whether there were any."""
        inodes, any_apart = layout.tree.inodes, bool(self._apart)
        while self._apart:
            before, agents = self._apart[0].layout, self._agents.only(self._apart[0].hosts)
            if agents:
                new = inodes.keys() - before.tree.inodes.keys()
                fresh = {number for number in new if inodes[number].is_file}
                size = self._block_size(layout.tree)
                after = Layout(layout.tree, size, fresh, {}, layout.identity)
                delivery = self._offer(after, before, read_before=True)
                failed = delivery.advance(agents, self._find_lost)
                self._unreadable |= delivery.changed
                self._behind |= failed.keys() - self._find_lost(failed)
                self._drop_lost(failed)
            del self._apart[0]
        return any_apart

    def _same_bytes(self, succession: Succession, agents: Agents) -> list[Doubt]:
        """Return the doubtful files of which all these hosts have the bytes, as an earlier file."""
        if not succession.doubts:
            return []
        wanted = sorted({doubt.earlier for doubt in succession.doubts})
        bound = self._settings.start_timeout + self._settings.fetch_timeout * len(wanted)
        with self._progress.task("compare", unit="file") as task:
            task.total(len(succession.doubts))
            answers = agents.call(lambda agent: agent.digests.call_one(wanted), timeout=bound)
            on_hosts = runtime.raise_first(answers).values()
            same = []
            for doubt in succession.doubts:
                digest = file_digest(os.fsencode(self.source) + b"/" + succession.path(doubt))
                if digest and all(digests[doubt.earlier] == digest for digests in on_hosts):
                    same.append(doubt)
                task.advance(1)
        return same

    def keep(self) -> None:
        """Wait for all bytes, then leave the mounts in place when this process ends."""
        self.wait(warn=False)
        runtime.raise_first(self._agents.call(lambda agent: agent.keep.call_one()))
        self._keep = True

    @_checked
    def verify(self, *, repair: bool = False) -> dict[str, Verified]:
        """Compare all bytes that hosts show with the hashes they arrived with.

        Args:
            repair: replace wrong bytes with the right ones, from the directory if it still has
                them, else from other hosts. Readers then get the right bytes, also from open files.

        Returns:
            The result of each host; its ``wrong`` lists files that are still damaged.

        Raises:
            HostError, WaitError, MountError, StoreError: a host could not compare its bytes.
            TransferError: a host names a damaged piece that is in no file of its tree; nothing was
                repaired.
        """
        if self._delivery is not None:
            runtime.raise_first(self._delivery.failures())
        with self._progress.task("verify", unit="host") as task:
            bound = self._settings.start_timeout + VERIFY_TIMEOUT
            answers = self._agents.call(lambda agent: agent.verify.call_one(), timeout=bound)
            found: dict[str, Verified] = runtime.raise_first(answers)
            if repair and any(each.damaged for each in found.values()):
                self._check_damage(found)
                for name, each in found.items():
                    self._repair(name, each)
            task.advance(len(found))
        return found

    def _check_damage(self, found: dict[str, Verified]) -> None:
        """Give damaged pieces the paths that the trees of their hosts have for their files.

        Else a host got the bytes of any file of this machine that it names: of pieces of one byte,
        it knows all hashes.

        Raises:
            TransferError: a host names a piece that is in no file of its tree.
        """
        # Another client may have refreshed the mount since this one got its layout.
        standing = reattach.find(self._agents, self._settings.start_timeout, self._layout)
        trees = dict.fromkeys(found, standing.layout.tree)
        for other in standing.apart:
            trees |= dict.fromkeys(other.hosts, other.layout.tree)
        for name, each in found.items():
            each.damaged = [_known(name, damage, trees[name]) for damage in each.damaged]

    def _repair(self, name: str, found: Verified) -> None:
        """Repair damaged pieces on a host, and add repaired files to ``found``."""
        left = Counter(damage.path for damage in found.damaged)
        for damage in found.damaged:
            data = self._right_bytes(damage, name)
            if data is None:
                continue
            left[damage.path] -= 1
            call = self._agents[name].repair.call_one(damage, data, not left[damage.path])
            try:
                runtime.one(call, self._settings.fetch_timeout)
            except WheelmountError as error:
                log.warning("%s: %s", name, error.message)
                left[damage.path] += 1
            else:
                if not left[damage.path]:
                    found.repaired.append(os.fsdecode(damage.path))

    def _right_bytes(self, damage: Damage, damaged_on: str) -> bytes | None:
        """Return the right bytes of a damaged piece, from the directory or from another host."""
        place = _place(self.source, damage.path)
        data = right(place, damage) if place is not None else None
        for name, agent in self._agents.items():
            if data is None and name != damaged_on:
                with contextlib.suppress(WheelmountError):  # the next host may have the bytes
                    data = runtime.one(agent.piece.call_one(damage), self._settings.fetch_timeout)
        return data

    def status(self) -> dict[str, Any]:
        """Return, by host, the state of the mount, as in ``status --json``, or an error."""
        return self._agents.call(lambda agent: agent.status.call_one())

    def differs(self) -> str | None:
        """Return a setting of this process that the mount, made by another one, does not follow."""
        layout, settings = self._layout, self._settings
        if layout is not None and access.differs(layout.tree, self.source, settings.access):
            return "access"
        if settings.adapter in adapters.SERVERS:
            states = (each for each in self.status().values() if isinstance(each, dict))
            if any(each["adapter"] != settings.adapter for each in states):
                return "adapter"
        return None

    def close(self, *, force: bool = False) -> None:
        """Unmount on all hosts.

        Args:
            force: unmount also where the mount is in use; users keep the files they have open.

        Raises:
            MountError: the mount is in use on a host; the message names its users.
            HostError, WaitError: a host does not answer, and the mount may stay there. The other
                hosts have unmounted; ``close`` may be called again.
        """
        failed = self._close(list(self._agents), force=force)
        if not failed or force:
            self._end_delivery()
        runtime.raise_first(failed)

    def clear(self) -> None:
        """Unmount by force after a failure; warn of hosts where the mount stays, raise nothing."""
        _warn(self._close(list(self._agents), force=True))
        self._end_delivery()

    def _end_delivery(self) -> None:
        if self._delivery is not None:
            self._delivery.end()

    def _close(self, names: list[str], *, force: bool) -> dict[str, WheelmountError]:
        """Unmount on the named hosts; return errors by host where the mount stays, or may stay."""
        closed = self._agents.call(lambda agent: agent.close.call_one(force), names)
        failed = runtime.errors(closed)
        if self._delivery is not None:
            self._delivery.note(closed)
        (self._agents.forget if self._ending else self._agents.dismiss)(
            closed.keys() - failed.keys()
        )
        unsure: set[str] = set()
        silent = {n for n, error in failed.items() if not isinstance(error, MountError)}
        if self._ending:
            lost = silent
        elif force:
            lost = self._find_lost(silent)
        else:  # a host may be out of reach, or too slow to answer, and still have the mount
            lost = self._find_lost(n for n in silent if isinstance(failed[n], HostError))
            unsure = self._agents.may_run(lost)
        self._agents.forget(lost)
        if not self._keep:
            for name in lost - unsure:
                log.warning("%s is lost; its mount ends with it", name)
                del failed[name]
        for name, error in failed.items():
            if name in lost or isinstance(error, WaitError):
                error.hint = "the mount may stay there: run `wheelmount umount` on that host"
        return failed

    def release(self) -> None:
        """Stop the agents; the directory stays mounted."""
        self._agents.dismiss(self._agents)

    async def arrived(self, timeout: float | None = None) -> None:
        """Wait as ``wait`` does, without blocking the running event loop."""
        await asyncio.to_thread(self.wait, timeout)

    async def __aenter__(self) -> RemoteMount:
        await runtime.in_thread(self.open, self.clear)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.__exit__, *exc)

    def __enter__(self) -> RemoteMount:
        self.open()
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        self._ending = self.killed
        try:
            self.close()
        except WheelmountError as error:
            log.warning("%s; unmounting by force", error.message)
            if kind is None:
                self.close(force=True)
            else:  # the exception of the context goes on
                self.clear()


def _known(host: str, damage: Damage, tree: Tree) -> Damage:
    """Return a damaged piece with the path that a tree has for its file.

    Raises:
        TransferError: the piece is in no file of the tree.
    """
    inode = tree.inodes.get(damage.number)
    begin, end = damage.offset, damage.offset + damage.length
    if inode is None or not inode.is_file or not 0 <= begin <= end <= inode.size:
        raise TransferError(
            f"{host} names a damaged piece that is in no file of the mount: bytes {begin} to {end} "
            f"of file {damage.number}",
            hint="verify again if the mount was refreshed meanwhile; else look at that host",
        )
    return replace(damage, path=inode.path)


def _place(source: str, path: bytes) -> bytes | None:
    """Return the path of a file of a directory; None if it is elsewhere, as behind a link.

    A client that took a mount over has the tree, with its paths, from a host.
    """
    folder = Path(source).resolve()
    place = folder / os.fsdecode(path)
    inside = place.is_relative_to(folder) and place.parent.resolve() == place.parent
    return os.fsencode(place) if inside else None


def _warn(failed: dict[str, WheelmountError]) -> None:
    """Warn of hosts where a mount could not be removed."""
    for name, error in failed.items():
        log.warning("the mount stays on %s: %s", name, error.message)
