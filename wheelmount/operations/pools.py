"""Where a command works: on hosts of its own, or on those of a session."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy as duplicate
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError, MountError, WaitError, WheelmountError
from wheelmount.hosts import handshake, runtime
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Commands, Results
from wheelmount.hosts.host import Host, Hosts
from wheelmount.hosts.session import Session
from wheelmount.hosts.spec import HostSpec
from wheelmount.mount.client.remote import RemoteMount, remotemount
from wheelmount.mount.kernel import points
from wheelmount.mount.store.verify import Verified
from wheelmount.operations import records
from wheelmount.operations.launch import Launch
from wheelmount.operations.records import MOUNTS, MountNote, mounts_of
from wheelmount.progress import Progress

COMMANDS = "commands"
"""Key of the commands among a session's handles; the others are identities of mounts."""

ARRIVAL = 1.0
"""Seconds that a command whose working directory is in a mount waits for all bytes, at most. The
mount then changes from FUSE to the kernel alone before the command starts. A command that enters it
during the change would be in a directory whose path the kernel no longer knows."""

GLANCE = 0.1
"""Seconds between looks at whether another process is done."""


class HostPool(ABC):
    """Hosts to work on while a command lasts.

    Args:
        hosts: what they are.
        only: names of those that are to run commands; empty for all.
        commands: run commands there.
        progress: told about each step.

    Attributes:
        chosen: the hosts that run commands.
    """

    def __init__(
        self, hosts: Hosts, only: Sequence[str], commands: Commands, progress: Progress
    ) -> None:
        self.hosts, self.commands = hosts, commands
        self.chosen = _chosen(hosts, only)
        self._progress = progress
        self._mounts: list[RemoteMount] = []

    def run(
        self,
        commands: Mapping[str, Command],
        step: str,
        launch: Launch | None = None,
    ) -> Results:
        """Run a command on each chosen host, or several copies of it, and wait for all.

        Each finds its number among all in ``WHEELMOUNT_RANK``, how many there are in
        ``WHEELMOUNT_SIZE``, and its number on its host in ``WHEELMOUNT_LOCAL_RANK``. It is named
        by its host, and of several copies by that and its number there (``host0:1``).

        Args:
            commands: by host.
            step: what it is called where progress is shown.
            launch: where its output goes to and its input comes from; default to the results, and
                no input.
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
        with self._progress.task(step, unit="hosts") as task:
            results = self.commands.run(
                numbered, launch.output, launch.stdin, launch.collect, hosts, launch.lent
            )
            task.advance(len(names))
        explain(self.hosts, results.values())
        failures = (mount.failure() for mount in self._mounts)
        results.shortfall = next(filter(None, failures), None)
        return results

    def places(self, mntpoint: str, settings: Settings) -> dict[str, str]:
        """Where each host has, or will have, a mount point with ``{host}`` or ``point.PRIVATE``."""
        private = self.commands.private(settings.runtime_dir)
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
        """Mount a directory; run a command on each host, made of its name and mount point.

        See ``mount`` and ``run``.
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
        """The same hosts, of which fewer run commands.

        Args:
            only: names of those.

        Raises:
            InputError: there is no host of a name.
        """
        pool = duplicate(self)
        pool.chosen = _chosen(self.hosts, only)
        return pool

    @abstractmethod
    def mount(
        self, source: Path, mntpoint: str | None, *, fixed: bool = False
    ) -> AbstractContextManager[RemoteMount]:
        """A directory on all hosts as it is now; see ``remotemount``.

        Args:
            source: the directory.
            mntpoint: where hosts mount it.
            fixed: whether it never changes, and need not be looked through where it is mounted.
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
    """Add to errors why hosts were lost, if Slurm or another owner of the hosts knows."""
    lost = [each for each in errors if isinstance(each, HostError) and each.hint is None]
    reason = None
    with contextlib.suppress(WheelmountError):  # what is to be explained says more
        reason = hosts.ended() if lost else None
    for error in lost:
        error.message = reason or error.message


@contextlib.contextmanager
def at(
    spec: HostSpec, settings: Settings, progress: Progress, *, namespaces: bool
) -> Iterator[HostPool]:
    """Where a command is to work.

    Args:
        spec: the hosts.
        settings: in force.
        progress: told about each step.
        namespaces: give hosts on this machine mount namespaces of their own; those of a session
            have them.
    """
    if isinstance(spec, Held):
        yield spec.pool if not spec.only else spec.pool.narrowed(spec.only)
        return
    if spec.session is not None:
        with join(Session(spec.session, settings), progress, spec.only) as standing:
            yield standing
        return
    made = spec.make(settings, namespaces=namespaces, progress=progress)
    check(spec.only, made.names)
    try:
        with (
            made as hosts,
            runtime.watching(hosts.check_lease),
            Commands(_chosen(hosts, spec.only), settings.start_timeout) as commands,
        ):
            try:
                yield _Passing(hosts, spec.only, commands, settings, progress)
            except HostError as error:
                explain(hosts, [error])
                raise
    finally:
        runtime.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(HostSpec):
    """Hosts that are there already, for one operation after the other.

    Attributes:
        pool: the hosts.
    """

    pool: HostPool


@contextlib.contextmanager
def hold(
    spec: HostSpec, settings: Settings, progress: Progress, *, namespaces: bool
) -> Iterator[Held]:
    """Have hosts, and the directories that are mounted on them, for several operations.

    Args:
        spec: the hosts.
        settings: in force.
        progress: told about each step.
        namespaces: see ``at``.

    Yields:
        What takes the place of ``spec`` meanwhile.
    """
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(HostSpec)}
    with contextlib.ExitStack() as ends:
        pool = ends.enter_context(at(spec, settings, progress, namespaces=namespaces))
        if isinstance(pool, _Passing):
            pool = _Lasting(pool, ends)
        yield Held(**fields, pool=pool)


class _Passing(HostPool):
    def __init__(
        self,
        hosts: Hosts,
        only: Sequence[str],
        commands: Commands,
        settings: Settings,
        progress: Progress,
    ) -> None:
        super().__init__(hosts, only, commands, progress)
        self._settings = settings

    def mount(
        self,
        source: Path,
        mntpoint: str | None,
        *,
        fixed: bool = False,  # noqa: ARG002 - it is not mounted yet
    ) -> RemoteMount:
        settings, progress = self._settings, self._progress
        made = remotemount(self.chosen, source, mntpoint, settings=settings, progress=progress)
        self._mounts.append(made)
        return made


class _Lasting(HostPool):
    """A pool whose mounts, on all of its hosts, serve later operations too.

    Args:
        pool: the hosts.
        ends: where mounts are taken down.
    """

    def __init__(self, pool: _Passing, ends: contextlib.ExitStack) -> None:
        vars(self).update(vars(pool))
        self._pool, self._ends = pool, ends
        self._standing: dict[tuple[str, str | None], RemoteMount] = {}

    @contextlib.contextmanager
    def mount(
        self, source: Path, mntpoint: str | None, *, fixed: bool = False
    ) -> Iterator[RemoteMount]:
        """The directory as it is now, on a mount that is there already or stays."""
        key = os.path.abspath(source), mntpoint  # noqa: PTH100 - as remotemount does
        made = self._standing.get(key)
        if made is None:
            made = self._ends.enter_context(self._pool.mount(source, mntpoint))
            self._standing[key] = made
        elif not fixed:
            made.refresh(warn=False)
        self._mounts = [*(each for each in self._mounts if each is not made), made]
        yield made


@contextlib.contextmanager
def join(session: Session, progress: Progress, only: Sequence[str] = ()) -> Iterator[Standing]:
    """Work on the hosts of a session.

    Args:
        session: which.
        progress: told about each step.
        only: names of those that are to run commands; empty for all.

    Raises:
        InputError: there is no host of a name.
        HostError: there is none, or a host does not answer.
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
            progress.log(f"connected to session {session.name}: {len(record.names)} hosts")
            actors = session.handles()[COMMANDS]
            try:
                with Commands(list(hosts), session.settings.start_timeout, actors) as commands:
                    yield Standing(session, hosts, commands, progress, only)
            finally:
                hosts.settle()
    except HostError as error:
        if error.hint is None:
            error.message = f"session {session.name}: {error.message}"
            error.hint = f"if a host died, `wheelmount up --name {session.name}` makes it anew"
        raise


