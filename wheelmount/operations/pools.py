"""The hosts of an operation: hosts started for it, or those of a session."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy as duplicate
from dataclasses import dataclass, replace
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError, MountError, WaitError, WheelmountError
from wheelmount.hosts import handshake, runtime
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Commands, Results
from wheelmount.hosts.host import Host, Hosts
from wheelmount.hosts.session import Record, Session
from wheelmount.hosts.spec import HostSpec
from wheelmount.lock import try_lock
from wheelmount.mount.client.remote import RemoteMount, remotemount
from wheelmount.mount.kernel import points
from wheelmount.mount.snapshot.tree import Tree
from wheelmount.mount.store.verify import Verified
from wheelmount.operations import records
from wheelmount.operations.launch import Launch
from wheelmount.operations.records import MOUNTS, MountNote, mounts_of
from wheelmount.operations.site import Site
from wheelmount.progress import Progress, number_of

COMMANDS = "commands"
"""Key of the command actors among a session's handles; other keys are identities of mounts."""

ARRIVAL = 1.0
"""Longest wait for all bytes, in seconds, of a command whose working directory is in a mount. After
the last byte the kernel alone serves the mount, without FUSE. A command that starts during that
change would be in a directory whose path the kernel no longer knows."""

POLL_INTERVAL = 0.1
"""Seconds between checks whether another process has finished."""


class HostPool(ABC):
    """Hosts on which an operation mounts directories and runs commands.

    Args:
        hosts: the hosts.
        only: names of the hosts that run commands; empty for all.
        commands: runs commands on the hosts.
        settings: in force.
        progress: told about each step.

    Attributes:
        chosen: the hosts that run commands.
    """

    def __init__(
        self,
        hosts: Hosts,
        only: Sequence[str],
        commands: Commands,
        settings: Settings,
        progress: Progress,
    ) -> None:
        self.hosts, self.commands = hosts, commands
        self.chosen = _chosen(hosts, only)
        self._settings, self._progress = settings, progress
        self._mounts: list[RemoteMount] = []

    def run(
        self,
        commands: Mapping[str, Command],
        step: str,
        launch: Launch | None = None,
    ) -> Results:
        """Run a command, or several copies of it, on each chosen host, and wait for all.

        The environment of each copy has its number among all copies (``WHEELMOUNT_RANK``), the
        number of all copies (``WHEELMOUNT_SIZE``) and its number on its host
        (``WHEELMOUNT_LOCAL_RANK``).

        Args:
            commands: by host.
            step: name of this step in progress output.
            launch: number of copies, input and destination of output; default one copy without
                input, whose output is in the results.

        Returns:
            Results by host, or, of several copies, by host and number (``host0:1``).
        """
        launch = launch or Launch()
        names = [host.name for host in self.chosen if host.name in commands]
        places = [(name, copy) for name in names for copy in range(launch.copies)]
        numbered, hosts = {}, {}
        for rank, (host, copy) in enumerate(places):
            command = commands[host]
            own = {
                "WHEELMOUNT_RANK": str(rank),
                "WHEELMOUNT_SIZE": str(len(places)),
                "WHEELMOUNT_LOCAL_RANK": str(copy),
                **command.environment,
            }
            left = command.collect  # of a container
            if left is None and launch.collect is not None:
                left = launch.collect.path
            name = host if launch.copies == 1 else f"{host}:{copy}"
            numbered[name] = replace(command, environment=own, collect=left)
            hosts[name] = host
        if launch.collect is not None:
            launch.collect.prepare(list(numbered))
        with self._progress.task(step, unit="host") as task:
            results = self.commands.run(
                numbered, launch.output, launch.stdin, launch.collect, hosts, launch.lent
            )
            task.advance(len(names))
        explain(self.hosts, results.values())
        failures = (mount.failure() for mount in self._mounts)
        results.shortfall = next(filter(None, failures), None)
        return results

    def places(self, mntpoint: str) -> dict[str, str]:
        """Return each host's path of a mount point with ``{host}`` or ``points.PRIVATE`` in it."""
        private = self.commands.private(self._settings.runtime_dir)
        return {
            host.name: points.within(mntpoint.replace("{host}", host.name), private[host.name])
            for host in self.chosen
        }

    def run_on_mounts(
        self,
        source: Path,
        mntpoint: str | None,
        command: Callable[[str, str], Command],
        step: str,
        launch: Launch | None = None,
    ) -> Results:
        """Mount a directory, and run a command on each host.

        Args:
            source: the directory.
            mntpoint: where hosts mount it.
            command: makes a host's command of its name and mount point.
            step: as for ``run``.
            launch: as for ``run``.

        Returns:
            Results as of ``run``; ``shortfall`` names files that could not be read.
        """
        with self.mount(source, mntpoint) as mount:
            commands = {name: command(name, path) for name, path in mount.mntpoints.items()}
            if any(each.cwd is not None for each in commands.values()):
                with contextlib.suppress(
                    WheelmountError
                ):  # a read of a missing byte fails by itself
                    mount.wait(ARRIVAL, warn=False)
            results = self.run(commands, step, launch)
        results.shortfall = results.shortfall or mount.shortfall()  # all of a session's arrive
        return results

    def narrowed(self, only: Sequence[str]) -> HostPool:
        """Return this pool with fewer hosts that run commands.

        Args:
            only: names of these hosts.

        Raises:
            InputError: there is no host of one of the names.
        """
        pool = duplicate(self)
        pool.chosen = _chosen(self.hosts, only)
        return pool

    @abstractmethod
    def mount(
        self,
        source: Path,
        mntpoint: str | None,
        *,
        fixed: bool = False,
        make: Callable[[], Tree | None] | None = None,
    ) -> AbstractContextManager[RemoteMount]:
        """Mount a directory, as it is now, on all hosts during the context.

        Args:
            source: the directory.
            mntpoint: where hosts mount it, as for ``remotemount``.
            fixed: the directory never changes, so that an existing mount needs no scan.
            make: makes the directory, if it is missing; see ``RemoteMount.make``.
        """


