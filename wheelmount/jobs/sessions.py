"""Sessions: made, looked at, ended."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError, WheelmountError
from wheelmount.hosts import engine
from wheelmount.hosts.host import Hosts
from wheelmount.hosts.runner import Command
from wheelmount.hosts.runners import Runners
from wheelmount.hosts.session import Record, Session
from wheelmount.hosts.spec import KINDS, HostSpec
from wheelmount.jobs.sites import RUNNERS, mounts_of
from wheelmount.mount import serving
from wheelmount.mount.remote import RemoteMount
from wheelmount.progress import SILENT, Progress


def up(spec: HostSpec, session: Session, progress: Progress) -> tuple[Record, bool]:
    """Have hosts that stay.

    Args:
        spec: the hosts.
        session: that they are to be.
        progress: told about each step.

    Returns:
        The session, and whether it was made: else it was there and its hosts answer.

    Raises:
        InputError: it is there with other hosts.
        HostError: a host does not come up; none is left running.
    """
    settings = session.settings
    with session.lock():
        if session.exists:
            record = session.read()
            hosts = _hosts(record, settings)
            if record.spec != str(spec):
                raise InputError(
                    f"session {session.name} is up with {record.spec}",
                    hint=f"run `wheelmount down {session.name}` first, or give another --name",
                )
            engine.start_to_stay()
            try:
                hosts.attach()
            except HostError as error:
                progress.log(f"session {session.name}: {error.message}; it is made anew")
                _end(session, record, hosts)
            else:
                return record, False
        engine.start_to_stay()
        hosts = spec.make(settings, namespaces=True, guarded=False)
        with progress.task("start", unit="hosts") as task:
            hosts.start()
            try:
                with Runners(list(hosts), settings.start_timeout) as runners:
                    ready = {host.name: Command(("true",)) for host in hosts}
                    engine.raise_first(dict(runners.run(ready)))
                    task.advance(len(ready))
                    runners.keep()
                record = session.make(str(spec), spec.kind, hosts)
                session.keep({RUNNERS: runners.actors})
            except BaseException:
                hosts.stop()
                raise
    return record, True


def down(session: Session, progress: Progress) -> None:
    """End a session with its mounts and hosts, whether those still answer or not.

    Raises:
        HostError: there is none.
    """
    with session.lock():
        record = session.read()
        hosts = _hosts(record, session.settings)
        engine.start_to_stay()
        with progress.task("stop", unit="hosts") as task:
            _end(session, record, hosts)
            task.advance(len(record.names))


def _hosts(record: Record, settings: Settings) -> Hosts:
    return KINDS[record.kind].resume(record.hosts, settings)


def _end(session: Session, record: Record, hosts: Hosts) -> None:
    handles = session.handles()
    with contextlib.suppress(HostError):
        hosts.attach()
        for mount in _mounts(record, hosts, handles, session.settings):
            mount.close(force=True)
        for actor in handles.get(RUNNERS, {}).values():
            with contextlib.suppress(WheelmountError):
                engine.one(actor.close.call_one(), session.settings.start_timeout)
            engine.stop_mesh(actor)
    for identity in mounts_of(record):  # of hosts on this machine that did not answer
        for directory in serving.find(session.settings):
            if serving.identity(directory) == identity:
                serving.stop(directory, force=True)
    hosts.stop()
    session.forget()


def _mounts(
    record: Record, hosts: Hosts, handles: dict[str, Any], settings: Settings
) -> list[RemoteMount]:
    found = []
    for identity, note in mounts_of(record).items():
        mount = RemoteMount(
            hosts, note["source"], note["mntpoint"], settings, SILENT, identity=identity
        )
        if identity in handles:
            mount.take(handles[identity])
            found.append(mount)
    return found


def status(session: Session) -> dict[str, Any]:
    """What there is to say about a session: fit for JSON.

    ``hosts`` has the names, ``lost`` why the session cannot be used or None, ``mounts`` for each
    mount its source and by host what ``Server.status`` says.
    """
    record = session.read()
    hosts = _hosts(record, session.settings)
    found: dict[str, Any] = {
        "session": session.name,
        "spec": record.spec,
        "hosts": record.names,
        "age": time.time() - record.created,
        "lost": None,
        "mounts": [],
    }
    engine.start_to_stay()
    try:
        hosts.attach()
    except HostError as error:
        return found | {"lost": error.message}
    bounded = replace(session.settings, start_timeout=min(session.settings.start_timeout, 10))
    for mount in _mounts(record, hosts, session.handles(), bounded):
        states = {
            name: {"error": state.message} if isinstance(state, WheelmountError) else state
            for name, state in mount.status().items()
        }
        found["mounts"].append(
            {"identity": mount.identity, "source": mount.source, "hosts": states}
        )
    return found