class Standing(HostPool):
    """Hosts of a session, on which mounts stay as well.

    Args:
        session: whose they are.
        hosts: its hosts.
        commands: that wait there.
        progress: told about each step.
        only: names of those that are to run commands; empty for all.

    Attributes:
        refreshed: how many mounts were found changed.
    """

    def __init__(
        self,
        session: Session,
        hosts: Hosts,
        commands: Commands,
        progress: Progress,
        only: Sequence[str] = (),
    ) -> None:
        super().__init__(hosts, only, commands, progress)
        self.refreshed = 0
        self._session = session

    @contextlib.contextmanager
    def mount(
        self, source: Path, mntpoint: str | None, *, fixed: bool = False
    ) -> Iterator[RemoteMount]:
        """The directory as it is now, on a mount that is there already or stays."""
        session, path = self._session, os.path.abspath(source)  # noqa: PTH100 - as remotemount does
        key = records.key(path, mntpoint or path)
        with self._settled(key):
            made = self._mounted(key, fixed=fixed)
            resumed = made is not None and made.delivering  # what a client left that was killed
            if made is None:
                made = self._new(path, mntpoint)
                made.open()
            elif not (resumed or fixed):
                self.refreshed += made.refresh(warn=False)
            if made.delivering:
                self._note(key, made, client=os.getpid())
        self._mounts.append(made)
        if not made.delivering:
            yield made
            return
        try:
            if resumed:
                self.refreshed += made.refresh(warn=False)
            yield made
            made.keep()
            with session.lock():
                self._note(key, made)
        except BaseException:
            made.clear()
            with contextlib.suppress(HostError), session.lock():  # the session has ended
                self._drop(key, made.identity)
            raise

    @contextlib.contextmanager
    def _settled(self, key: str) -> Iterator[None]:
        """Lock the session, once no other process delivers this mount."""
        deadline = time.monotonic() + self._session.settings.start_timeout
        while True:
            with self._session.lock():
                note = mounts_of(self._session.read()).get(key)
                client = None if note is None else note.client
                if client in (None, os.getpid()) or not psutil.pid_exists(client):
                    yield
                    return
            if time.monotonic() > deadline:
                raise WaitError(
                    f"process {client} still delivers {key}", hint="wait for it, or end it"
                )
            time.sleep(GLANCE)

    def unmount(self, identity: str, *, force: bool) -> None:
        """Take one of the session's mounts down.

        Args:
            identity: of the mount.
            force: although it is in use.

        Raises:
            MountError: it is in use on a host; the message names its users.
        """
        with self._session.lock():
            for key, note in mounts_of(self._session.read()).items():
                if note.identity == identity:
                    mount = self._new(note.source, note.mntpoint, identity)
                    mount.take(self._session.handles()[identity])
                    mount.close(force=force)
                    self._drop(key, identity)

    def verify(self, identity: str, *, repair: bool) -> tuple[dict[str, Verified], dict[str, str]]:
        """Have one of the session's mounts verified.

        Args:
            identity: of the mount.
            repair: see ``RemoteMount.verify``.

        Raises:
            MountError: it is no more.
        """
        for note in mounts_of(self._session.read()).values():
            if note.identity == identity:
                mount = self._new(note.source, note.mntpoint, identity)
                mount.adopt(self._session.handles()[identity])
                return mount.verify(repair=repair), mount.mntpoints
        raise MountError(f"session {self._session.name} no longer has the mount {identity}")

    def _new(self, source: str, mntpoint: str | None, identity: str | None = None) -> RemoteMount:
        settings, progress = self._session.settings, self._progress
        return RemoteMount(self.hosts, source, mntpoint, settings, progress, identity=identity)

    def _mounted(self, key: str, *, fixed: bool) -> RemoteMount | None:
        """The mount as an earlier command left it; None if it is no more, or not whole."""
        note = mounts_of(self._session.read()).get(key)
        if note is None:
            return None
        mount = self._new(note.source, note.mntpoint, note.identity)
        try:
            mount.adopt(self._session.handles().get(note.identity), fixed=fixed)
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
        record.notes.get(MOUNTS, {}).pop(key, None)
        handles.pop(identity, None)
        session.write(record)
        session.keep(handles)
