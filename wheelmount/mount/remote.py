"""``remotemount``: a directory of the client, read-only on every host."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

from wheelmount import config
from wheelmount.config import Settings
from wheelmount.errors import HostError, MountError, WaitError, WheelmountError
from wheelmount.hosts import engine
from wheelmount.hosts.host import Host, as_hosts
from wheelmount.mount import adoption, point
from wheelmount.mount.layout import Layout
from wheelmount.mount.ring import Ring
from wheelmount.mount.scan import scan
from wheelmount.mount.source import Source, file_digest
from wheelmount.mount.succession import Doubt, Succession
from wheelmount.mount.topology import routes
from wheelmount.mount.tree import Tree
from wheelmount.progress import SILENT, Progress, Task

log = logging.getLogger("wheelmount")

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
        self._mntpoint = mntpoint or self.source
        self._settings = settings
        self._progress = progress
        self._agents: dict[str, Any] = {}
        self._procs: dict[str, Any] = {}
        self._points: dict[str, str] = {}
        self._layout: Layout | None = None
        self._lost: set[int] = set()
        self._source: Source | None = None
        self._ring: Ring | None = None
        self._offer: Any = None
        self._delivery: threading.Thread | None = None
        self._outcome: dict[str, Any] = {}

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
        layout = Layout(self._scan(), self._settings.block_size)
        engine.start()
        try:
            self._spawn_agents()
            self._mount(layout, keep)
        except BaseException:
            self.close(force=True)
            raise
        self._begin(layout)

    def _begin(self, layout: Layout) -> None:
        self._layout = layout
        self._delivery = threading.Thread(target=self._deliver, args=(layout,), daemon=True)
        self._delivery.start()

    def _scan(self, before: Tree | None = None) -> Tree:
        with self._progress.task("scan", unit="files") as task:
            tree = scan(os.fsencode(self.source), before, self._lost)
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

    @property
    def delivering(self) -> bool:
        """Whether this process brings it its bytes, or did."""
        return self._delivery is not None

    def take(self, handles: Handles) -> None:
        """Go on with the agents of another process, for ``status`` or ``close``."""
        self._agents = dict(handles)

    def adopt(self, handles: Handles | None = None) -> None:
        """Take charge of a mount that stands, made by another process.

        What had not arrived is delivered, as after ``open``, where that process is gone.

        Args:
            handles: of that process, if its agents are still there.

        Raises:
            MountError: there is none on a host, or not all has arrived and ``handles`` are given.
            HostError, WaitError: a host is lost.
        """
        engine.start()
        try:
            if handles is None:
                self._spawn_agents()
            else:
                self.take(handles)
            standing = adoption.find(self._agents, self._settings.start_timeout)
            self._layout, self._lost = standing.layout, standing.lost
            self._points = standing.points
            if standing.missing and handles is not None:
                raise MountError(
                    f"{standing.missing} blocks of the mount have not arrived",
                    hint="wait for who delivers it, or unmount it and mount it again",
                )
            if standing.missing:
                self._resume(standing.layout)
        except BaseException:
            if handles is None:
                self.release()
            raise

    def _resume(self, layout: Layout) -> None:
        self._offer = made = self._make_offer(layout, layout.encode())
        ways = routes(self._agents, layout.size, self._settings.fanout)
        calls = {n: a.resume.call_one(made, ways[n]) for n, a in self._agents.items()}
        engine.raise_first(engine.gather(calls, self._settings.start_timeout))
        self._begin(layout)

    def _spawn_agents(self) -> None:
        from wheelmount.mount.agent import Agent

        for host in self.hosts:
            procs = host.mesh.spawn_procs({"procs": 1}, name="wheelmount")
            self._procs[host.name] = procs
            identity = f"{self.identity}-{host.name}"
            self._agents[host.name] = procs.spawn(
                "agent", Agent, host.name, self._settings, identity
            )

    def _mount(self, layout: Layout, keep: bool) -> None:
        from wheelmount.mount.agent import Order

        client = point.View.here()
        timeout = self._settings.start_timeout
        self._offer = self._make_offer(layout, layout.encode())
        views = engine.raise_first(self._call(lambda agent: agent.view.call_one(), timeout))
        names = [host.name for host in self.hosts]
        paths = point.place(
            self._mntpoint, names, [views[name] for name in names], self.source, client
        )
        self._points = dict(zip(names, paths, strict=True))
        orders = {
            name: Order(self.source, path, path == self.source and views[name] != client, keep)
            for name, path in self._points.items()
        }
        ways = routes(self._agents, layout.size, self._settings.fanout)
        calls = {
            name: agent.open.call_one(orders[name], self._offer, ways[name])
            for name, agent in self._agents.items()
        }
        engine.raise_first(engine.gather(calls, timeout + self._settings.fetch_timeout))

    def _make_offer(self, layout: Layout, description: bytes) -> Any:
        """Offer a layout and its bytes to the hosts."""
        from wheelmount.mount.transfer import offer

        settings = self._settings
        self._source = Source(os.fsencode(self.source), layout)
        self._ring = Ring(self._source, slots=settings.ring, lease=settings.fetch_timeout)
        with engine.quiet():  # Monarch looks for a GPU's library, and says that there is none
            made = offer(self._ring, description, self._arrived)
            engine.one(made.ready.call_one(), settings.start_timeout)
        return made

    def _lose(self, name: str, error: WheelmountError) -> None:
        """Tell the hosts that one of them is gone."""
        if isinstance(error, HostError):
            log.warning("%s is lost: %s", name, error.message)
            for other, agent in self._agents.items():
                if other != name:
                    with contextlib.suppress(Exception):
                        agent.lose.broadcast(name)

    @property
    def sent(self) -> int:
        """Bytes of files that left this process for hosts since the last refresh, or the start."""
        return self._ring.sent if self._ring is not None else 0

    def _deliver(self, layout: Layout) -> None:
        # Every block is bounded by the time it may take; so is the whole by the sum.
        bound = self._settings.fetch_timeout * (layout.blocks + 1)
        with self._progress.task("send", unit="B") as task:
            task.total(layout.size * len(self.hosts))
            self._task = task
            self._outcome = self._call(lambda agent: agent.deliver.call_one(), bound, self._lose)
            if not any(isinstance(end, WheelmountError) for end in self._outcome.values()):
                task.note(f"{layout.size / 1e6:.1f} MB to {len(self.hosts)} hosts")

    _task: Task | None = None

    def _arrived(self, _host: str, length: int) -> None:
        if self._task is not None:
            self._task.advance(length)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all bytes are on all hosts.

        Args:
            timeout: seconds; default as long as blocks keep arriving.

        Raises:
            WaitError: the time is over; delivery goes on.
            HostError, TransferError, StoreError: a host did not get everything; others did.
        """
        if self._delivery is None:
            raise MountError("the mount is not open", hint="call open() first")
        self._delivery.join(timeout)
        if self._delivery.is_alive():
            raise WaitError(f"not everything arrived within {timeout:g} s")
        engine.raise_first(self._outcome)

    def refresh(self) -> bool:
        """Have the mount show the directory as it is now.

        Each host shows the old tree until all bytes of the new one are there, and then the new one
        from one moment to the next. What is open stays what it was.

        Returns:
            Whether anything had changed.

        Raises:
            SourceError: the directory cannot be read.
            TransferError: a file changed while it was copied; hosts show what they did before.
            HostError, WaitError, StoreError: a host could not follow; the others have, if it
                was lost at the very end.
        """
        if self._layout is None:
            raise MountError("the mount is not open", hint="call open() first")
        if self._delivery is not None:
            self.wait()
        if self._source is not None:  # what was torn on the way to the hosts
            self._lost |= self._source.changed
            self._source = None
        before = self._layout
        succession = Succession(before.tree, self._scan(before.tree), self._lost)
        if not succession:
            return False
        layout = succession.settle(self._same(succession), self._settings.block_size)
        self._advance(layout, layout.encode(before))
        self._layout, self._lost = layout, set()
        return True

    def _same(self, succession: Succession) -> list[Doubt]:
        """Which files have the bytes that all hosts have of an earlier one."""
        if not succession.doubts:
            return []
        wanted = sorted({doubt.earlier for doubt in succession.doubts})
        bound = self._settings.start_timeout + self._settings.fetch_timeout * len(wanted)
        with self._progress.task("compare", unit="files") as task:
            task.total(len(succession.doubts))
            answers = self._call(lambda agent: agent.digests.call_one(wanted), bound)
            theirs = engine.raise_first(answers).values()
            same = []
            for doubt in succession.doubts:
                mine = file_digest(os.fsencode(self.source) + b"/" + succession.path(doubt))
                if mine and all(digests[doubt.earlier] == mine for digests in theirs):
                    same.append(doubt)
                task.advance(1)
        return same

    def _advance(self, layout: Layout, description: bytes) -> None:
        """Have all hosts fetch a generation, and then all show it."""
        timeout = self._settings.start_timeout
        made = self._make_offer(layout, description)
        ways = routes(self._agents, layout.size, self._settings.fanout)
        bound = timeout + self._settings.fetch_timeout * (layout.blocks + 1)
        try:
            with self._progress.task("send", unit="B") as task:
                task.total(layout.size * len(self.hosts))
                self._task = task
                try:
                    calls = {
                        name: agent.prepare.call_one(made, ways[name])
                        for name, agent in self._agents.items()
                    }
                    engine.raise_first(engine.gather(calls, bound, self._lose))
                except BaseException:
                    self._call(lambda agent: agent.abandon.call_one(), timeout)
                    raise
                engine.raise_first(self._call(lambda agent: agent.advance.call_one(), timeout))
        finally:
            engine.stop_mesh(made)

    def keep(self) -> None:
        """Wait for all bytes, and let the mounts stay when this process ends."""
        self.wait()
        engine.raise_first(
            self._call(lambda agent: agent.keep.call_one(), self._settings.start_timeout)
        )

    def status(self) -> dict[str, Any]:
        """Where the mount stands on each host: a mapping as of ``Server.status``, or an error."""
        return self._call(lambda agent: agent.status.call_one(), self._settings.start_timeout)

    def close(self, *, force: bool = False) -> None:
        """Take it down on all hosts.

        Args:
            force: detach it from hosts where it is in use; users keep what they have open.

        Raises:
            MountError: it is in use on a host, and by whom.
        """
        results = self._call(
            lambda agent: agent.close.call_one(force), self._settings.start_timeout
        )
        busy = []
        for name, result in results.items():
            if isinstance(result, MountError):
                busy.append(result)
            else:
                self._dismiss(name, lost=isinstance(result, WheelmountError))
        if busy and not force:
            raise busy[0]
        if self._offer is not None:
            engine.stop_mesh(self._offer)
            self._offer = None
        if self._delivery is not None:
            self._delivery.join(self._settings.start_timeout)

    def release(self) -> None:
        """End the agents, and leave the mounts to themselves."""
        for name in list(self._agents):
            self._dismiss(name)

    def _dismiss(self, name: str, *, lost: bool = False) -> None:
        """End an agent; one of a host that is lost is ended already."""
        agent, procs = self._agents.pop(name), self._procs.pop(name, None)
        if lost:
            return
        if procs is not None:
            engine.stop_mesh(procs)
        else:  # another process started it
            with contextlib.suppress(WheelmountError):
                engine.one(agent.quit.call_one(), self._settings.start_timeout)

    def _call(
        self,
        call: Callable[[Any], Any],
        timeout: float,
        failed: Callable[[str, WheelmountError], object] = lambda _name, _error: None,
    ) -> dict[str, Any]:
        calls = {name: call(agent) for name, agent in self._agents.items()}
        return engine.gather(calls, timeout, failed)

    def __enter__(self) -> RemoteMount:
        self.open()
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            self.close()
        except WheelmountError as error:
            log.warning("%s; detaching it", error.message)
            self.close(force=True)
