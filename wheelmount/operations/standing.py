"""Mounts of this machine and of sessions: their status, refresh, verification and end.

A mount is named by its mount point, its source or its identity, as ``status`` shows them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from wheelmount.config import Settings
from wheelmount.errors import (
    HostError,
    InputError,
    MountError,
    SourceError,
    StoreError,
    TransferError,
    WheelmountError,
    among,
)
from wheelmount.hosts.session import Session
from wheelmount.mount.client import direct
from wheelmount.mount.client.seen import Seen, look
from wheelmount.mount.kernel.points import View
from wheelmount.mount.serve import processes
from wheelmount.operations import overlays, records
from wheelmount.operations.records import Refreshed
from wheelmount.progress import SILENT, Progress, number_of

# ``apart``, ``mounts`` and ``sessions`` are imported where hosts are needed: they import Monarch.


class OfSession(NamedTuple):
    """A mount of a session: the session, and its note of the mount."""

    session: Session
    note: records.MountNote


Mount: TypeAlias = list[Path] | OfSession
"""A mount: its private directories on this machine, one for each host, or that of a session."""


def find(settings: Settings, targets: Sequence[str] = ()) -> dict[str, Mount]:
    """Return mounts by identity.

    Args:
        settings: in force.
        targets: mount points, sources or identities; default all mounts.

    Raises:
        InputError: a target is empty, as the value of an unset variable.
        MountError: a target is not mounted.
        HostError: likewise, and a session, whose mount it could be, cannot be read.
    """
    if "" in targets:
        raise InputError("'' names no mount", hint="give a mount point, source or identity")
    found: dict[str, Mount] = {}
    of_sessions = records.all_mounts(settings)
    for target in targets or [""]:
        names = named(target) if target else ()
        elsewhere: dict[str, Mount] = {
            note.identity: OfSession(session, note)
            for session, note in of_sessions
            if not names or {note.identity, note.source, note.mntpoint}.intersection(names)
        }
        found |= elsewhere
        try:
            here = processes.find(settings, *names)
        except MountError:
            if not elsewhere:
                for error in unreadable(settings):
                    raise error from None
                raise
            here = []
        for directory in here:
            directories = found.setdefault(processes.identity(directory), [])
            if isinstance(directories, list) and directory not in directories:
                directories.append(directory)
    return found


def named(target: str) -> tuple[str, ...]:
    """Return what a target may name: the path that it is, and itself, as an identity."""
    try:
        # Not resolved, as a dead mount must not be touched.
        return os.path.abspath(target), target  # noqa: PTH100
    except FileNotFoundError:  # it is relative, and the working directory is deleted
        return (target,)


def names(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the mount points and sources of all mounts, each with a description."""
    for directory in processes.find(settings):
        task = processes.task(directory)
        yield task.mntpoint, f"mount of {task.source}"
        yield task.source, "source of a mount"
    for session, note in records.all_mounts(settings):
        yield note.mntpoint, f"mount of session {session.name}"
        yield note.source, "source of a mount"


def unreadable(settings: Settings) -> list[HostError]:
    """Return errors that name the sessions whose mounts are unknown."""
    return [error for _, error in Session.unreadable(settings)]


def _mntpoints(directories: Sequence[Path]) -> dict[str, str]:
    return {task.host: task.mntpoint for task in map(processes.task, directories)}


# ---- refresh


def refresh(
    targets: Sequence[str], settings: Settings, progress: Progress
) -> list[Refreshed | WheelmountError]:
    """Update mounts to the current state of their directories.

    Mounts of this machine are refreshed without starting hosts where that is possible.

    Args:
        targets: see ``find``.
        settings: in force.
        progress: told about each step.

    Returns:
        For each mount the result, or the error by which it was not refreshed; and errors of
        sessions whose mounts are unknown.

    Raises:
        MountError: a target is not mounted.
    """
    found = find(settings, targets)
    return [*refresh_found(found, settings, progress), *unreadable(settings)]


