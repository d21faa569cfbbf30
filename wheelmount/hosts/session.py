"""Sessions: hosts that stay when a command ends, with mounts that commands left on them.

A session is a private directory, which machines may share. It has a record of the hosts
(JSON), Monarch handles of actors that wait on them (pickled, so only ever read from that
directory), and a lock that a process holds while it changes the session.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from wheelmount import disk, shared, typed
from wheelmount.config import Settings, private_directory
from wheelmount.errors import HostError, InputError, WaitError
from wheelmount.hosts import slurm
from wheelmount.hosts.host import Hosts
from wheelmount.hosts.spec import HostSpec, parse
from wheelmount.lock import try_lock

VERSION = 1
"""Version of the record's format; records of other versions are refused."""

DEFAULT = "default"
"""Name of the session that commands use by default."""

POLL_INTERVAL = 0.05
"""Seconds between tries to lock a session."""

_RECORD, _BEGUN, _HANDLES, _LOCK = "session.json", "begun.json", "handles", "lock"


@dataclass(slots=True)
class Record:
    """The record of a session, which is known without asking its hosts.

    Attributes:
        spec: the specification that the hosts were made from.
        kind: kind of the hosts, a key of ``spec.KINDS``.
        names: names of the hosts.
        hosts: result of ``Hosts.leave``.
        created: time of creation, in seconds since the epoch.
        notes: further data by key, fit for JSON.
        version: version of this format.
    """

    spec: str
    kind: str
    names: list[str]
    hosts: dict[str, Any]
    created: float = field(default_factory=time.time)
    notes: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    @classmethod
    def leaving(cls, spec: HostSpec, hosts: Hosts) -> Record:
        """Disconnect from running hosts; return their record, which the caller must write."""
        names = [host.name for host in hosts]
        return cls(str(spec), spec.kind, names, hosts.leave())

    @property
    def elsewhere(self) -> str | None:
        """The other machine on which alone the hosts can be reached; None if there is none."""
        machine: str | None = self.hosts.get(shared.MACHINE)
        if machine in (None, socket.gethostname()):
            return None
        from wheelmount.hosts import worker  # seldom needed

        # The machine may have a new name.
        return None if Path(self.hosts["directory"]) in worker.running() else machine