def check(only: Sequence[str], names: Sequence[str]) -> None:
    """Check that hosts of some names exist.

    Args:
        only: the names to check.
        names: names of all hosts; empty if they are not known yet.

    Raises:
        InputError: there is no host of one of the names.
    """
    unknown = [name for name in only if names and name not in names]
    if unknown:
        raise InputError(
            f"there is no host {', '.join(unknown)}", hint=f"hosts are {', '.join(names)}"
        )


def _chosen(hosts: Hosts, only: Sequence[str]) -> list[Host]:
    check(only, hosts.names)
    return [host for host in hosts if not only or host.name in only]


def explain(hosts: Hosts, errors: Iterable[object]) -> None:
    """Replace messages of errors by the reason why hosts were lost, if the scheduler knows it."""
    lost = [each for each in errors if isinstance(each, HostError) and each.hint is None]
    reason = None
    with contextlib.suppress(WheelmountError):  # what is to be explained says more
        reason = hosts.ended() if lost else None
    for error in lost:
        error.message = reason or error.message


@contextlib.contextmanager
def at(site: Site, *, namespaces: bool, visible: bool = False) -> Iterator[HostPool]:
    """Start hosts for one operation, or connect to those of a session.

    Args:
        site: the hosts.
        namespaces: give started hosts of this machine mount namespaces; those of a session have
            them.
        visible: whether what others start on the hosts has to see the mounts, or to be seen by
            later commands; see ``HostSpec.make``.

    Yields:
        The pool; started hosts end with the context.
    """
    spec, settings, progress = site.spec, site.settings, site.progress
    if isinstance(spec, Held):
        yield spec.pool if not spec.only else spec.pool.narrowed(spec.only)
        return
    if spec.session is not None:
        with join(Session(spec.session, settings), progress, spec.only) as standing:
            yield standing
        return
    made = spec.make(settings, namespaces=namespaces, visible=visible, progress=progress)
    check(spec.only, made.names)
    try:
        with (
            made as hosts,
            runtime.watching(hosts.check_lease),
            Commands(
                _chosen(hosts, spec.only), settings.start_timeout, killed=hosts.killed
            ) as commands,
        ):
            try:
                yield _Passing(hosts, spec.only, commands, settings, progress)
            except HostError as error:
                explain(hosts, [error])
                raise
    finally:
        runtime.stop(killed=made.killed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(HostSpec):
    """Hosts that run already, for several operations.

    Attributes:
        pool: the hosts.
    """

    pool: HostPool


@contextlib.contextmanager
def hold(site: Site, *, namespaces: bool) -> Iterator[Held]:
    """Keep hosts and their mounts for several operations.

    Args:
        site: the hosts.
        namespaces: as for ``at``; without, the mounts are ``visible``.

    Yields:
        Replaces the hosts of ``site`` during the context.
    """
    fields = {field.name: getattr(site.spec, field.name) for field in dataclasses.fields(HostSpec)}
    with contextlib.ExitStack() as ends:
        pool = ends.enter_context(at(site, namespaces=namespaces, visible=not namespaces))
        if isinstance(pool, _Passing):
            pool = _Lasting(pool, ends)
        yield Held(**fields, pool=pool)


class _Passing(HostPool):
    """A pool that unmounts at the end of each context."""

    def mount(
        self,
        source: Path,
        mntpoint: str | None,
        *,
        fixed: bool = False,  # noqa: ARG002 - it is not mounted yet
        make: Callable[[], Tree | None] | None = None,
    ) -> RemoteMount:
        settings, progress = self._settings, self._progress
        made = remotemount(self.chosen, source, mntpoint, settings=settings, progress=progress)
        made.killed, made.make = self.hosts.killed, make
        self._mounts.append(made)
        return made


class _Lasting(HostPool):
    """A pool that keeps its mounts, which are on all of its hosts, for later operations.

    Args:
        pool: the hosts.
        ends: unmounts when it is closed.
    """

    def __init__(self, pool: _Passing, ends: contextlib.ExitStack) -> None:
        vars(self).update(vars(pool))
        self._pool, self._ends = pool, ends
        self._standing: dict[tuple[str, str | None], RemoteMount] = {}

    @contextlib.contextmanager
    def mount(
        self,
        source: Path,
        mntpoint: str | None,
        *,
        fixed: bool = False,
        make: Callable[[], Tree | None] | None = None,
    ) -> Iterator[RemoteMount]:
        """Mount a directory, or refresh its mount; the mount stays after the context."""
        key = os.path.abspath(source), mntpoint  # noqa: PTH100 - as remotemount does
        made = self._standing.get(key)
        if made is None:
            made = self._ends.enter_context(self._pool.mount(source, mntpoint, make=make))
            self._standing[key] = made
        else:
            if make is not None:
                make()
            if not fixed:
                made.refresh(warn=False)
        self._mounts = [*(each for each in self._mounts if each is not made), made]
        yield made


@contextlib.contextmanager
def join(session: Session, progress: Progress, only: Sequence[str] = ()) -> Iterator[Standing]:
    """Connect to the hosts of a session during the context.

    Args:
        session: the session.
        progress: told about each step.
        only: names of the hosts that run commands; empty for all.

    Raises:
        InputError: there is no host of one of the names.
        HostError: there is no such session, or a host does not answer.
    """
    record = session.read()
    if difference := handshake.differ(record.notes.get(records.VERSIONS, {})):
        raise HostError(
            f"session {session.name} has {difference}",
            hint=f"`wheelmount down {session.name}`, then `wheelmount up`, makes it anew",
        )
    check(only, record.names)
    hosts = records.hosts_of(session, record)
    try:
        with runtime.to_stay(), runtime.watching(lambda: session.check(record)):
            hosts.attach()
            hosts_there = number_of(len(record.names), "host")
            progress.log(f"connected to session {session.name}: {hosts_there}")
            actors = session.handles()[COMMANDS]
            try:
                with Commands(list(hosts), session.settings.start_timeout, actors) as commands:
                    yield Standing(session, record, hosts, commands, progress, only)
            finally:
                hosts.settle()
    except HostError as error:
        if error.hint is None:
            error.message = f"session {session.name}: {error.message}"
            error.hint = f"if a host died, `wheelmount up --name {session.name}` makes it anew"
        raise


class Standing(HostPool):
    """Hosts of a session, which also keeps mounts.

    Args:
        session: the session.
        record: its record.
        hosts: its hosts.
        commands: runs commands on the hosts.
        progress: told about each step.
        only: names of the hosts that run commands; empty for all.

    Attributes:
        refreshed: number of mounts that a refresh changed.
    """

    def __init__(
        self,
        session: Session,
        record: Record,
        hosts: Hosts,
        commands: Commands,
        progress: Progress,
        only: Sequence[str] = (),
    ) -> None:
        super().__init__(hosts, only, commands, session.settings, progress)
        self.refreshed = 0
        self._session, self._record = session, record

    def run(
        self, commands: Mapping[str, Command], step: str, launch: Launch | None = None
    ) -> Results:
        """Run commands as ``HostPool.run``; ``shortfall`` also tells that the session was ended."""
        results = super().run(commands, step, launch)
        ended = (isinstance(each, WheelmountError) or each.code > 128 for each in results.values())
        if any(ended):  # maybe by `wheelmount down`, which has the lock until all is ended
            try:
                with contextlib.suppress(WaitError), self._session.lock():
                    self._session.check(self._record)
            except HostError as error:
                results.shortfall = error
        return results

    @contextlib.contextmanager
    def mount(
        self,
        source: Path,
        mntpoint: str | None,
        *,
        fixed: bool = False,
        make: Callable[[], Tree | None] | None = None,
    ) -> Iterator[RemoteMount]:
        """Mount a directory, or refresh its mount; the mount stays after the context."""
        session, path = self._session, os.path.abspath(source)  # noqa: PTH100 - as remotemount does
        key = records.key(path, mntpoint or path)
        with self._settled(key):
            if make is not None and key in mounts_of(session.read()):
                make()
            made = self._mounted(key, fixed=fixed)
            resumed = made is not None and made.delivering  # what a client left that was killed
            if made is None:
                made = self._new(path, mntpoint)
                made.make = make
                made.open()
            elif not (resumed or fixed):
                self.refreshed += made.refresh(warn=False)
            delivery = self._delivery(key, made, refresh=resumed)
        self._mounts.append(made)
        with delivery:
            yield made

    def _delivery(
        self, key: str, made: RemoteMount, *, refresh: bool = False, stays: bool = False
    ) -> AbstractContextManager[None]:
        """Have other processes leave a mount alone while this one delivers it, if it does.

        Must be called while the session is locked.

        Args:
            key: of the mount.
            made: the mount.
            refresh: whether to refresh it first.
            stays: whether it stays as it is if this fails.

        Returns:
            A context for all that is done with the mount; after it, all bytes have arrived.
        """
        if not made.delivering:
            return contextlib.nullcontext()
        lock = try_lock(self._lock_of(made.identity))
        self._note(key, made, client=os.getpid())
        return self._delivering(key, made, lock, refresh=refresh, stays=stays)

    @contextlib.contextmanager
    def _delivering(
        self, key: str, made: RemoteMount, lock: int | None, *, refresh: bool, stays: bool
    ) -> Iterator[None]:
        try:
            with self._kept_once_whole(key, made, refresh=refresh, stays=stays):
                yield
        finally:
            if lock is not None:
                self._lock_of(made.identity).unlink(missing_ok=True)
                os.close(lock)

    @contextlib.contextmanager
    def _kept_once_whole(
        self, key: str, made: RemoteMount, *, refresh: bool, stays: bool
    ) -> Iterator[None]:
        """Leave a mount to other clients as soon as all its bytes have arrived.

        After the context they have arrived. If it fails before that, the mount is taken down, or
        stays with what has arrived.

        Args:
            key: of the mount.
            made: the mount, which this process delivers.
            refresh: whether to refresh it first.
            stays: whether it stays if this fails.
        """
        session, turn = self._session, threading.Lock()
        kept = failed = False

        def keep() -> None:
            nonlocal kept
            made.wait(warn=False)
            with session.lock(), turn:
                if not kept and not failed:
                    note = mounts_of(session.read()).get(key)
                    if note is None or note.identity != made.identity:
                        raise MountError(
                            f"another command unmounted {made.source} while its bytes arrived",
                            hint="run it again",
                        )
                    made.keep()
                    self._note(key, made)
                    kept = True

        def keep_early() -> None:
            with contextlib.suppress(WheelmountError):  # ``keep`` below raises it
                keep()

        early = threading.Thread(target=keep_early, daemon=True)
        try:
            if refresh:
                self.refreshed += made.refresh(warn=False)
            early.start()
            yield
            if not kept:
                keep()
        except BaseException:
            with turn:
                failed = True
            if not kept and not stays:
                made.clear()
                with contextlib.suppress(HostError), session.lock():  # the session has ended
                    self._drop(key, made.identity)
            raise
        finally:
            if early.ident is not None:
                early.join()

    @contextlib.contextmanager
    def _settled(self, key: str) -> Iterator[None]:
        """Lock the session when no other process delivers this mount."""
        deadline = time.monotonic() + self._session.settings.start_timeout
        while True:
            with self._session.lock():
                note = mounts_of(self._session.read()).get(key)
                if note is None or not self._delivered_elsewhere(note):
                    yield
                    return
            if time.monotonic() > deadline:
                raise WaitError(
                    f"process {note.client} still delivers {key}", hint="wait for it, or end it"
                )
            time.sleep(POLL_INTERVAL)

    def _delivered_elsewhere(self, note: MountNote) -> bool:
        """Return whether another process delivers a mount: whether it has locked the delivery.

        Its number may belong to another process by now, or to one that has ended as a zombie.
        """
        if note.client in (None, os.getpid()):
            return False
        lock = try_lock(self._lock_of(note.identity))
        if lock is not None:
            os.close(lock)
        return lock is None

    def _lock_of(self, identity: str) -> Path:
        return self._session.directory / f"delivery-{identity}"

    def unmount(self, identity: str, *, force: bool) -> None:
        """Unmount one of the session's mounts.

        Args:
            identity: of the mount.
            force: unmount even if the mount is in use.

        Raises:
            MountError: a host's mount is in use; the message names the processes.
            HostError: a host is lost, and the mount may stay there; the session forgets that host.
            WaitError: a host does not answer.
        """
        with self._session.lock():
            for key, note in mounts_of(self._session.read()).items():
                if note.identity == identity:
                    mount = self._new(note.source, note.mntpoint, identity)
                    try:
                        handles = self._session.handles().get(identity)
                        if handles is None:  # the client was killed before it left them
                            mount.adopt()
                        else:
                            mount.take(handles)
                        mount.close(force=force)
                    finally:
                        if mount.handles:  # the mount stays on these hosts
                            self._session.keep(self._session.handles() | {identity: mount.handles})
                        else:
                            self._drop(key, identity)

    def verify(self, identity: str, *, repair: bool) -> tuple[dict[str, Verified], dict[str, str]]:
        """Verify one of the session's mounts.

        Args:
            identity: of the mount.
            repair: as for ``RemoteMount.verify``.

        Returns:
            Findings and mount points, by host.

        Raises:
            MountError: the session no longer has the mount.
            WaitError: another process still delivers it.
        """
        for key, found in mounts_of(self._session.read()).items():
            if found.identity != identity:
                continue
            with self._settled(key):
                note = mounts_of(self._session.read()).get(key)
                if note is None or note.identity != identity:  # taken down meanwhile
                    break
                mount = self._new(note.source, note.mntpoint, identity)
                mount.adopt(self._session.handles().get(identity))
                delivery = self._delivery(key, mount, stays=True)
            with delivery:
                return mount.verify(repair=repair), mount.mntpoints
        raise MountError(f"session {self._session.name} no longer has the mount {identity}")

    def _new(self, source: str, mntpoint: str | None, identity: str | None = None) -> RemoteMount:
        settings, progress = self._settings, self._progress
        return RemoteMount(self.hosts, source, mntpoint, settings, progress, identity=identity)

    def _mounted(self, key: str, *, fixed: bool) -> RemoteMount | None:
        """Return the mount that an earlier command left; None if it is gone, or incomplete."""
        note = mounts_of(self._session.read()).get(key)
        if note is None:
            return None
        mount = self._new(note.source, note.mntpoint, note.identity)
        handles = self._session.handles().get(note.identity)
        if handles is not None and len(handles) < len(self.hosts.names):
            self._progress.log(f"mounting {note.source} anew: some hosts have it no more")
            mount.take(handles)
            mount.clear()
            self._drop(key, note.identity)
            return None
        try:
            mount.adopt(handles, fixed=fixed)
        except MountError as error:
            self._progress.log(f"mounting {note.source} anew: {error.message}")
            mount.clear()
            self._drop(key, note.identity)
            return None
        return mount

    def _note(self, key: str, mount: RemoteMount, client: int | None = None) -> None:
        session, record = self._session, self._session.read()
        note = MountNote(mount.identity, mount.source, mount.mntpoint, client)
        record.notes.setdefault(MOUNTS, {})[key] = dataclasses.asdict(note)
        session.write(record)
        session.keep(session.handles() | {mount.identity: mount.handles})

    def _drop(self, key: str, identity: str) -> None:
        session = self._session
        record, handles = session.read(), session.handles()
        note = mounts_of(record).get(key)
        if note is not None and note.identity == identity:  # not one made since
            del record.notes[MOUNTS][key]
        handles.pop(identity, None)
        session.write(record)
        session.keep(handles)
