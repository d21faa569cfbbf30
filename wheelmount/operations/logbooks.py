"""Find and follow the logs of mounts, instances and hosts on this machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.containers.instance import Instance
from wheelmount.errors import InputError, MountError
from wheelmount.mount.serve import processes
from wheelmount.operations import standing

POLL_INTERVAL = 0.2
"""Seconds between checks for new lines."""


@dataclass(frozen=True, slots=True)
class Logbook:
    """A log file.

    Attributes:
        owner: its writer: ``mount IDENTITY host0``, ``instance work host0``, ``host host0``.
        path: the file.
    """

    owner: str
    path: Path


def find(settings: Settings, target: str = "") -> list[Logbook]:
    """Return the logs of mounts, instances and hosts on this machine.

    Args:
        settings: settings with the user's runtime directory.
        target: a mount point, source or identity of mounts, or an instance's name; default all.

    Raises:
        InputError: there is neither such a mount nor such an instance.
    """
    wanted = set(standing.named(target)) if target else set()
    found = []
    for directory in processes.find(settings):
        identity = processes.identity(directory)
        try:
            task = processes.task(directory)
        except MountError:  # its log is gone, too
            continue
        if not wanted or wanted & {identity, task.source, task.mntpoint}:
            found.append(Logbook(f"mount {identity} {task.host}", directory / "log"))
    for path in sorted(
        processes.directory(settings).glob("*.log")
    ):  # logs of mounts that ended with an error
        identity = processes.identity(path.with_suffix(""))
        if not wanted or identity in wanted:
            found.append(Logbook(f"mount {path.stem}, which ended badly", path))
    found += of_instances(settings, target)
    if not wanted:
        for path in sorted(settings.private_runtime().glob("hosts-*/*.log")):
            found.append(Logbook(f"host {path.stem}", path))
    if wanted and not found:
        raise InputError(
            f"there is no mount and no instance {target} on this machine",
            hint="see `wheelmount status` and `wheelmount instance ls`",
        )
    return [each for each in found if each.path.is_file()]


def of_instances(settings: Settings, name: str = "") -> list[Logbook]:
    """The logs of instances of a name; default of all."""
    return [
        Logbook(f"instance {each.name} {each.host}", path)
        for each in Instance.all(settings.private_runtime())
        if name in ("", each.name)
        for path in each.logs()
    ]


def read(books: Sequence[Logbook], *, follow: bool) -> Iterator[tuple[Logbook, list[str]]]:
    """The lines of logs.

    Args:
        books: the logs.
        follow: also yield new lines as they are written, until all files are deleted.
    """
    opened = {}
    for book in books:
        with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
            opened[book] = book.path.open("rb")
    rests = dict.fromkeys(opened, b"")
    while opened:
        for book, file in list(opened.items()):
            last = not (follow and book.path.exists())
            if (
                os.fstat(file.fileno()).st_size < file.tell()
            ):  # it was emptied, because it was too large
                file.seek(0)
            *lines, rests[book] = (rests[book] + file.read()).split(b"\n")
            if last and rests[book]:
                lines.append(rests[book])
            if lines:
                yield book, [line.decode(errors="replace") for line in lines]
            if last:
                file.close()
                del opened[book]
        if opened:
            time.sleep(POLL_INTERVAL)
