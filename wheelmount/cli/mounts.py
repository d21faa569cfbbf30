"""``wheelmount mount | refresh | verify | umount``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from wheelmount import config
from wheelmount.cli import completion, options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.errors import InputError, TransferError, WheelmountError, among
from wheelmount.hosts.spec import HostSpec
from wheelmount.operations import standing
from wheelmount.operations.records import Refreshed
from wheelmount.operations.site import Site
from wheelmount.progress import number_of


@click.command()
@click.argument("source", type=options.GivenPath(path_type=Path))
@click.argument("mntpoint", type=options.GivenPath(), required=False)
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
    site = Site(spec, settings, ConsoleProgress(quiet=quiet))
    made, shortfall = mounts.mount(site, source, mntpoint)
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
    if watch:
        for each in standing.watch(targets, settings, progress):
            if isinstance(each, TransferError):
                progress.error(each)
                continue
            _say([each], as_json)
            if each.shortfall is not None:
                progress.error(each.shortfall)
        return
    answers = standing.refresh(targets, settings, progress)
    made = [answer for answer in answers if not isinstance(answer, WheelmountError)]
    if made or not as_json:
        _say(made, as_json)
    shortfalls = [each.shortfall for each in made if each.shortfall is not None]
    progress.raise_first([*among(answers), *shortfalls])


def _say(found: Sequence[Refreshed], as_json: bool) -> None:
    records = [
        {"host": host, "mntpoint": mntpoint, "changed": each.changed}
        for each in found
        for host, mntpoint in each.mntpoints.items()
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
    progress = ConsoleProgress(quiet=quiet)
    records, failed = standing.verify(targets, config.load(), progress, repair=repair)
    if as_json and (records or not failed):
        print(json.dumps(records))
    elif not as_json:
        for line in (line for record in records for line in _verified_lines(record)):
            print(line)
    progress.raise_first(failed)


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


@click.command()
@click.argument("targets", nargs=-1, shell_complete=completion.mounts)
@click.option("--all", "everything", is_flag=True, help="All mounts that status shows.")
@click.option("--force", is_flag=True, help="Unmount even if in use; open files stay readable.")
@options.as_json
def umount(targets: tuple[str, ...], everything: bool, force: bool, as_json: bool) -> None:
    """Unmount TARGETS: mount points, sources or identities that status shows."""
    if not targets and not everything:
        raise InputError("nothing to unmount", hint="give a mount point, or --all")
    progress = ConsoleProgress()
    unmounted, failed = standing.unmount(targets, config.load(), progress, force=force)
    if as_json and (unmounted or not failed):
        print(json.dumps(unmounted))
    progress.raise_first(failed)
