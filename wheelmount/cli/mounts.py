"""``wheelmount mount | refresh | verify | umount``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wheelmount import config
from wheelmount.cli import completion, options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.config import Settings
from wheelmount.errors import InputError, MountError, SourceError, StoreError
from wheelmount.hosts.session import Session
from wheelmount.hosts.spec import HostSpec
from wheelmount.mount.client import direct
from wheelmount.mount.client.seen import Seen, look
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task
from wheelmount.operations import records
from wheelmount.progress import Progress, number_of

if TYPE_CHECKING:
    from wheelmount.operations.mounts import Refreshed  # it imports Monarch


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("mntpoint", required=False)
@options.hosts
@options.adapter
@click.option(
    "--private",
    "access",
    flag_value="private",
    help="Give access to you only. Default if other users have no access to the source.",
)
@click.option(
    "--public", "access", flag_value="public", help="Give access to all users; root only."
)
@options.as_json
@options.quiet
def mount(
    source: Path,
    mntpoint: str | None,
    spec: HostSpec,
    adapter: str,
    access: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Mount SOURCE read-only on every host, and leave it mounted.

    MNTPOINT is the mount point on the hosts; default the path of SOURCE. `{host}` in it becomes the
    name of the host (`/mnt/{host}`). Several hosts on one machine get a mount namespace each unless
    `{host}` makes their mount points different.
    """
    if mntpoint is not None:
        mntpoint = os.path.abspath(mntpoint)  # noqa: PTH100 - must not follow symlinks
    from wheelmount.operations import mounts  # with Monarch, which other commands here do without

    settings = replace(config.load(), adapter=adapter)
    settings = replace(settings, access=access or settings.access)
    made, shortfall = mounts.mount(spec, source, mntpoint, settings, ConsoleProgress(quiet=quiet))
    if as_json:
        print(json.dumps([{"host": name, "mntpoint": path} for name, path in made.items()]))
    else:
        for name, path in made.items():
            print(f"{name} {path}")
    if shortfall is not None:
        raise shortfall


@click.command()
@click.argument("targets", nargs=-1, required=True, shell_complete=completion.mounts)
@click.option("--watch", is_flag=True, help="Refresh whenever a file changes, until interrupted.")
@options.as_json
@options.quiet
def refresh(targets: tuple[str, ...], watch: bool, as_json: bool, quiet: bool) -> None:
    """Update mounts to the current state of their directories.

    TARGETS are mount points, sources or identities that status shows. Only what changed travels;
    hosts show the old tree until the new one is whole.
    """
    settings, progress = config.load(), ConsoleProgress(quiet=quiet)
    found = _find(settings, targets)
    if watch and len(found) > 1:
        raise InputError(f"{targets[0]} is {len(found)} mounts", hint="watch one of them")
    if not watch:
        answers = _refresh(found, settings, progress)
        _say([(points, changed) for changed, points, _ in answers], as_json)
        shortfalls = [each for *_, each in answers if each is not None]
        for each in shortfalls[1:]:
            progress.error(each)
        if shortfalls:
            raise shortfalls[0]
        return
    from wheelmount.operations import mounts, sessions

    (mount,) = found.values()
    if isinstance(mount, _OfSession):
        occasions = mounts.changes(Path(mount.note.source))
        for changed, points, shortfall in sessions.refresh(*mount, progress, occasions):
            _say([(points, changed)], as_json)
            if shortfall is not None:
                progress.error(shortfall)
    else:
        tasks = list(map(Task.read, mount))
        occasions = mounts.changes(Path(tasks[0].source))
        for changed, shortfall in mounts.refresh(mount, settings, progress, occasions):
            _say([({task.host: task.mntpoint for task in tasks}, changed)], as_json)
            if shortfall is not None:
                progress.error(shortfall)


def _refresh(
    found: Mapping[str, list[Path] | _OfSession], settings: Settings, progress: Progress
) -> list[Refreshed]:
    """Refresh mounts, by identity; those of this machine without hosts, where that is possible."""
    seen: dict[str, Seen | None] = {}
    answers: dict[str, Refreshed] = {}
    for identity, mount in found.items():
        if not isinstance(mount, _OfSession):
            changed, seen[identity] = _refresh_here(mount, settings, progress)
            if changed is not None:
                tasks = map(Task.read, mount)
                answers[identity] = changed, {task.host: task.mntpoint for task in tasks}, None
    left = {identity: mount for identity, mount in found.items() if identity not in answers}
    if left:
        from wheelmount.operations import apart, mounts, sessions

        alone = len(left) == 1
        works = [
            partial(sessions.refreshed, *mount)
            if isinstance(mount, _OfSession)
            # Another process is faster to scan again than to be sent a tree.
            else partial(mounts.refreshed, mount, settings, seen[identity] if alone else None)
            for identity, mount in left.items()
        ]
        made = apart.raise_first(apart.each(works, progress, "refresh"))
        answers |= dict(zip(left, made, strict=True))
    return [answers[identity] for identity in found]


