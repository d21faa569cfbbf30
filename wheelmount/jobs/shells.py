"""A command in an offline container of one host, with the input of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.containers.terminal import Terminal
from wheelmount.errors import InputError, UnavailableError
from wheelmount.hosts import engine
from wheelmount.hosts.spec import HostSpec
from wheelmount.jobs.containers import check, local_names, packages_point
from wheelmount.jobs.image import Image, Shown, order
from wheelmount.mount.remote import remotemount
from wheelmount.progress import Progress


def attach(
    spec: HostSpec,
    host: str | None,
    image: Image,
    argv: Sequence[str],
    packages: Path | None,
    settings: Settings,
    progress: Progress,
    *,
    terminal: bool,
) -> int:
    """Run a command in an offline container of one host of this machine, with this process's input.

    Args:
        spec: the hosts.
        host: which one; default the only one.
        image: the container.
        argv: the command.
        packages: see `execute`.
        settings: in force.
        progress: told about each step.
        terminal: give the command a terminal, passed on to this process's own.

    Returns:
        The command's exit code.

    Raises:
        InputError: which host is not clear.
        UnavailableError: it is another machine.
    """
    check(spec, image, argv)
    if spec.addresses:
        raise UnavailableError(
            "input reaches hosts of this machine only",
            hint="log in on the host, and say --hosts local:1 there",
        )
    names = local_names(spec)
    if host is None and len(names) == 1:
        (host,) = names
    if host not in names:
        raise InputError(
            f"there is no host {host}" if host else "input can go to one host only",
            hint=f"say which: --on {' or --on '.join(names)}",
        )
    chosen = host
    only = dataclasses.replace(image, paths={"": image.own(chosen)} if image.paths else {})

    def run(shown: Shown | None) -> int:
        ordered = order(chosen, only, shown, settings)
        who = {"WHEELMOUNT_HOST": chosen, "WHEELMOUNT_RANK": str(names.index(chosen))}
        ordered = dataclasses.replace(ordered, environment={**ordered.environment, **who})
        if not terminal:
            return ordered.run(argv, stdin=None)
        with Terminal() as opened:
            return ordered.run(argv, terminal=opened)

    if packages is None:
        return run(None)
    if image.instance is not None:
        raise InputError(
            "an instance is started with its packages by `wheelmount exec`",
            hint="do that first, and leave --packages out here",
        )
    where = packages_point(settings).replace("{host}", chosen)
    with dataclasses.replace(spec, count=1, session=None).make(settings, namespaces=False) as hosts:
        try:
            with remotemount(hosts, packages, where, settings=settings, progress=progress) as mount:
                return run(Shown(packages, next(iter(mount.mntpoints.values()))))
        finally:
            engine.stop()
