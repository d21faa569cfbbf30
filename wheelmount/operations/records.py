"""Notes of sessions about their mounts, which are read without asking a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from wheelmount import typed
from wheelmount.config import Settings
from wheelmount.errors import HostError, WheelmountError
from wheelmount.hosts.host import Hosts
from wheelmount.hosts.session import Record, Session
from wheelmount.hosts.spec import KINDS

VERSIONS = "versions"
"""Key, in a session's notes, of the versions of the client that started it and of its hosts."""

MOUNTS = "mounts"
"""Key, in a session's notes, of its mounts."""


@dataclass(frozen=True, slots=True)
class MountNote:
    """A mount of a session.

    Attributes:
        identity: of the mount.
        source: the directory.
        mntpoint: the requested mount point, with ``{host}`` in it.
        client: id of the process that still delivers the mount; None if all bytes have arrived.
    """

    identity: str
    source: str
    mntpoint: str
    client: int | None = None


class Refreshed(NamedTuple):
    """The result of a refresh.

    Attributes:
        changed: whether anything had changed.
        mntpoints: mount points by host.
        shortfall: an error that names the files which cannot be read there.
    """

    changed: bool
    mntpoints: dict[str, str]
    shortfall: WheelmountError | None


def mounts_of(record: Record) -> dict[str, MountNote]:
    """Return the mounts of a session by ``key``.

    Raises:
        HostError: the record is damaged.
    """
    try:
        return typed.convert(record.notes.get(MOUNTS, {}), dict[str, MountNote])
    except ValueError as error:
        raise HostError(f"the record of a session's mounts is damaged: {error}") from None


def key(source: str, mntpoint: str) -> str:
    """Return the key of a mount: a later request for the same one has the same key."""
    return f"{source} at {mntpoint}"


def all_mounts(settings: Settings) -> list[tuple[Session, MountNote]]:
    """Return the mounts of all sessions whose records can be read."""
    return [
        (session, note)
        for session, record in Session.records(settings)
        for note in mounts_of(record).values()
    ]


def hosts_of(session: Session, record: Record) -> Hosts:
    """Return the hosts of a session, to which ``attach`` then connects.

    Raises:
        HostError: the hosts can be reached only on another machine, or the record is damaged.
    """
    if (machine := record.elsewhere) is not None:
        raise HostError(
            f"session {session.name} is on {machine}",
            hint=f"run this there; if that machine is gone, delete {session.directory}",
        )
    try:
        return KINDS[record.kind].resume(record.hosts, session.settings)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise session.damaged(error) from error


def state(session: Session, record: Record) -> dict[str, Any]:
    """Return the state of a session, as JSON has it.

    ``lost`` is the reason why the session cannot be used, or None.
    """
    lost = None
    try:
        hosts_of(session, record).check()
    except HostError as error:
        lost = error.message
    return {
        "session": session.name,
        "spec": record.spec,
        "kind": record.kind,
        "hosts": record.names,
        "created": record.created,
        "lost": lost,
    }


def unknown(session: Session, error: HostError) -> dict[str, Any]:
    """Return the state of a session whose record cannot be read; see ``state``."""
    nothing: dict[str, Any] = {"spec": "", "kind": "", "hosts": [], "created": 0.0}
    return {"session": session.name, **nothing, "lost": error.message}
