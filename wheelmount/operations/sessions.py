"""Sessions: start, status, refresh and end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from wheelmount.errors import (
    HostError,
    InputError,
    MountError,
    TransferError,
    WaitError,
    WheelmountError,
)
from wheelmount.hosts import handshake, runtime
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Commands
from wheelmount.hosts.host import Hosts
from wheelmount.hosts.session import Record, Session
from wheelmount.hosts.spec import HostSpec
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.mount.serve import processes
from wheelmount.mount.store.verify import Verified
from wheelmount.operations import apart, overlays
from wheelmount.operations.pools import COMMANDS, join
from wheelmount.operations.records import VERSIONS, MountNote, Refreshed, hosts_of, mounts_of
from wheelmount.progress import SILENT, Progress

ANSWER_TIMEOUT = 10.0
"""Seconds in which hosts report the status of their mounts."""


def up(spec: HostSpec, session: Session, progress: Progress) -> tuple[Record, bool]:
    """Start persistent hosts, unless the session exists and its hosts answer.

    Args:
        spec: the hosts.
        session: the session that they form.
        progress: told about each step.

    Returns:
        The session, and whether it was started.

    Raises:
        InputError: the session exists with other hosts.
        HostError: a host does not start, and none is left running, or the next ``up`` or ``down``
            ends it; or the session exists, and a command cannot be run on one of its hosts.
        WaitError: a host of the session does not answer.
    """
    with session.lock():
        if session.exists:
            record = session.read()
            hosts = hosts_of(session, record)
            try:
                hosts.check()
            except HostError as error:  # made again, for this request
                progress.log(f"session {session.name}: {error.message}; it is made anew")
                apart.alone(partial(_end, session, record))
            else:
                if record.spec != str(spec):
                    raise InputError(
                        f"session {session.name} is up with {record.spec}",
                        hint=f"run `wheelmount down {session.name}` first, or give another --name",
                    )
                apart.alone(partial(_check, session))
                return record, False
        _end_begun(session, progress)
        return _make(spec, session, progress), True


def _make(spec: HostSpec, session: Session, progress: Progress) -> Record:
    settings = session.settings
    hosts = spec.make(settings, namespaces=True, guarded=False, progress=progress)
    hosts.begun = lambda begun: session.begin(Record(str(spec), spec.kind, hosts.names, begun))
    with runtime.to_stay(), progress.task("start", unit="host") as task:
        try:
            hosts.start()
        except BaseException:
            _forget(session, hosts)
            raise
        try:
            with Commands(list(hosts), settings.start_timeout) as commands:
                ready = {host.name: Command(("true",)) for host in hosts}
                runtime.raise_first(dict(commands.run(ready)))
                commands.keep()
            record = Record.leaving(spec, hosts)
        except BaseException:
            hosts.give_up()
            _forget(session, hosts)
            raise
        try:
            record.notes[VERSIONS] = dict(handshake.here())
            session.keep({COMMANDS: commands.actors})
            session.write(record)
        except BaseException:
            hosts = hosts_of(session, record)
            hosts.give_up()
            _forget(session, hosts)
            raise
        task.advance(len(ready))
    return record


def _forget(session: Session, hosts: Hosts) -> None:
    """Forget hosts that were given up; if some may be left, the note of them stays."""
    if not hosts.left:
        session.forget()


def _end_begun(session: Session, progress: Progress) -> bool:
    """End hosts that an ``up`` which was killed may have started; return whether there was one.

    Raises:
        HostError: hosts may be left; the note of them stays for the next attempt.
    """
    record = session.begun()
    if record is None:
        return False
    progress.log(f"session {session.name}: ending what a killed `up` had started")
    _stop(session, hosts_of(session, record))
    session.forget()
    return True


def _check(session: Session) -> None:
    """Check that commands can be run on the hosts of a session.

    The session is left as it is if they cannot: other commands may still work in it.

    Raises:
        HostError: a command cannot be run on a host.
        WaitError: a host does not answer, or its process for commands does not: it may be busy with
            the commands of others, or dead.
    """
    try:
        with join(session, SILENT) as pool:
            ready = {host.name: Command(("true",)) for host in pool.hosts}
            runtime.raise_first(dict(pool.commands.run(ready)))
    except (HostError, WaitError) as error:
        error.hint = (
            f"if no command of the session works: `wheelmount down {session.name}`, and then "
            "`wheelmount up` again"
        )
        raise


def down(session: Session, progress: Progress) -> None:
    """End a session with its mounts and hosts, even if hosts do not answer, or never came up.

    Raises:
        HostError: there is no such session; or hosts may be left, and the session stays.
        MountError: a process that serves a mount here cannot be killed; all else has ended.
    """
    with session.lock():
        if _end_begun(session, progress):
            return
        record = session.read()
        with progress.task("stop", unit="host") as task:
            _end(session, record)
            task.advance(len(record.names))


def _end(session: Session, record: Record) -> None:
    hosts = hosts_of(session, record)
    with runtime.to_stay():
        with contextlib.suppress(HostError, WaitError):
            bound = session.settings.start_timeout
            try:
                hosts.attach()
            except (HostError, WaitError):  # the others may have mounts
                if hosts.ended():
                    raise
                bound = min(bound, ANSWER_TIMEOUT)
                hosts.reach()
            bounded = _bounded(session, bound)
            for mount in _mounts(bounded, record, hosts):
                mount.clear()
            commands = session.handles().get(COMMANDS, {})
            runtime.gather(
                {name: actor.close.call_one() for name, actor in commands.items()}, bound
            )
            runtime.end_processes(commands)
        noted = {note.identity for note in mounts_of(record).values()}
        stuck: MountError | None = None
        for directory in processes.find(session.settings):  # of hosts here that did not answer
            if processes.identity(directory) in noted:
                try:
                    processes.stop(directory, force=True)
                except MountError as error:
                    stuck = error
        _stop(session, hosts)
    session.forget()
    if stuck is not None:
        raise stuck


def _stop(session: Session, hosts: Hosts) -> None:
    """End the hosts of a session.

    Raises:
        HostError: some may be left; the session stays for the next attempt.
    """
    try:
        hosts.stop()
    except HostError as error:
        gone = f"if they are gone for good, delete {session.directory}"
        error.hint = "; ".join(filter(None, (error.hint, gone)))
        raise


def refresh(
    session: Session,
    note: MountNote,
    progress: Progress,
    occasions: Iterable[object] = (None,),
) -> Iterator[Refreshed | TransferError]:
    """Refresh a session's mount repeatedly, also after a file was edited while it was copied.

    Args:
        session: the session.
        note: the session's note of the mount.
        progress: told about each step.
        occasions: the mount is refreshed for each item; the first comes at once.
    """
    with join(session, progress) as pool:
        for _ in occasions:
            before = pool.refreshed
            try:
                with pool.mount(Path(note.source), note.mntpoint) as mount:
                    pass
            except TransferError as error:
                yield error
            else:
                yield Refreshed(pool.refreshed > before, mount.mntpoints, mount.shortfall())


def refreshed(session: Session, note: MountNote, progress: Progress) -> Refreshed:
    """Refresh one of the session's mounts once."""
    (found,) = refresh(session, note, progress)
    if isinstance(found, TransferError):
        raise found
    return found