def refresh_found(
    found: Mapping[str, Mount], settings: Settings, progress: Progress, *, alone: bool = False
) -> list[Refreshed | WheelmountError]:
    """Update mounts, given by identity, as ``refresh`` does.

    Args:
        found: the mounts.
        settings: in force.
        progress: told about each step.
        alone: leave work on hosts to another process, as this one uses hosts, too: it could not
            go on with them.

    Returns:
        For each mount the result, or the error by which it was not refreshed.
    """
    seen: dict[str, Seen | None] = {}
    answers: dict[str, Refreshed | WheelmountError] = {}
    for identity, mount in found.items():
        if not isinstance(mount, OfSession):
            changed, seen[identity] = _refresh_here(mount, settings, progress)
            if changed is not None:
                answers[identity] = Refreshed(changed, _mntpoints(mount), None)
    left = {identity: mount for identity, mount in found.items() if identity not in answers}
    if left:
        from wheelmount.operations import apart, mounts, sessions

        here = len(left) == 1 and not alone
        works = [
            partial(sessions.refreshed, *mount)
            if isinstance(mount, OfSession)
            # Another process is faster to scan again than to be sent a tree.
            else partial(mounts.refreshed, mount, settings, seen[identity] if here else None)
            for identity, mount in left.items()
        ]
        done = apart.each(works, progress, "refresh", alone=alone)
        answers |= dict(zip(left, done, strict=True))
    return [answers[identity] for identity in found]


def _refresh_here(
    directories: list[Path], settings: Settings, progress: Progress
) -> tuple[bool | None, Seen | None]:
    """Refresh a mount of this machine without hosts.

    Returns:
        Whether anything had changed; None if hosts have to find that out, or to do the refresh,
        with what was seen, if that is of use to them.
    """
    try:
        seen = look(directories, settings, progress)
    except SourceError:  # reported when the others are refreshed
        return None, None
    if seen is None or not seen.changed:
        return (None if seen is None else False), None
    if not direct.possible(directories, seen):
        return None, seen
    return direct.refresh(directories, seen, progress) or None, None


def watch(
    targets: Sequence[str], settings: Settings, progress: Progress
) -> Iterator[Refreshed | TransferError]:
    """Refresh a mount at once, and again whenever a file of its directory changes.

    Yields the result of each refresh; or an error if a file was edited while it was copied: hosts
    show the old tree then, and the edit is the next change.

    Args:
        targets: see ``find``; of one mount.
        settings: in force.
        progress: told about each step.

    Raises:
        InputError: the targets are several mounts.
        MountError: a target is not mounted, or the mount could not be refreshed.
    """
    found = find(settings, targets)
    if len(found) > 1:
        raise InputError(f"{targets[0]} is {len(found)} mounts", hint="watch one of them")
    from wheelmount.operations import mounts, sessions

    (mount,) = found.values()
    if isinstance(mount, OfSession):
        occasions = mounts.changes(Path(mount.note.source))
        yield from sessions.refresh(*mount, progress, occasions)
    else:
        occasions = mounts.changes(Path(processes.task(mount[0]).source))
        yield from mounts.refresh(mount, settings, progress, occasions)


# ---- verification and end


def verify(
    targets: Sequence[str], settings: Settings, progress: Progress, *, repair: bool
) -> tuple[list[dict[str, Any]], list[WheelmountError]]:
    """Compare all bytes that mounts show on their hosts with the hashes of delivery.

    Args:
        targets: see ``find``.
        settings: in force.
        progress: told about each step.
        repair: replace damaged files with bytes from other hosts or from this machine.

    Returns:
        For each host ``host``, ``mntpoint`` and the items of ``Verified.summary``; and errors: of
        mounts that could not be verified, of files that stay damaged or cannot be compared, and of
        sessions whose mounts are unknown.

    Raises:
        MountError: a target is not mounted.
    """
    from wheelmount.operations import apart, mounts, sessions

    works = [
        partial(sessions.verified, *mount, repair)
        if isinstance(mount, OfSession)
        else partial(mounts.verified, mount, repair, settings)
        for mount in find(settings, targets).values()
    ]
    answers = apart.each(works, progress, "verify")
    results = [
        {"host": host, "mntpoint": answer[1][host], **found.summary()}
        for answer in answers
        if not isinstance(answer, WheelmountError)
        for host, found in answer[0].items()
    ]
    failed = among(answers)
    if bad := sum(len(result["wrong"]) + len(result["unknown"]) for result in results):
        failed.append(
            StoreError(
                f"{number_of(bad, 'file')} damaged, or without hashes to be compared with",
                hint=None if repair else "`wheelmount verify --repair` brings the right bytes",
            )
        )
    return results, [*failed, *unreadable(settings)]


