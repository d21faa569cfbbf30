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
"""Seconds that hosts may take to read all they have; one that dies ends the wait at once."""

NAMED = 10
"""Files that an error names; the rest are counted."""

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
        progress: where to report.

    Returns:
        The mount, to be opened as a context manager or with ``open()``.
    """
    return RemoteMount(host_mesh, sourcepath, mntpoint, settings or config.load(), progress)


class RemoteMount:
    """One directory on several hosts; made by ``remotemount``."""

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
        """Whether this process brings it its bytes, or did."""
        self._mntpoint = mntpoint or self.source
        self._settings = settings
        self._progress = progress
        self._agents = Agents(self.identity, settings)
        self._points: dict[str, str] = {}
        self._layout: Layout | None = None
        self._lost: set[int] = set()
        self._behind: Set[str] = set()  # hosts that have a generation which they do not show yet
        self._apart: list[Apart] = []  # hosts that another client's refresh left, or took, alone
        self._parted: dict[str, WheelmountError] = {}  # why hosts were lost, until that is said
        self._keep = False
        self._delivery: Delivery | None = None

    @property
    def mntpoints(self) -> dict[str, str]:
        """Where it is mounted, by host."""
        return dict(self._points)

    def open(self, *, keep: bool = False) -> None:
        """Mount it on all hosts, and begin to deliver.

        Returns when the mounts stand and show all names; bytes follow, and a read waits for its
        own.

        Args:
            keep: let the mounts stay if this process is killed, with what has arrived; ``adopt``
                goes on then.

        Raises:
            SourceError: the directory cannot be read.
            InputError, MountError: the mount point cannot be used.
            UnavailableError: a host cannot mount FUSE file systems.
            StoreError: a host has no room for the bytes.
            HostError, WaitError: a host is lost. Whatever it is, nothing stays mounted.
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
        """Mount it on more hosts, as it is shown on the others.

        Returns when the mounts stand and show all names; bytes follow, from the other hosts in so
        far as they have them. ``wait`` waits for these hosts too. A file that was edited since it
        was brought to the others cannot be read on the new ones until ``refresh``.

        Args:
            host_mesh: as of ``remotemount``, or one host. One with the name of a host that is lost
                takes its place.

        Raises:
            InputError: a host has the mount already.
            MountError: the mount is not open.
            UnavailableError, StoreError, HostError, WaitError: as of ``open``. Nothing stays
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
        """Let go of hosts that are lost where others come that have their names."""
        if len(set(names)) < len(names):
            raise InputError("two of the hosts have the same name", hint="name them apart")
        present = [name for name in names if name in self._agents]
        gone = self._gone(present)
        for name in present:
            if name not in gone:
                raise InputError(f"{name} has the mount already", hint="add other hosts")
        self._part(gone)

    def _gone(self, names: Iterable[str]) -> set[str]:
        """Those of some hosts whose agents do not answer any more."""
        names = list(names)
        if not names:
            return set()
        return set(runtime.errors(self._agents.call(lambda agent: agent.view.call_one(), names)))

    def _part(self, names: Iterable[str]) -> None:
        """Let go of hosts that are lost: the mount is that of the others."""
        names = set(names)
        self._agents.forget(names)
        self._behind -= names
        for name in names:
            self._points.pop(name, None)
            if self._delivery is not None:
                self._delivery.forget(name)
        self.hosts = [host for host in self.hosts if host.name not in names]

    def _offer_again(self, layout: Layout) -> Delivery:
        """Offer all of a tree that hosts have, to others."""
        whole = Layout(layout.tree, self._block_size(layout.tree), identity=layout.identity)
        made = self._offer(whole)
        self._agents.call(lambda agent: agent.give.call_one(made.origin, whole.block_size))
        return made

    def _block_size(self, tree: Tree) -> int:
        device, fanout = rdma.usable(), self._settings.fanout
        best = topology.block_size(tree.size, len(self.hosts), fanout, device=device)
        return self._settings.block_size or best

    def _offer(self, layout: Layout, before: Layout | None = None) -> Delivery:
        root = os.fsencode(self.source)
        return Delivery(root, layout, self._settings, self._progress, before)

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
        """The agents, which another process may go on with."""
        return dict(self._agents)

    @property
    def mntpoint(self) -> str:
        """Where it was asked to be, on all hosts; see ``mntpoints``."""
        return self._mntpoint

    def take(self, handles: Handles) -> None:
        """Go on with the agents of another process, for ``status`` or ``close``."""
        self._agents.take(handles)

    def adopt(self, handles: Handles | None = None) -> None:
        """Take charge of a mount that stands, made by another process.

        What had not arrived is delivered, as after ``open``; that process must be gone then.

        Args:
            handles: of that process, if its agents are still there.

        Raises:
            MountError: there is none on a host.
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
        # Only a first generation is shown before all of it is there.
        whole = Layout(layout.tree, size, identity=layout.identity)
        self._delivery = made = self._offer(whole)
        ways = made.routes(self._agents)
        calls = {n: a.resume.call_one(made.origin, ways[n], size) for n, a in self._agents.items()}
        runtime.raise_first(runtime.gather(calls, self._settings.start_timeout))
        self._begin(made, list(self._agents))

    def _mount(self, names: list[str], made: Delivery) -> None:
        """Have the mount stand on some hosts that have agents but no mount yet."""
        from wheelmount.mount.host.agent import Order

        self._agents.greet()
        client = points.View.here()
        views = self._agents.call(lambda agent: agent.view.call_one())
        runtime.raise_first({name: views[name] for name in names})
        views = {name: view for name, view in views.items() if isinstance(view, points.View)}
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
        """Bytes of files that left this process for hosts since the last refresh, or the start."""
        return self._delivery.sent if self._delivery is not None else 0

    def wait(self, timeout: float | None = None, *, warn: bool = True) -> None:
        """Wait until all bytes are on all hosts.

        Args:
            timeout: seconds; default as long as blocks keep arriving.
            warn: log a warning that names the files of ``unreadable``.

        Raises:
            WaitError: the time is over; delivery goes on.
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
        All are known when ``wait`` returns; ``refresh`` brings those that can be read then.
        """
        if self._layout is None:
            return []
        numbers = self._lost | (self._delivery.changed if self._delivery is not None else set())
        inodes = self._layout.tree.inodes
        return sorted(os.fsdecode(inodes[number].path) for number in numbers if number in inodes)

    def shortfall(self) -> TransferError | None:
        """An error that names the files of ``unreadable``; None if there are none."""
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
        """Why hosts do not have all bytes, as far as that is known while it is mounted."""
        failed: dict[str, WheelmountError] = {}
        if self._delivery is not None:
            with contextlib.suppress(WaitError):  # they still arrive
                failed = self._delivery.failures(0)
        try:
            runtime.raise_first(failed)
        except WheelmountError as error:
            return error
        return self.shortfall()

    def refresh(self, *, warn: bool = True) -> bool:
        """Have the mount show the directory as it is now.

        Each host shows the old tree until all bytes of the new one are there, and then the new one
        from one moment to the next. What is open stays what it was. Files that cannot be read at
        the source are in ``unreadable`` then, and the mount follows with all others.

        Args:
            warn: log a warning that names the files of ``unreadable``.

        Returns:
            Whether anything had changed.

        Raises:
            SourceError: the directory cannot be read.
            TransferError: a file was edited while it was copied; hosts show what they did before.
            HostError: hosts are lost, and no longer part of the mount; the others have followed.
            WaitError, StoreError, MountError: a host could not follow; where it could not at the
                very end, the others have, and the next refresh has it follow first.
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
        """Have all hosts at the same generation, but those that are lost."""
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
        """What hosts show: ``layout``, unless another client has refreshed the mount."""
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
        """Go on without those of the hosts that failed which are lost.

        Raises:
            WheelmountError: why another failed, or if no host is left.
        """
        gone = self._gone(failed)
        runtime.raise_first({name: error for name, error in failed.items() if name not in gone})
        if len(gone) == len(self._agents):
            runtime.raise_first(failed)
        self._part(gone)
        self._parted |= {name: failed[name] for name in gone}

    def _follow(self, before: Layout) -> bool:
        """Bring the directory as it is now to all hosts; gives whether it differs."""
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
        """Hosts that show the same."""
        apart = {name for each in self._apart for name in each.hosts}
        return [name for name in self._agents if name not in apart]

    def _join(self, layout: Layout) -> bool:
        """Have hosts that show something else show this too; gives whether there were any."""
        inodes, any_apart = layout.tree.inodes, bool(self._apart)
        while self._apart:
            before, agents = self._apart[0].layout, self._agents.only(self._apart[0].hosts)
            if agents:
                new = inodes.keys() - before.tree.inodes.keys()
                fresh = {number for number in new if inodes[number].is_file}
                its = Layout(layout.tree, self._block_size(layout.tree), fresh, {}, layout.identity)
                made = self._offer(its, before)
                failed = made.advance(agents, self._gone)
                self._lost |= made.changed
                self._behind |= failed.keys() - self._gone(failed)
                self._pass_over(failed)
            del self._apart[0]
        return any_apart

    def _same(self, succession: Succession, agents: Agents) -> list[Doubt]:
        """Which files have the bytes that all of some hosts have of an earlier one."""
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
        """Wait for all bytes, and let the mounts stay when this process ends."""
        self.wait(warn=False)
        runtime.raise_first(self._agents.call(lambda agent: agent.keep.call_one()))
        self._keep = True

    def verify(self, *, repair: bool = False) -> dict[str, Verified]:
        """Compare all bytes that hosts show with the hashes with which they came.

        Args:
            repair: replace what differs by what other hosts have, or the directory if it still
                has it. Readers have the right bytes then, also of files that they have open.

        Returns:
            By host, what was found; ``wrong`` of it are the files that are still damaged.

        Raises:
            HostError, WaitError, MountError, StoreError: a host could not look.
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
        """The bytes of a piece of a file from the directory, or from a host that has them right."""
        data = right(os.fsencode(self.source) + b"/" + damage.path, damage)
        for name, agent in self._agents.items():
            if data is None and name != besides:
                with contextlib.suppress(WheelmountError):  # another may have them
                    data = runtime.one(agent.piece.call_one(damage), self._settings.fetch_timeout)
        return data

    def status(self) -> dict[str, Any]:
        """Where the mount stands on each host: a mapping as of ``Server.status``, or an error."""
        return self._agents.call(lambda agent: agent.status.call_one())

    def close(self, *, force: bool = False) -> None:
        """Take it down on all hosts.

        Args:
            force: detach it from hosts where it is in use; users keep what they have open.

        Raises:
            MountError: it is in use on a host, and by whom.
            HostError, WaitError: a host does not answer, and it may stay there. Wherever it could
                be taken down, it was; with the other hosts ``close`` may be called again.
        """
        failed = self._close(list(self._agents), force=force)
        if not failed or force:
            self._end_delivery()
        runtime.raise_first(failed)

    def clear(self) -> None:
        """Take it down whoever uses it, when something has failed; says where it stays after all.

        Raises nothing.
        """
        _warn(self._close(list(self._agents), force=True))
        self._end_delivery()

    def _end_delivery(self) -> None:
        if self._delivery is not None:
            self._delivery.end()

    def _close(self, names: list[str], *, force: bool) -> dict[str, WheelmountError]:
        """Take it down on some hosts; gives by host why it stays, or may stay, on some of them."""
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
        """End the agents, and leave the mounts to themselves."""
        self._agents.dismiss(self._agents)

    async def arrived(self, timeout: float | None = None) -> None:
        """``wait``, while the running loop goes on."""
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
    """Say where a mount stays that is to go."""
    for name, error in failed.items():
        log.warning("the mount stays on %s: %s", name, error.message)
