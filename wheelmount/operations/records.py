"""What sessions note about their mounts, read without asking a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wheelmount.config import Settings
from wheelmount.errors import HostError
from wheelmount.hosts.host import Hosts
from wheelmount.hosts.session import Record, Session
from wheelmount.hosts.spec import KINDS

VERSIONS = "versions"
"""Key of the versions among a session's notes: those of the client that made it, and its hosts."""

MOUNTS = "mounts"
"""Key of the mounts among a session's notes."""


@dataclass(frozen=True, slots=True)
class MountNote:
    """A mount of a session.

    Attributes:
        identity: of the mount.
        source: the directory.
        mntpoint: where it was asked to be on all hosts.
        client: the process that is still delivering it; None if all has arrived.
    """

    identity: str
    source: str
    mntpoint: str
    client: int | None = None


def mounts_of(record: Record) -> dict[str, MountNote]:
    """Mounts of a session, by the request that ``key`` describes."""
    notes: dict[str, dict[str, Any]] = record.notes.get(MOUNTS, {})
    return {key: MountNote(**note) for key, note in notes.items()}


def key(source: str, mntpoint: str) -> str:
    """Return the key under which a mount is found again."""
    return f"{source} at {mntpoint}"


def all_mounts(settings: Settings) -> list[tuple[Session, MountNote]]:
    """Mounts of all sessions."""
    return [
        (session, note)
        for session in Session.all(settings)
        for note in mounts_of(session.read()).values()
    ]


def hosts_of(session: Session, record: Record) -> Hosts:
    """The hosts of a session, not reached yet."""
    return KINDS[record.kind].resume(record.hosts, session.settings)


def state(session: Session) -> dict[str, Any]:
    """What there is to say about a session: fit for JSON.

    ``lost`` is why it cannot be used, or None.
    """
    record = session.read()
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