def unmount(
    targets: Sequence[str], settings: Settings, progress: Progress, *, force: bool
) -> tuple[list[str], list[WheelmountError]]:
    """Unmount mounts.

    Args:
        targets: see ``find``.
        settings: in force.
        progress: told about each step.
        force: unmount even if in use; open files stay readable.

    Returns:
        Identities of the mounts that were unmounted everywhere; and errors: a mount is in use, and
        its users are named, the hosts of a session do not answer, or its mounts are unknown.

    Raises:
        MountError: a target is not mounted.
    """
    of_sessions: dict[str, tuple[Session, list[str]]] = {}
    found = find(settings, targets)
    failed: list[tuple[str, WheelmountError]] = []  # with the mount's identity
    for identity, mount in found.items():
        if isinstance(mount, OfSession):
            session = mount.session
            of_sessions.setdefault(session.name, (session, []))[1].append(identity)
            continue
        for directory in mount:
            try:
                processes.stop(directory, force=force)
            except MountError as error:
                failed.append((identity, error))
    if of_sessions:
        from wheelmount.operations import apart, sessions

        works = [partial(sessions.unmount, *each, force) for each in of_sessions.values()]
        ends = apart.each(works, progress, "unmount")
        for (_, identities), end in zip(of_sessions.values(), ends, strict=True):
            if isinstance(end, WheelmountError):
                failed += [(identity, end) for identity in identities]
            else:
                failed += end.items()
    stay = {identity for identity, _ in failed}
    errors = list(dict.fromkeys(error for _, error in failed))
    errors += unreadable(settings)
    return [identity for identity in found if identity not in stay], errors


# ---- status


def status(settings: Settings) -> dict[str, list[dict[str, Any]]]:
    """Return the state of all sessions and mounts.

    Returns:
        ``sessions`` and ``mounts``, each a list of records for JSON. A mount that does not answer
        has ``error`` in place of its state; sessions whose mounts are unknown have no hosts.
    """
    here = View.here().namespace
    mounts = list(filter(None, (_state(each, here) for each in processes.find(settings))))
    states = []
    elsewhere = []
    for session, record in Session.records(settings):
        states.append(state := records.state(session, record))
        if state["kind"] == "local":
            own = [each for each in overlays.here(settings) if each["host"] in state["hosts"]]
            state["overlays"] = own
        elif state["lost"] is None:
            elsewhere.append((session, state))
    for state, found in _ask(elsewhere):
        if isinstance(found, WheelmountError):
            state["lost"] = found.message
        else:
            known = {mount_key(mount) for mount in mounts}  # this machine can be a host of it, too
            for each in found[0]:
                if mount_key(each) not in known:
                    mounts.append(each | {"visible": not each.get("apart")})
            state["overlays"] = found[1]
    states += [records.unknown(session, error) for session, error in Session.unreadable(settings)]
    return {"sessions": states, "mounts": mounts}


def mount_key(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return identity and host of a record, which no other record of a mount has."""
    return record["identity"], record["host"]


def _ask(
    sessions_elsewhere: Sequence[tuple[Session, dict[str, Any]]],
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the states of sessions on other machines, each with the answer of ``sessions.ask``."""
    if sessions_elsewhere:
        from wheelmount.operations import apart, sessions

        works = [partial(sessions.ask, session) for session, _ in sessions_elsewhere]
        answers = apart.each(works, SILENT, "ask")
        yield from zip([state for _, state in sessions_elsewhere], answers, strict=True)


def _state(directory: Path, here: int) -> dict[str, Any] | None:
    """Return the state of a mount; None if it was taken down meanwhile."""
    record: dict[str, Any] = {}
    try:
        task = processes.task(directory)
        record = {
            "identity": processes.identity(directory),
            "host": task.host,
            "source": task.source,
            "mntpoint": task.mntpoint,
        }
        found = processes.status(directory)
    except MountError as error:
        dead = processes.dead(directory)
        return record | {"error": error.message, "dead": dead} if directory.exists() else None
    return record | found | {"visible": found["namespace"] == here}
