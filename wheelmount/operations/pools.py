"""The hosts of an operation: hosts started for it, or those of a session."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy as duplicate
from dataclasses import dataclass, field, replace
from functools import partial
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
from wheelmount.operations import cache, records
from wheelmount.operations.launch import Launch
from wheelmount.operations.records import MOUNTS, MountNote, mounts_of
from wheelmount.operations.site import Site
from wheelmount.progress import Progress, number_of

COMMANDS = "commands"
"""Key of the command actors among a session's handles; other keys are identities of mounts."""

ARRIVAL = 1.0
"""Longest wait for all bytes, in seconds, of a command whose working directory is in a mount. After
the last byte the kernel alone serves the mount, without FUSE, unless a command works there by then:
such a command keeps FUSE in place for as long as it runs."""

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

    def _remember(self, made: RemoteMount) -> None:
        """Have the results of commands tell what this mount lacks, in place of an earlier one.

        Also note that its source is used now, if it is a part of the cache.
        """
        cache.touch(Path(made.source), self._settings)
        others = [
            each
            for each in self._mounts
            if (each.source, each.mntpoint) != (made.source, made.mntpoint)
        ]
        self._mounts[:] = [*others, made]  # which a narrowed pool shares

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
        with runtime.watched(spec.checks):
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
        checks: whether they still run, as of ``runtime.watching``.
        token: their own, as others may run on the same machines.
    """

    pool: HostPool
    checks: runtime.Checks
    token: str = field(default_factory=partial(secrets.token_hex, 4))

    @property
    def lasting(self) -> str | None:
        """See ``HostSpec``."""
        return self.token if self.session is None else ""


@contextlib.contextmanager
def hold(site: Site, *, namespaces: bool) -> Iterator[Held]:
    """Keep hosts and their mounts for several operations.

    Args:
        site: the hosts.
        namespaces: as for ``at``; without, the mounts are ``visible``.

    Yields:
        Replaces the hosts of ``site`` during the context.
    """
    fields = {each.name: getattr(site.spec, each.name) for each in dataclasses.fields(HostSpec)}
    before = runtime.checks()
    with contextlib.ExitStack() as ends:
        pool = ends.enter_context(at(site, namespaces=namespaces, visible=not namespaces))
        if isinstance(pool, _Passing):
            pool = _Lasting(pool, ends)
        held = Held(**fields, pool=pool, checks=runtime.checks())
        with runtime.watched(before):  # other hosts may be used between the operations on these
            yield held


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
        self._remember(made)
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
        self._remember(made)
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

    Several processes may work on a session. Two kinds of locks keep them apart (decision 0074):

    - *the lock of the session*, held to read and change its record, to unmount, and by ``up`` and
      ``down``; never while bytes travel.
    - *the turn on a mount*, the lock ``delivery-IDENTITY``, held by the process that makes,
      refreshes or delivers the mount, until all bytes have arrived. It is only tried, never waited
      for, while the session is locked, so the two cannot wait for each other.

    A mount is noted, with its identity, before it is made, so that no other process makes it too. A
    lock ends with its process: a mount that is noted, whose agents are not and whose turn is free,
    was left half made, and is taken down. Unmounting does not wait for a turn, unless the agents
    are not noted yet; the process whose turn it is then finds the note gone.

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
        path = os.path.abspath(source)  # noqa: PTH100 - as remotemount does
        key = records.key(path, mntpoint or path)
        with contextlib.ExitStack() as turn:
            made = None
            while made is None:
                turn.close()  # of a mount that was gone, and is forgotten now
                new = MountNote(secrets.token_hex(4), path, mntpoint or path, os.getpid())
                note = self._take_turn(key, turn, new)
                if note is new:
                    made = self._make(key, note, make)
                else:
                    if make is not None:
                        make()
                    made = self._mounted(key, note, fixed=fixed)
            resumed = note is not new and made.delivering  # what a client left that was killed
            if not (note is new or resumed or fixed):
                self._refresh(key, made)
            self._remember(made)
            with self._delivery(key, made, turn, refresh=resumed):
                yield made

    def _take_turn(
        self,
        key: str,
        turn: contextlib.ExitStack,
        new: MountNote | None = None,
        *,
        unless: Callable[[], bool] = lambda: False,
    ) -> MountNote:
        """Wait until no other process makes, refreshes or delivers a mount; keep others from it.

        Args:
            key: of the mount.
            turn: others may go on when it is closed.
            new: noted if the session does not have the mount.
            unless: called while the session is locked; if it returns true, the wait ends although
                it is another process's turn.

        Returns:
            The session's note of the mount.

        Raises:
            MountError: the session does not have the mount, and ``new`` is not given.
            HostError: the session has ended.
            WaitError: another process still works on the mount.
        """
        session = self._session
        deadline = time.monotonic() + session.settings.start_timeout
        while True:
            with session.lock():
                record = session.read()
                found = mounts_of(record).get(key)
                note = found or new
                if note is None:
                    raise self._gone(key)
                file = session.directory / f"delivery-{note.identity}"
                lock = try_lock(file)
                if lock is not None:
                    turn.callback(os.close, lock)
                    turn.callback(file.unlink, missing_ok=True)  # before others can lock it
                if found is None:
                    self._write(record, key, note)
                own = note.client == os.getpid() and note.identity in session.handles()
                if lock is not None or own or unless():
                    return note
            if time.monotonic() > deadline:
                raise WaitError(
                    f"another process still delivers or refreshes {key}",
                    hint=f"wait for it, or end it: `fuser {file}` names it",
                )
            time.sleep(POLL_INTERVAL)

    def _make(
        self, key: str, note: MountNote, make: Callable[[], Tree | None] | None
    ) -> RemoteMount:
        """Make a mount that is noted already."""
        made = self._new(note)
        made.make = make
        try:
            with self._said_if_unmounted(key, made):
                made.open()
        except BaseException:
            self._forget(key, made.identity)
            raise
        return made

    def _refresh(self, key: str, made: RemoteMount) -> None:
        with self._said_if_unmounted(key, made):
            self.refreshed += made.refresh(warn=False)
        self._check_note(key, made)  # nothing had changed, so no host had anything to do

    def _delivery(
        self,
        key: str,
        made: RemoteMount,
        turn: contextlib.ExitStack,
        *,
        refresh: bool = False,
        stays: bool = False,
    ) -> AbstractContextManager[None]:
        """Deliver a mount, if this process does, and end its turn.

        Args:
            key: of the mount.
            made: the mount.
            turn: this process's turn on the mount.
            refresh: whether to refresh it first.
            stays: whether it stays as it is if this fails.

        Returns:
            A context for all that is done with the mount; after it, all bytes have arrived.
        """
        if made.delivering:
            return self._kept_once_whole(key, made, turn, refresh=refresh, stays=stays)
        turn.close()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _kept_once_whole(
        self, key: str, made: RemoteMount, turn: contextlib.ExitStack, *, refresh: bool, stays: bool
    ) -> Iterator[None]:
        """Leave a mount to other clients as soon as all its bytes have arrived.

        After the context they have arrived. If it fails before that, the mount is taken down, or
        stays with what has arrived.

        Args:
            key: of the mount.
            made: the mount, which this process delivers.
            turn: this process's turn on the mount, which then ends.
            refresh: whether to refresh it first.
            stays: whether it stays if this fails.
        """
        session, once = self._session, threading.Lock()
        kept = failed = False

        def keep() -> None:
            nonlocal kept
            with self._said_if_unmounted(key, made):
                made.wait(warn=False)
                with once:
                    if kept or failed:
                        return
                    self._check_note(key, made)
                    made.keep()
                    kept = True
            # It stays whatever the note says: the next client finds that all bytes are there.
            with contextlib.suppress(WheelmountError, OSError), session.lock():
                self._note(key, made)
            turn.close()

        checks = runtime.checks()

        def keep_early() -> None:
            # An error is raised by ``keep`` below.
            with contextlib.suppress(WheelmountError), runtime.watched(checks):
                keep()

        early = threading.Thread(target=keep_early, daemon=True)
        try:
            with session.lock():
                self._note(key, made, client=os.getpid())
            if refresh:
                self._refresh(key, made)
            early.start()
            yield
            if not kept:
                keep()
        except BaseException:
            with once:
                failed = True
            if not kept and not stays:
                made.clear()
                self._forget(key, made.identity)
            raise
        finally:
            if early.ident is not None:
                early.join()

    def unmount(self, identity: str, *, force: bool) -> None:
        """Unmount one of the session's mounts.

        Args:
            identity: of the mount.
            force: unmount even if the mount is in use.

        Raises:
            MountError: a host's mount is in use; the message names the processes.
            HostError: a host is lost, and the mount may stay there; the session forgets that host.
            WaitError: a host does not answer, or another process still makes the mount.
        """
        session = self._session
        key = self._key_of(identity)
        if key is None:
            return

        def reachable() -> bool:
            return identity in session.handles()

        with contextlib.ExitStack() as turn:
            if not reachable():  # it is being made, or the command that made it was killed
                with contextlib.suppress(MountError):  # it was given up
                    self._take_turn(key, turn, unless=reachable)
            with session.lock():
                note = mounts_of(session.read()).get(key)
                if note is None or note.identity != identity:
                    return
                mount = self._new(note)
                try:
                    mount.take(session.handles().get(identity))
                    mount.close(force=force)
                finally:
                    if mount.handles:  # the mount stays on these hosts
                        session.keep(session.handles() | {identity: mount.handles})
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
        key = self._key_of(identity)
        if key is None:
            raise self._gone(identity)
        with contextlib.ExitStack() as turn:
            note = self._take_turn(key, turn)
            handles = self._session.handles().get(identity)
            if note.identity != identity or handles is None:  # taken down meanwhile, or half made
                raise self._gone(identity)
            mount = self._new(note)
            mount.adopt(handles)
            with self._delivery(key, mount, turn, stays=True):
                return mount.verify(repair=repair), mount.mntpoints

    def _key_of(self, identity: str) -> str | None:
        """Return the key of a mount that the session has."""
        notes = mounts_of(self._session.read())
        return next((key for key, note in notes.items() if note.identity == identity), None)

    def _gone(self, what: str) -> MountError:
        return MountError(f"session {self._session.name} no longer has the mount {what}")

    def _new(self, note: MountNote) -> RemoteMount:
        return RemoteMount(
            self.hosts,
            note.source,
            note.mntpoint,
            self._settings,
            self._progress,
            identity=note.identity,
        )

    def _mounted(self, key: str, note: MountNote, *, fixed: bool) -> RemoteMount | None:
        """Return the mount that an earlier command left; None if it is gone, or incomplete."""
        mount = self._new(note)
        handles = self._session.handles().get(note.identity)
        reason = None
        if handles is None:
            reason = "the command that made it was killed"
        elif len(handles) < len(self.hosts.names):
            reason = "some hosts have it no more"
        else:
            try:
                mount.adopt(handles, fixed=fixed)
            except MountError as error:
                reason = error.message
        if reason is None:
            return mount
        self._progress.log(f"mounting {note.source} anew: {reason}")
        mount.take(handles)
        mount.clear()
        with self._session.lock():
            self._drop(key, note.identity)
        return None

    @contextlib.contextmanager
    def _said_if_unmounted(self, key: str, mount: RemoteMount) -> Iterator[None]:
        """If the context fails because another command unmounted a mount, say so."""
        try:
            yield
        except WheelmountError:
            self._check_note(key, mount)
            raise

    def _check_note(self, key: str, mount: RemoteMount) -> None:
        """Check that the session still has a mount.

        Raises:
            MountError: another command unmounted it.
            HostError: the session has ended.
        """
        note = mounts_of(self._session.read()).get(key)
        if note is None or note.identity != mount.identity:
            raise MountError(
                f"another command unmounted {mount.source} while its bytes arrived",
                hint="run it again",
            )

    def _note(self, key: str, mount: RemoteMount, client: int | None = None) -> None:
        """Note the agents of a mount, and who delivers it; the session must be locked.

        Raises:
            MountError: another command unmounted it.
        """
        self._check_note(key, mount)
        session, record = self._session, self._session.read()
        session.keep(session.handles() | {mount.identity: mount.handles})
        note = MountNote(mount.identity, mount.source, mount.mntpoint, client)
        self._write(record, key, note)

    def _write(self, record: Record, key: str, note: MountNote) -> None:
        record.notes.setdefault(MOUNTS, {})[key] = dataclasses.asdict(note)
        self._session.write(record)

    def _forget(self, key: str, identity: str) -> None:
        """Drop a mount after an error, which counts."""
        with contextlib.suppress(HostError, WaitError), self._session.lock():
            self._drop(key, identity)

    def _drop(self, key: str, identity: str) -> None:
        """Have the session forget a mount; it must be locked."""
        session = self._session
        record, handles = session.read(), session.handles()
        note = mounts_of(record).get(key)
        if note is not None and note.identity == identity:  # not one made since
            del record.notes[MOUNTS][key]
        handles.pop(identity, None)
        session.write(record)
        session.keep(handles)