def _refresh_here(
    directories: list[Path], settings: Settings, progress: Progress
) -> tuple[bool | None, Seen | None]:
    """Refresh a mount of this machine without hosts.

    Returns:
        Whether anything had changed; None if that is for hosts to find out, or to follow, with
        what was seen, if that is of use to them.
    """
    try:
        seen = look(directories, settings, progress)
    except SourceError:  # told of when the others are refreshed
        return None, None
    if seen is None or not seen.changed:
        return (None if seen is None else False), None
    if not direct.possible(directories, seen):
        return None, seen
    return direct.refresh(directories, seen, progress) or None, None


def _say(found: Sequence[tuple[Mapping[str, str], bool]], as_json: bool) -> None:
    records = [
        {"host": host, "mntpoint": point, "changed": changed}
        for points, changed in found
        for host, point in points.items()
    ]
    if as_json:
        print(json.dumps(records), flush=True)
        return
    for each in records:
        state = "refreshed" if each["changed"] else "unchanged"
        print(f"{each['host']} {each['mntpoint']} {state}", flush=True)


@click.command()
@click.argument("targets", nargs=-1, shell_complete=completion.mounts)
@click.option(
    "--repair", is_flag=True, help="Replace damaged files with bytes from other hosts or from here."
)
@options.as_json
@options.quiet
def verify(targets: tuple[str, ...], repair: bool, as_json: bool, quiet: bool) -> None:
    """Compare all bytes that mounts show on their hosts with the hashes of delivery.

    TARGETS are mount points, sources or identities that status shows; default all. Files that
    differ are named; the command ends with 74 if one stays damaged.
    """
    from wheelmount.operations import apart, mounts, sessions

    settings, progress = config.load(), ConsoleProgress(quiet=quiet)
    works = [
        partial(sessions.verified, *mount, repair)
        if isinstance(mount, _OfSession)
        else partial(mounts.verified, mount, repair, settings)
        for mount in _find(settings, targets).values()
    ]
    answers = apart.raise_first(apart.each(works, progress, "verify"))
    records = [
        {"host": host, "mntpoint": points[host], **found.summary()}
        for found_by_host, points in answers
        for host, found in found_by_host.items()
    ]
    if as_json:
        print(json.dumps(records))
    else:
        print("\n".join(line for record in records for line in _verified_lines(record)))
    bad = sum(len(record["wrong"]) + len(record["unknown"]) for record in records)
    if bad:
        raise StoreError(
            f"{number_of(bad, 'file')} damaged, or without hashes to be compared with",
            hint=None if repair else "`wheelmount verify --repair` brings the right bytes",
        )


def _verified_lines(record: dict[str, Any]) -> Iterator[str]:
    where = f"{record['host']} {record['mntpoint']}"
    rate = record["size"] / 1e9 / max(record["seconds"], 1e-9)
    yield (
        f"{where} {number_of(record['files'], 'file')}, {record['size'] / 1e6:.1f} MB verified in "
        f"{record['seconds']:.1f} s, {rate:.1f} GB/s"
    )
    for path in record["damaged"]:
        yield f"{where} {'damaged' if path in record['wrong'] else 'repaired'}: {path}"
    for path in record["unknown"]:
        yield f"{where} without hashes: {path}"


class _OfSession(NamedTuple):
    session: Session
    note: records.MountNote


def _find(settings: Settings, targets: Sequence[str] | None) -> dict[str, list[Path] | _OfSession]:
    """Mounts by identity: their directories here, or whose they are; default all."""
    found: dict[str, list[Path] | _OfSession] = {}
    standing = records.all_mounts(settings)
    for target in targets or [""]:
        path = os.path.abspath(target)  # noqa: PTH100 - a dead mount must not be touched
        names = (path, target) if target else ()
        for session, note in standing:
            if not names or {note.identity, note.source, note.mntpoint}.intersection(names):
                found[note.identity] = _OfSession(session, note)
        try:
            here = processes.find(settings, *names)
        except MountError:
            if not found:
                raise
            here = []
        for directory in here:
            directories = found.setdefault(processes.identity(directory), [])
            if isinstance(directories, list) and directory not in directories:
                directories.append(directory)
    return found


@click.command()
@click.argument("targets", nargs=-1, shell_complete=completion.mounts)
@click.option("--all", "everything", is_flag=True, help="All mounts that status shows.")
@click.option("--force", is_flag=True, help="Unmount even if in use; open files stay readable.")
@options.as_json
def umount(targets: tuple[str, ...], everything: bool, force: bool, as_json: bool) -> None:
    """Unmount TARGETS: mount points, sources or identities that status shows."""
    if not targets and not everything:
        raise InputError("nothing to unmount", hint="give a mount point, or --all")
    standing: dict[str, tuple[Session, list[str]]] = {}
    mounts = _find(config.load(), None if everything else targets)
    for identity, found in mounts.items():
        if isinstance(found, _OfSession):
            session = found.session
            standing.setdefault(session.name, (session, []))[1].append(identity)
        else:
            for directory in found:
                processes.stop(directory, force=force)
    if standing:
        from wheelmount.operations import apart, sessions

        works = [partial(sessions.unmount, *each, force) for each in standing.values()]
        apart.raise_first(apart.each(works, ConsoleProgress(), "unmount"))
    if as_json:
        print(json.dumps(list(mounts)))