class Session:
    """A session, which may or may not exist.

    Args:
        name: letters, digits, ``.``, ``_`` and ``-``.
        settings: settings with the directory of sessions, and the time to wait for a lock.

    Raises:
        InputError: the name is invalid.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", name, re.ASCII) is None:
            raise InputError(
                f"{name!r} cannot be the name of a session", hint="use letters, digits, . _ and -"
            )
        self.name = name
        self.settings = settings
        self.directory = _directory(settings) / name

    @classmethod
    def all(cls, settings: Settings) -> list[Session]:
        """Return all sessions, sorted by name, also those that a killed ``up`` only began."""
        found = [cls(path.name, settings) for path in settings.listed("sessions")]
        return [each for each in found if each.exists or (each.directory / _BEGUN).exists()]

    @classmethod
    def records(cls, settings: Settings) -> list[tuple[Session, Record]]:
        """Return all sessions whose records can be read, with these, sorted by name."""
        return [(session, got) for session, got in cls._read(settings) if isinstance(got, Record)]

    @classmethod
    def unreadable(cls, settings: Settings) -> list[tuple[Session, HostError]]:
        """Return the other sessions: of another version, or with a damaged record."""
        return [
            (session, got) for session, got in cls._read(settings) if isinstance(got, HostError)
        ]

    @classmethod
    def _read(cls, settings: Settings) -> Iterator[tuple[Session, Record | HostError]]:
        for session in cls.all(settings):
            try:
                yield session, session.read()
            except HostError as error:
                if session.exists:  # else another command ended it meanwhile
                    yield session, error

    @property
    def exists(self) -> bool:
        """Whether the session exists."""
        return (self.directory / _RECORD).exists()

    def read(self) -> Record:
        """Return the record.

        Raises:
            HostError: the session does not exist, is of another version, or its record is damaged.
        """
        return self._decode(self.directory / _RECORD)

    def _decode(self, path: Path) -> Record:
        try:
            record = typed.decode(path.read_bytes(), dict[str, Any])
            if record["version"] == VERSION:
                return typed.convert(record, Record)
        except FileNotFoundError:
            raise HostError(
                f"there is no session {self.name}", hint=f"run `wheelmount up --name {self.name}`"
            ) from None
        except (ValueError, LookupError) as error:
            raise self.damaged(error) from error
        raise HostError(
            f"session {self.name} was made by another version of wheelmount",
            hint=f"end it with that version's `wheelmount down {self.name}`",
        )

    def damaged(self, error: Exception) -> HostError:
        """Return the error of a record that cannot be used, for a reason."""
        return HostError(
            f"the record of session {self.name} is damaged: {self.directory / _RECORD}: {error!r}",
            hint=f"end what still runs on its hosts, and delete {self.directory}",
        )

    def write(self, record: Record) -> None:
        """Write the record; the caller must hold ``lock``."""
        self._encode(self.directory / _RECORD, record)
        (self.directory / _BEGUN).unlink(missing_ok=True)

    def begin(self, record: Record) -> None:
        """Note hosts that are about to be started; the caller must hold ``lock``.

        If it is killed, ``begun`` tells the next process what to end.
        """
        self._encode(self.directory / _BEGUN, record)

    def begun(self) -> Record | None:
        """Return the record of hosts that a killed process may have begun to start, if any.

        Raises:
            HostError: it is of another version, or damaged.
        """
        path = self.directory / _BEGUN
        return self._decode(path) if path.exists() and not self.exists else None

    @staticmethod
    def _encode(path: Path, record: Record) -> None:
        disk.write(path, json.dumps(asdict(record), indent=1), mode=0o600)

    def check(self, record: Record) -> None:
        """Check that this is still the session that was read.

        Raises:
            HostError: it was ended, or ended and made again; or its record is damaged by now, or of
                another version.
        """
        try:
            if self.read().created == record.created:
                return
        except HostError:
            if self.exists:
                raise
        raise HostError(
            f"session {self.name} was ended by another command",
            hint=f"run `wheelmount up --name {self.name}`",
        )

    def handles(self) -> dict[str, Any]:
        """Return the handles that ``keep`` stored.

        Raises:
            HostError: they are damaged, or have classes that this version of wheelmount or Monarch
                does not know.
        """
        path = self.directory / _HANDLES
        try:
            return dict(pickle.loads(path.read_bytes()))  # noqa: S301 - private, see above
        except FileNotFoundError:
            return {}
        except Exception as error:  # of any kind, by the documentation of pickle
            raise HostError(
                f"the handles of session {self.name} cannot be read: {path}: {error!r}",
                hint=f"`wheelmount down {self.name}`, then `wheelmount up`, makes it anew",
            ) from error

    def keep(self, handles: dict[str, Any]) -> None:
        """Keep handles of Monarch, by the caller's keys; the caller must hold ``lock``."""
        disk.write(self.directory / _HANDLES, pickle.dumps(handles), mode=0o600)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the session during the context.

        Raises:
            WaitError: another process held the lock for longer than hosts may take to start.
        """
        timeout = self.settings.start_timeout
        deadline = time.monotonic() + timeout
        while (lock := try_lock(private_directory(self.directory) / _LOCK)) is None:
            if time.monotonic() > deadline:
                raise WaitError(
                    f"another wheelmount changes session {self.name} for {timeout:g} s already",
                    hint="wait for it, or end it",
                )
            time.sleep(POLL_INTERVAL)
        try:
            yield
        finally:
            # Before the lock is released, or others would lock a removed file.
            if not self.exists and not (self.directory / _BEGUN).exists():
                shutil.rmtree(self.directory, ignore_errors=True)
            os.close(lock)

    def forget(self) -> None:
        """Delete the record and handles; the caller must hold ``lock``, and have stopped hosts."""
        for name in (_RECORD, _BEGUN, _HANDLES):
            (self.directory / name).unlink(missing_ok=True)


def _directory(settings: Settings) -> Path:
    return private_directory(settings.private_runtime() / "sessions")


def hosts_by_default(settings: Settings) -> str:
    """Return the default hosts: of the settings, a session, an allocation, or this machine.

    Args:
        settings: the settings in force.

    Returns:
        A text for ``hosts_named``.

    Raises:
        HostError: the record of the session is of another version, or damaged.
    """
    if settings.hosts:
        return settings.hosts
    session = Session(DEFAULT, settings)
    try:
        if session.exists and session.read().elsewhere is None:
            return f"session:{DEFAULT}"
    except HostError:
        if session.exists:  # and has not been ended meanwhile
            raise
    return slurm.allocation() or "local:1"


def hosts_named(text: str, settings: Settings) -> HostSpec:
    """Read what ``spec.parse`` reads, or ``session:NAME`` for the hosts of a session.

    Args:
        text: the specification of hosts.
        settings: the settings in force.

    Raises:
        InputError: the specification is invalid.
        HostError: there is no such session.
    """
    kind, _, name = text.partition(":")
    if kind != "session":
        return parse(text)
    record = Session(name or DEFAULT, settings).read()
    return replace(parse(record.spec), session=name or DEFAULT)
