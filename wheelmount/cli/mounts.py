"""``wheelmount mount | umount | status``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from wheelmount import config
from wheelmount.cli import options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.config import Settings
from wheelmount.errors import InputError, WheelmountError
from wheelmount.hosts.spec import HostSpec
from wheelmount.mount import serving
from wheelmount.mount.point import View
from wheelmount.mount.task import Task


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("mntpoint", required=False)
@options.hosts
@options.adapter
@options.quiet
def mount(source: Path, mntpoint: str | None, spec: HostSpec, adapter: str, quiet: bool) -> None:
    """Mount SOURCE read-only on every host, and leave it standing.

    MNTPOINT is where, on the hosts; default the path of SOURCE. `{host}` in it becomes the name of
    the host (`/mnt/{host}`). Several hosts on one machine have a mount namespace of their own each
    unless `{host}` tells their mount points apart.
    """
    if mntpoint is not None:
        mntpoint = os.path.abspath(mntpoint)  # noqa: PTH100 - must not follow symlinks
    from wheelmount.jobs import mounts  # with Monarch, which other commands here do without

    settings = replace(config.load(), adapter=adapter)
    made = mounts.mount(spec, source, mntpoint, settings, ConsoleProgress(quiet=quiet))
    for name, path in made.mntpoints.items():
        print(f"{name} {path}")


@click.command()
@click.argument("targets", nargs=-1, required=True)
@options.quiet
def refresh(targets: tuple[str, ...], quiet: bool) -> None:
    """Have mounts show their directories as they are now.

    TARGETS are mount points, sources or identities that status shows. Only what changed travels;
    hosts show the old tree until the new one is whole.
    """
    from wheelmount.jobs import mounts

    settings = config.load()
    for mount in _by_identity(_find(settings, targets)).values():
        changed = mounts.refresh(mount, settings, ConsoleProgress(quiet=quiet))
        for directory in mount:
            task = Task.read(directory)
            print(f"{task.host} {task.mntpoint} {'refreshed' if changed else 'unchanged'}")


def _find(settings: Settings, targets: Sequence[str]) -> list[Path]:
    found = []
    for target in targets:
        path = os.path.abspath(target)  # noqa: PTH100 - a dead mount must not be touched
        found += serving.find(settings, path, target)
    return list(dict.fromkeys(found))


def _by_identity(directories: Sequence[Path]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for directory in directories:
        found.setdefault(serving.identity(directory), []).append(directory)
    return found


@click.command()
@click.argument("targets", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All that status shows.")
@click.option("--force", is_flag=True, help="Also if in use: users keep what they have open.")
def umount(targets: tuple[str, ...], everything: bool, force: bool) -> None:
    """Take mounts down: TARGETS are mount points, sources or identities that status shows."""
    if not targets and not everything:
        raise InputError("nothing to unmount", hint="give a mount point, or --all")
    settings = config.load()
    for directory in serving.find(settings) if everything else _find(settings, targets):
        serving.stop(directory, force=force)


@click.command()
@options.as_json
def status(as_json: bool) -> None:
    """Show what is mounted from this machine's hosts, and how far it has arrived."""
    here = View.here().namespace
    records = [_record(directory, here) for directory in serving.find(config.load())]
    if as_json:
        print(json.dumps(records))
        return
    if not records:
        print("nothing is mounted")
    for record in records:
        print(_line(record))


def _record(directory: Path, here: int) -> dict[str, Any]:
    task = Task.read(directory)
    record: dict[str, Any] = {
        "identity": serving.identity(directory),
        "host": task.host,
        "source": task.source,
        "mntpoint": task.mntpoint,
    }
    try:
        found = serving.status(directory)
    except WheelmountError as error:
        return record | {"error": error.message}
    return record | found | {"visible": found["namespace"] == here}


def _line(record: dict[str, Any]) -> str:
    words = [record["identity"], record["host"], f"{record['source']} at {record['mntpoint']}"]
    if "error" in record:
        return "  ".join([*words, "dead: `wheelmount umount --force` clears it away"])
    arrived = "complete" if record["held"] == record["size"] else f"{record['held']} bytes of it"
    words.append(f"{record['files']} files, {record['size'] / 1e6:.1f} MB, {arrived}")
    words.append(record["adapter"])
    words.append(f"up {time.time() - record['started']:.0f} s")
    if not record["visible"]:
        words.append(f"in a namespace of its own: nsenter -m -t {record['pid']}")
    if record["changed"]:
        words.append(f"changed at the source: {', '.join(record['changed'])}")
    return "  ".join(words)