def verified(
    session: Session, note: MountNote, repair: bool, progress: Progress
) -> tuple[dict[str, Verified], dict[str, str]]:
    """Verify the bytes of one of the session's mounts on its hosts; see ``Standing.verify``."""
    with join(session, progress) as pool:
        return pool.verify(note.identity, repair=repair)


def unmount(
    session: Session, identities: Sequence[str], force: bool, _progress: Progress
) -> dict[str, WheelmountError]:
    """Unmount some of a session's mounts.

    Returns:
        Errors by identity: a mount is in use on a host, and its processes are named; a host is
        lost, or does not answer, and the mount may stay there.
    """
    failed: dict[str, WheelmountError] = {}
    with join(session, SILENT) as pool:
        for identity in identities:
            try:
                pool.unmount(identity, force=force)
            except WheelmountError as error:
                failed[identity] = error
    return failed


def ask(session: Session, _progress: Progress) -> tuple[list[dict[str, Any]], list[overlays.State]]:
    """Return the status of a session's hosts.

    Returns:
        Mounts, as of ``Server.status``, and overlays, as of ``overlays.here``; each with its host.

    Raises:
        HostError: a host does not answer.
    """
    record = session.read()
    timeout = min(session.settings.start_timeout, ANSWER_TIMEOUT)
    bounded = _bounded(session, timeout)
    hosts = hosts_of(bounded, record)
    with runtime.to_stay():
        hosts.attach()
        with Commands(list(hosts), timeout, session.handles()[COMMANDS]) as commands:
            asked = Command(overlays.ASK, environment=session.settings.chosen("state_dir"))
            answers = commands.run({host.name: asked for host in hosts})
        mounts = [
            {
                "identity": mount.identity,
                "host": host,
                "source": mount.source,
                "mntpoint": mount.mntpoint,
                **({"error": state.message} if isinstance(state, WheelmountError) else state),
            }
            for mount in _mounts(bounded, record, hosts)
            for host, state in mount.status().items()
        ]
        return mounts, overlays.told(answers)


def _bounded(session: Session, timeout: float) -> Session:
    """Return the session with another bound for answers of its hosts."""
    return Session(session.name, replace(session.settings, start_timeout=timeout))


def _mounts(session: Session, record: Record, hosts: Hosts) -> Iterator[RemoteMount]:
    handles = session.handles()
    for note in mounts_of(record).values():
        if note.identity in handles:
            mount = RemoteMount(
                hosts,
                note.source,
                note.mntpoint,
                session.settings,
                SILENT,
                identity=note.identity,
            )
            mount.take(handles[note.identity])
            yield mount
