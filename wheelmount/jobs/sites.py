"""Where a command works: on hosts of its own, or on those of a session."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from wheelmount.config import Settings
from wheelmount.errors import HostError, MountError, WaitError, WheelmountError
from wheelmount.hosts import engine
from wheelmount.hosts.host import Host
from wheelmount.hosts.runners import Runners
from wheelmount.hosts.session import Record, Session
from wheelmount.hosts.spec import KINDS, HostSpec
from wheelmount.mount.remote import RemoteMount, remotemount
from wheelmount.progress import Progress

RUNNERS = "runners"
"""Key of the runners among a session's handles; the others are identities of mounts."""

MOUNTS = "mounts"
"""Key of the mounts among a session's notes."""

GLANCE = 0.1
"""Seconds between looks at whether another process is done."""


class Site(ABC):
    """Hosts to work on while a command lasts.

    Attributes:
        hosts: what they are.
        runners: run commands there.
    """

    hosts: list[Host]
    runners: Runners

    @abstractmethod
    def mount(self, source: Path, mntpoint: str | None) -> AbstractContextManager[RemoteMount]:
        """A directory on all hosts as it is now; see ``remotemount``."""


@contextlib.contextmanager
def at(
    spec: HostSpec, settings: Settings, progress: Progress, *, namespaces: bool
) -> Iterator[Site]:
    """Where a command is to work.

    Args:
        spec: the hosts.
        settings: in force.
        progress: told about each step.
        namespaces: give hosts on this machine mount namespaces of their own; those of a session
            have them.
    """
    try:
        if spec.session is not None:
            with _join(Session(spec.session, settings), progress) as standing:
                yield standing
            return
        with (
            spec.make(settings, namespaces=namespaces) as hosts,
            Runners(list(hosts), settings.start_timeout) as runners,
        ):
            yield _Passing(list(hosts), runners, settings, progress)
    finally:
        engine.stop()


class _Passing(Site):
    def __init__(
        self, hosts: list[Host], runners: Runners, settings: Settings, progress: Progress
    ) -> None:
        self.hosts, self.runners = hosts, runners
        self._settings, self._progress = settings, progress

    def mount(self, source: Path, mntpoint: str | None) -> RemoteMount:
        settings, progress = self._settings, self._progress
        return remotemount(self.hosts, source, mntpoint, settings=settings, progress=progress)


@contextlib.contextmanager
def _join(session: Session, progress: Progress) -> Iterator[Site]:
    record = session.read()
    engine.start_to_stay()
    hosts = KINDS[record.kind].resume(record.hosts, session.settings)
    try:
        hosts.attach()
    except HostError as error:
        error.message = f"session {session.name}: {error.message}"
        error.hint = f"run `wheelmount up --name {session.name}`, which makes it anew"
        raise
    progress.log(f"connected to session {session.name}: {len(record.names)} hosts")
    actors = session.handles()[RUNNERS]
    with Runners(list(hosts), session.settings.start_timeout, actors) as runners:
        yield Standing(session, list(hosts), runners, progress)


class Standing(Site):
    """Hosts of a session, on which mounts stay as well.

    Args:
        session: whose they are.
        hosts: its hosts.
        runners: that wait there.
        progress: told about each step.
    """

    def __init__(
        self, session: Session, hosts: list[Host], runners: Runners, progress: Progress
    ) -> None:
        self.hosts, self.runners = hosts, runners
        self._session, self._progress = session, progress

    @contextlib.contextmanager
    def mount(self, source: Path, mntpoint: str | None) -> Iterator[RemoteMount]:
        """The directory as it is now, on a mount that is there already or stays."""
        path, session = os.path.abspath(source), self._session  # noqa: PTH100 - as remotemount does
        key = f"{path} at {mntpoint or path}"
        with self._settled(key):
            made = self._mounted(key)
            if made is not None:
                made.refresh()
            else:
                made = self._new(path, mntpoint)
                made.open()
                self._note(key, made, arriving=True)
        if not made.delivering:
            yield made
            return
        try:
            yield made
            made.keep()
        except BaseException:
            made.close(force=True)
            with session.lock():
                self._drop(key, made.identity)
            raise
        with session.lock():
            self._note(key, made, arriving=False)

    @contextlib.contextmanager
    def _settled(self, key: str) -> Iterator[None]:
        """Be the only one who changes the session, and none delivering this mount."""
        deadline = time.monotonic() + self._session.settings.start_timeout
        while True:
            with self._session.lock():
                note = self._session.read().notes.get(MOUNTS, {}).get(key, {})
                if not _arrives(note):
                    yield
                    return
            if time.monotonic() > deadline:
                raise WaitError(
                    f"process {note['client']} still delivers {key}", hint="wait for it, or end it"
                )
            time.sleep(GLANCE)

    def _new(self, source: str, mntpoint: str | None, identity: str | None = None) -> RemoteMount:
        settings, progress = self._session.settings, self._progress
        return RemoteMount(self.hosts, source, mntpoint, settings, progress, identity=identity)

    def _mounted(self, key: str) -> RemoteMount | None:
        """The mount as an earlier command left it; None if it is no more, or not whole."""
        note = self._session.read().notes.get(MOUNTS, {}).get(key)
        if note is None:
            return None
        mount = self._new(note["source"], note["mntpoint"], note["identity"])
        handles = self._session.handles().get(mount.identity)
        try:
            mount.adopt(handles)
        except MountError as error:
            self._progress.log(f"mounting {note['source']} anew: {error.message}")
            with contextlib.suppress(WheelmountError):
                mount.close(force=True)
            self._drop(key, mount.identity)
            return None
        return mount

    def _note(self, key: str, mount: RemoteMount, *, arriving: bool) -> None:
        session = self._session
        record = session.read()
        record.notes.setdefault(MOUNTS, {})[key] = {
            "identity": mount.identity,
            "source": mount.source,
            "mntpoint": mount.mntpoint,
            "client": os.getpid() if arriving else None,
        }
        session.write(record)
        session.keep(session.handles() | {mount.identity: mount.handles})

    def _drop(self, key: str, identity: str) -> None:
        session = self._session
        record, handles = session.read(), session.handles()
        record.notes.get(MOUNTS, {}).pop(key, None)
        handles.pop(identity, None)
        session.write(record)
        session.keep(handles)


def _arrives(note: dict[str, Any]) -> bool:
    """Whether a process is still delivering a mount."""
    client = note.get("client")
    return client is not None and client != os.getpid() and psutil.pid_exists(client)


def mounts_of(record: Record) -> dict[str, dict[str, Any]]:
    """Notes on the mounts of a session, by identity."""
    return {note["identity"]: note for note in record.notes.get(MOUNTS, {}).values()}
