"""``remotemount``: a directory of the client, read-only on every host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Set
from typing import Any

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
from wheelmount.mount.host import reattach
from wheelmount.mount.host.reattach import Apart
from wheelmount.mount.kernel import points
from wheelmount.mount.snapshot import access
from wheelmount.mount.snapshot.diff import Doubt, Succession
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.source import file_digest, unreadable
from wheelmount.mount.snapshot.tree import Tree
from wheelmount.mount.store.verify import Damage, Verified, right
from wheelmount.mount.transfer import topology
from wheelmount.progress import SILENT, Progress

log = logging.getLogger("wheelmount")

VERIFY_TIMEOUT = 24 * 3600.0
"""Seconds that hosts may take to read their whole store; a dead host ends the wait at once."""

NAMED = 10
"""Number of files that an error names; others are counted."""

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
            ...                     # the names are there; bytes arrive, a read waits for its own
            mount.wait()            # all bytes are there

    In a running loop (a notebook, an actor) ``async with`` and ``await mount.arrived()`` do the
    same and let the loop go on.

    Args:
        host_mesh: hosts of ``wheelmount.hosts``, or a Monarch ``HostMesh``.
        sourcepath: the directory.
        mntpoint: absolute path on the hosts; default the source's own. ``{host}`` in it becomes
            the host's name. Where hosts share one view of the file system (several on one
            machine, without namespaces of their own) and the path does not tell them apart, the
            host's name is added to it.
        settings: default those of the environment and ``pyproject.toml``.
        progress: receives the progress of delivery.

    Returns:
        The mount, to be opened as a context manager or with ``open()``.
    """
    return RemoteMount(host_mesh, sourcepath, mntpoint, settings or config.load(), progress)


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
        """Name of the mount; that on a host is this and the host's name."""
        self.skipped: list[bytes] = []
        """Paths of the source that are not shown: sockets, pipes and devices."""
        self.delivering = False
        """Whether this process delivers the bytes, or has delivered them."""
        self._mntpoint = mntpoint or self.source
        self._settings = settings
        self._progress = progress
        self._agents = Agents(self.identity, settings)
        self._points: dict[str, str] = {}
        self._racks = topology.named_racks(settings.racks)
        self._layout: Layout | None = None
        self._lost: set[int] = set()
        self._behind: Set[str] = set()  # hosts with a generation that they do not show yet
        self._apart: list[
            Apart
        ] = []  # hosts that another client's refresh left out, or refreshed alone
        self._parted: dict[
            str, WheelmountError
        ] = {}  # errors of lost hosts that are not reported yet
        self._keep = False
        self._delivery: Delivery | None = None

    @property
    def mntpoints(self) -> dict[str, str]:
        """Mount points by host."""
        return dict(self._points)

    def open(self, *, keep: bool = False) -> None:
        """Mount the directory on all hosts, and begin to deliver its bytes.

        Returns when all mounts show all names; bytes follow, and a read waits for its
        own.

        Args:
            keep: keep the mounts, with the bytes that have arrived, if this process is killed;
                ``adopt`` continues the delivery then.

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
            self._agents.spawn(self.hosts)  # they start while the tree is read
            tree = self._scan()
            layout = Layout(tree, self._block_size(tree))
            self._delivery = made = self._offer(layout)
            self._mount([host.name for host in self.hosts], made)
        except BaseException:
            self.clear()
            raise
        self._layout = layout
        self._begin(made, list(self._agents))

    def add(self, host_mesh: Any) -> None:
        """Mount the directory on more hosts, as the others show it.

        Returns when the new mounts show all names; bytes follow, from the other hosts as
        far as they have them. ``wait`` waits for these hosts too. A file that was edited after it
        was sent to the others cannot be read on the new hosts until ``refresh``.

        Args:
            host_mesh: as for ``remotemount``, or one host. A host with the name of a lost host
                takes its place.

        Raises:
            InputError: a host has the mount already.
            MountError: the mount is not open.
            UnavailableError, StoreError, HostError, WaitError: as ``open`` raises. Nothing stays
                mounted on any of the new hosts; the others keep what they have.
        """
        if self._layout is None:
            raise MountError("the mount is not open", hint="call open() first")
        hosts = [host_mesh] if isinstance(host_mesh, Host) else as_hosts(host_mesh)
        names = [host.name for host in hosts]
        self._make_way(names)
        before, layout = self._layout, self._current(self._layout)
        if self._apart:
            raise MountError("its hosts do not all show the same", hint="refresh the mount first")
        if self._delivery is None or self._delivery.ended or layout is not before:
            if self._delivery is not None:
                self._delivery.end()
            self._delivery = self._offer_again(layout)
        try:
            self._agents.spawn(hosts)
            self._mount(names, self._delivery)
        except BaseException:
            _warn(self._close(names, force=True))
            for name in names:
                self._points.pop(name, None)
            raise
        self.hosts = [host for host in self.hosts if host.name not in names] + hosts
        self._begin(self._delivery, names)

    def _make_way(self, names: list[str]) -> None:
        """Drop lost hosts that new hosts of the same names replace."""
        if len(set(names)) < len(names):
            raise InputError("two of the hosts have the same name", hint="name them apart")
        present = [name for name in names if name in self._agents]
        gone = self._gone(present)
        for name in present:
            if name not in gone:
                raise InputError(f"{name} has the mount already", hint="add other hosts")
        self._part(gone)

    def _gone(self, names: Iterable[str]) -> set[str]:
        """Return the named hosts whose agents do not answer any more."""
        names = list(names)
        if not names:
            return set()
        return set(runtime.errors(self._agents.call(lambda agent: agent.view.call_one(), names)))

    def _part(self, names: Iterable[str]) -> None:
        """Drop lost hosts from the mount; the other hosts go on."""
        names = set(names)
        self._agents.forget(names)
        self._behind -= names
        for name in names:
            self._points.pop(name, None)
            if self._delivery is not None:
                self._delivery.forget(name)
        self.hosts = [host for host in self.hosts if host.name not in names]

    def _offer_again(self, layout: Layout) -> Delivery:
        """Offer a tree that hosts have already to other hosts, whole."""
        whole = Layout(layout.tree, self._block_size(layout.tree), identity=layout.identity)
        made = self._offer(whole, read_before=True)
        self._agents.call(lambda agent: agent.give.call_one(made.origin, whole.block_size))
        return made

    def _block_size(self, tree: Tree) -> int:
        device = self._settings.transport != "tcp" and rdma.usable()
        fanout = self._settings.fanout
        best = topology.block_size(tree.size, len(self.hosts), fanout, device=device)
        return self._settings.block_size or best

    def _offer(
        self, layout: Layout, before: Layout | None = None, *, read_before: bool = False
    ) -> Delivery:
        root, settings = os.fsencode(self.source), self._settings
        return Delivery(
            root, layout, settings, self._progress, before,
            read_before=read_before, racks=self._racks,
        )  # fmt: skip

    def _begin(self, made: Delivery, names: list[str]) -> None:
        self.delivering = True
        made.begin(names, self._agents)

    def _scan(self, before: Tree | None = None, lost: Set[int] = frozenset()) -> Tree:
        with self._progress.task("scan", unit="files") as task:
            tree = scan(os.fsencode(self.source), before, lost)
            access.limit(tree, self.source, self._settings.access, before)
            task.advance(tree.files)
            task.note(f"{tree.files} files, {tree.size >> 20} MiB")
        self.skipped = tree.skipped
        for path in tree.skipped:
            log.warning("not mounted, no file: %s", os.fsdecode(path))
        return tree

    @property
    def handles(self) -> Handles:
        """References to the agents, which another process may use."""
        return dict(self._agents)

    @property
    def mntpoint(self) -> str:
        """The requested mount point, with ``{host}`` in it; ``mntpoints`` has each host's own."""
        return self._mntpoint

    def take(self, handles: Handles) -> None:
        """Use the agents of another process, for ``status`` or ``close``."""
        self._agents.take(handles)

    def adopt(self, handles: Handles | None = None, *, fixed: bool = False) -> None:
        """Take over an existing mount that another process made.

        Missing bytes are delivered, as after ``open``. The other process must have ended.

        Args:
            handles: the other process's agents, if they still run.
            fixed: the directory never changes. If all its bytes have arrived, the tree is not
                fetched from a host, and the mount cannot be refreshed by this process.

        Raises:
            MountError: a host has no such mount.
            HostError, WaitError: a host is lost.
        """
        runtime.start()
        self._keep = True
        try:
            if handles is None:
                self._agents.spawn(self.hosts)
            else:
                self._agents.take(handles)
            self._agents.greet()
            if fixed:
                found = reattach.ask(self._agents, self._settings.start_timeout)
                if reattach.is_whole(found.values()):
                    self._points = {name: each.mntpoint for name, each in found.items()}
                    return
            standing = reattach.find(self._agents, self._settings.start_timeout)
            self._layout, self._lost = standing.layout, standing.lost
            self._points, self._apart = standing.points, standing.apart
            if standing.missing:
                self._resume(standing.layout, standing.missing)
        except BaseException:
            if handles is None:
                self.release()
            raise

    def _resume(self, layout: Layout, size: int) -> None:
        # Only a first generation is shown before all its bytes are there.
        whole = Layout(layout.tree, size, identity=layout.identity)
        self._delivery = made = self._offer(whole, read_before=True)
        ways = made.routes(self._agents)
        calls = {n: a.resume.call_one(made.origin, ways[n], size) for n, a in self._agents.items()}
        runtime.raise_first(runtime.gather(calls, self._settings.start_timeout))
        self._begin(made, list(self._agents))

    def _mount(self, names: list[str], made: Delivery) -> None:
        """Mount on the named hosts, which have agents but no mount yet."""
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
        ways = made.routes({name: self._agents[name] for name in views}, later)
        calls = {}
        for name in names:
            self._points[name] = path = places[name]
            cover = path == self.source and views[name] != client
            order = Order(self.source, path, cover, self._keep)
            calls[name] = self._agents[name].open.call_one(order, made.origin, ways[name])
        settings = self._settings
        runtime.raise_first(runtime.gather(calls, settings.start_timeout + settings.fetch_timeout))

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
            WaitError: the time-out ran out; delivery goes on.
            HostError, TransferError, StoreError: a host did not get everything; others did.
        """
        if self._delivery is None:
            raise MountError("the mount is not open", hint="call open() first")
        self._delivery.wait(timeout)
        if warn and (error := self.shortfall()):
            log.warning("%s", error.message)

    @property
    def unreadable(self) -> list[str]:
        """Files whose bytes hosts do not have, in order; reading them there is an error.

        They could not be read at the source, or were edited or truncated after the mount was made.
        The list is complete when ``wait`` returns. ``refresh`` sends those that can be read again.
        """
        if self._layout is None:
            return []
        numbers = self._lost | (self._delivery.changed if self._delivery is not None else set())
        inodes = self._layout.tree.inodes
        return sorted(os.fsdecode(inodes[number].path) for number in numbers if number in inodes)

    def shortfall(self) -> TransferError | None:
        """Return an error that names the files of ``unreadable``; None if there are none."""
        names = self.unreadable
        if not names:
            return None
        count = "1 file" if len(names) == 1 else f"{len(names)} files"
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return TransferError(
            f"{count} of {self.source} cannot be read on the hosts: {', '.join(names[:NAMED])}"
            f"{more}; edited while being copied, or not readable here",
            hint="refresh the mount when they can be read and stay as they are",
        )

    def failure(self) -> WheelmountError | None:
        """Return why hosts do not have all bytes, as far as it is known now; None if they may."""
        failed: dict[str, WheelmountError] = {}
        if self._delivery is not None:
            with contextlib.suppress(WaitError):  # bytes still arrive
                failed = self._delivery.failures(0)
        try:
            runtime.raise_first(failed)
        except WheelmountError as error:
            return error
        return self.shortfall()

    def refresh(self, *, warn: bool = True) -> bool:
        """Update the mount to the current state of the directory.

        Each host shows the old tree until all bytes of the new one are there, then changes over
        in one step. Open files keep their bytes. Files that cannot be read at
        the source are in ``unreadable`` afterwards; all others are refreshed.

        Args:
            warn: log a warning that names the files of ``unreadable``.

        Returns:
            Whether anything had changed.

        Raises:
            SourceError: the directory cannot be read.
            TransferError: a file was edited while it was copied; hosts show the old tree.
            HostError: hosts are lost and dropped from the mount; the others show the new tree.
            WaitError, StoreError, MountError: a host could not change over. If only the last step
                failed, the others show the new tree, and the next refresh begins with this host.
        """
        if self._layout is None:
            raise MountError("the mount is not open", hint="call open() first")
        self._settle()
        changed = self._follow(self._current(self._layout))
        if warn and (error := self.shortfall()):
            log.warning("%s", error.message)
        lost, self._parted = self._parted, {}
        if lost:
            raise HostError(
                f"{', '.join(lost)}: lost, and no longer part of the mount; the other hosts show "
                f"the directory as it is now ({next(iter(lost.values())).message})",
                hint="add() brings a host back",
            )
        return changed

    def _settle(self) -> None:
        """Bring all hosts that are not lost to the same generation."""
        failed: dict[str, WheelmountError] = {}
        if self._delivery is not None:
            failed = self._delivery.repair(self._agents)
            self._lost |= self._delivery.changed  # what was torn on the way to the hosts
        if self._behind:
            answers = self._agents.call(lambda agent: agent.advance.call_one(), self._behind)
            self._behind = runtime.errors(answers).keys()
            failed |= runtime.errors(answers)
        self._pass_over(failed)

    def _current(self, layout: Layout) -> Layout:
        """Return the layout that hosts show: the given one, unless another client refreshed."""
        answers = self._agents.call(lambda agent: agent.is_current.call_one())
        failed = runtime.errors(answers)
        self._pass_over({name: failed[name] for name in self._gone(failed)})
        if any(answer is False for answer in answers.values()):
            standing = reattach.find(self._agents, self._settings.start_timeout)
            self._layout, self._lost = standing.layout, standing.lost
            self._apart = standing.apart
            return standing.layout
        return layout

    def _pass_over(self, failed: dict[str, WheelmountError]) -> None:
        """Drop those of the failed hosts that are lost.

        Raises:
            WheelmountError: a host failed that is not lost, or no host is left.
        """
        gone = self._gone(failed)
        runtime.raise_first({name: error for name, error in failed.items() if name not in gone})
        if len(gone) == len(self._agents):
            runtime.raise_first(failed)
        self._part(gone)
        self._parted |= {name: failed[name] for name in gone}

    def _follow(self, before: Layout) -> bool:
        """Send the directory as it is now to all hosts; return whether it has changed."""
        inodes, root = before.tree.inodes, os.fsencode(self.source)
        # A number must be the same file on all hosts.
        other = {number for each in self._apart for number in each.other(before.tree)}
        lost = self._lost & inodes.keys()
        hopeless = {n for n in lost - other if unreadable(root, before.tree, n)}
        lost |= other
        tree = self._scan(before.tree, lost - hopeless)
        if not Succession(before.tree, tree, lost):
            return self._join(before)
        tree.take_as_new(hopeless & tree.inodes.keys())  # else their zeros would count as bytes
        succession = Succession(before.tree, tree, lost)
        agents = self._agents.only(self._together)
        layout = succession.settle(self._same(succession, agents), self._block_size(tree))
        made = self._offer(layout, before)
        failed = made.advance(agents, self._gone)
        if self._delivery is not None:
            self._delivery.end()
        self._delivery, self._layout, self._lost = made, layout, set()
        self._behind = failed.keys() - self._gone(failed)
        self._pass_over(failed)
        self._join(layout)
        return True

    @property
    def _together(self) -> list[str]:
        """Return the hosts that show the common tree."""
        apart = {name for each in self._apart for name in each.hosts}
        return [name for name in self._agents if name not in apart]

    def _join(self, layout: Layout) -> bool:
        """Have hosts that show another tree show this one; return whether there were any."""
        inodes, any_apart = layout.tree.inodes, bool(self._apart)
        while self._apart:
            before, agents = self._apart[0].layout, self._agents.only(self._apart[0].hosts)
            if agents:
                new = inodes.keys() - before.tree.inodes.keys()
                fresh = {number for number in new if inodes[number].is_file}
                its = Layout(layout.tree, self._block_size(layout.tree), fresh, {}, layout.identity)
                made = self._offer(its, before, read_before=True)
                failed = made.advance(agents, self._gone)
                self._lost |= made.changed
                self._behind |= failed.keys() - self._gone(failed)
                self._pass_over(failed)
            del self._apart[0]
        return any_apart

    def _same(self, succession: Succession, agents: Agents) -> list[Doubt]:
        """Return which files have the same bytes on all these hosts as an earlier file."""
        if not succession.doubts:
            return []
        wanted = sorted({doubt.earlier for doubt in succession.doubts})
        bound = self._settings.start_timeout + self._settings.fetch_timeout * len(wanted)
        with self._progress.task("compare", unit="files") as task:
            task.total(len(succession.doubts))
            answers = agents.call(lambda agent: agent.digests.call_one(wanted), timeout=bound)
            theirs = runtime.raise_first(answers).values()
            same = []
            for doubt in succession.doubts:
                mine = file_digest(os.fsencode(self.source) + b"/" + succession.path(doubt))
                if mine and all(digests[doubt.earlier] == mine for digests in theirs):
                    same.append(doubt)
                task.advance(1)
        return same

    def keep(self) -> None:
        """Wait for all bytes, then leave the mounts in place when this process ends."""
        self.wait(warn=False)
        runtime.raise_first(self._agents.call(lambda agent: agent.keep.call_one()))
        self._keep = True

    def verify(self, *, repair: bool = False) -> dict[str, Verified]:
        """Compare all bytes that hosts show with the hashes they arrived with.

        Args:
            repair: replace wrong bytes with right ones of other hosts, or of the directory if it
                still has them. Readers then get the right bytes, also from open files.

        Returns:
            The result of each host; its ``wrong`` lists files that are still damaged.

        Raises:
            HostError, WaitError, MountError, StoreError: a host could not compare its bytes.
        """
        if self._delivery is not None:
            runtime.raise_first(self._delivery.failures())
        with self._progress.task("verify", unit="hosts") as task:
            bound = self._settings.start_timeout + VERIFY_TIMEOUT
            answers = self._agents.call(lambda agent: agent.verify.call_one(), timeout=bound)
            found: dict[str, Verified] = runtime.raise_first(answers)
            if repair:
                for name, each in found.items():
                    self._repair(name, each)
            task.advance(len(found))
        return found

    def _repair(self, name: str, found: Verified) -> None:
        left = Counter(damage.path for damage in found.damaged)
        for damage in found.damaged:
            data = self._right(damage, name)
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

    def _right(self, damage: Damage, besides: str) -> bytes | None:
        """Return right bytes of a damaged piece, from the directory or from another host."""
        data = right(os.fsencode(self.source) + b"/" + damage.path, damage)
        for name, agent in self._agents.items():
            if data is None and name != besides:
                with contextlib.suppress(WheelmountError):  # another host may have them
                    data = runtime.one(agent.piece.call_one(damage), self._settings.fetch_timeout)
        return data

    def status(self) -> dict[str, Any]:
        """Return the state of the mount by host, as in ``status --json``, or an error."""
        return self._agents.call(lambda agent: agent.status.call_one())

    def close(self, *, force: bool = False) -> None:
        """Unmount on all hosts.

        Args:
            force: unmount also where the mount is in use; users keep the files they have open.

        Raises:
            MountError: the mount is in use on a host; the message names its users.
            HostError, WaitError: a host does not answer, and may keep the mount. Other hosts
                have unmounted; ``close`` may be called again.
        """
        failed = self._close(list(self._agents), force=force)
        if not failed or force:
            self._end_delivery()
        runtime.raise_first(failed)

    def clear(self) -> None:
        """Unmount by force after a failure, and warn of hosts where the mount stays.

        Raises nothing.
        """
        _warn(self._close(list(self._agents), force=True))
        self._end_delivery()

    def _end_delivery(self) -> None:
        if self._delivery is not None:
            self._delivery.end()

    def _close(self, names: list[str], *, force: bool) -> dict[str, WheelmountError]:
        """Unmount on the named hosts; return errors by host where the mount stays, or may stay."""
        closed = self._agents.call(lambda agent: agent.close.call_one(force), names)
        failed = runtime.errors(closed)
        self._agents.dismiss(closed.keys() - failed.keys())
        gone = self._gone(n for n, error in failed.items() if not isinstance(error, MountError))
        self._agents.forget(gone)
        for name in gone:
            if self._keep:
                failed[name].hint = f"it may stay mounted there: run `wheelmount umount` on {name}"
            else:
                log.warning("%s is lost; what is mounted there ends with it", name)
                del failed[name]
        return failed

    def release(self) -> None:
        """Stop the agents; the mounts stay."""
        self._agents.dismiss(self._agents)

    async def arrived(self, timeout: float | None = None) -> None:
        """Wait as ``wait`` does, without blocking the running event loop."""
        await asyncio.to_thread(self.wait, timeout)

    async def __aenter__(self) -> RemoteMount:
        await asyncio.to_thread(self.open)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.__exit__, *exc)

    def __enter__(self) -> RemoteMount:
        self.open()
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            self.close()
        except WheelmountError as error:
            log.warning("%s; detaching it", error.message)
            self.close(force=True)


def _warn(failed: dict[str, WheelmountError]) -> None:
    """Warn of hosts where a mount could not be removed."""
    for name, error in failed.items():
        log.warning("the mount stays on %s: %s", name, error.message)
