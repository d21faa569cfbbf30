"""A command in an offline container of one host, with the input of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from io import RawIOBase
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.containers.terminal import Size, Terminal
from wheelmount.errors import InputError
from wheelmount.hosts import engine
from wheelmount.hosts.runners import Output, Results
from wheelmount.hosts.spec import HostSpec
from wheelmount.jobs import sites
from wheelmount.jobs.containers import check, local_names
from wheelmount.jobs.image import Image, Shown, carry_out, order, packages_point
from wheelmount.mount.remote import remotemount
from wheelmount.progress import Progress


def pipe(
    spec: HostSpec,
    host: str | None,
    image: Image,
    argv: Sequence[str],
    packages: Path | None,
    settings: Settings,
    progress: Progress,
    *,
    stdin: RawIOBase | None,
    output: Output,
    terminal: Size | None = None,
) -> Results:
    """Run a command in a container of one host, with input, its output passed on as it comes.

    Args:
        spec: the hosts.
        host: which one; default the only one.
        image: the container.
        argv: the command.
        packages: see ``containers.execute``.
        settings: in force.
        progress: told about each step.
        stdin: what the command reads.
        output: told of what it prints.
        terminal: size of the terminal that it is to have, whose keys come by ``stdin``.

    Raises:
        InputError: which host is not clear.
    """
    check(spec, image, argv)
    _refuse_new_instance(image, packages)
    if spec.kind == "local":
        _choose(local_names(spec), host)
    with sites.at(spec, settings, progress, namespaces=False) as site:
        chosen = _choose([each.name for each in site.hosts], host)
        with contextlib.ExitStack() as stack:
            shown = None
            if packages is not None:
                mount = stack.enter_context(site.mount(packages, packages_point(spec, packages)))
                shown = Shown(packages, mount.mntpoints[chosen])
            ordered = order(chosen, image, shown, settings)
            if terminal is not None:
                ordered = dataclasses.replace(
                    ordered, terminal=terminal, environment={**ordered.environment, **_kind()}
                )
            return site.runners.run({chosen: carry_out(ordered, argv)}, output, stdin)


def attach(
    spec: HostSpec,
    host: str | None,
    image: Image,
    argv: Sequence[str],
    packages: Path | None,
    settings: Settings,
    progress: Progress,
) -> int:
    """Run a command in a container of one host of this machine, on a terminal passed on to ours.

    Args:
        spec: the hosts.
        host: which one; default the only one.
        image: the container.
        argv: the command.
        packages: see ``containers.execute``.
        settings: in force.
        progress: told about each step.

    Returns:
        The command's exit code.

    Raises:
        InputError: which host is not clear.
    """
    check(spec, image, argv)
    _refuse_new_instance(image, packages)
    names = local_names(spec)
    chosen = _choose(names, host)
    only = dataclasses.replace(image, paths={"": image.own(chosen)} if image.paths else {})

    def run(shown: Shown | None) -> int:
        ordered = order(chosen, only, shown, settings)
        who = {"WHEELMOUNT_HOST": chosen, "WHEELMOUNT_RANK": str(names.index(chosen))}
        ordered = dataclasses.replace(ordered, environment={**ordered.environment, **who})
        with Terminal() as terminal:
            return ordered.run(argv, terminal=terminal)

    if packages is None:
        return run(None)
    # Here and not on a session's host, whose mounts are in a namespace of its own.
    here = dataclasses.replace(spec, count=1, session=None)
    where = packages_point(here, packages).replace("{host}", chosen)
    with here.make(settings, namespaces=False) as hosts:
        try:
            with remotemount(hosts, packages, where, settings=settings, progress=progress) as mount:
                return run(Shown(packages, next(iter(mount.mntpoints.values()))))
        finally:
            engine.stop()


def _kind() -> dict[str, str]:
    """What this process's terminal is, for commands that are to use it."""
    return {"TERM": os.environ.get("TERM", "dumb")}


def _choose(names: Sequence[str], host: str | None) -> str:
    if host is None and len(names) == 1:
        return names[0]
    if host is None or host not in names:
        raise InputError(
            f"there is no host {host}" if host else "input can go to one host only",
            hint=f"say which: --on {' or --on '.join(names)}",
        )
    return host


def _refuse_new_instance(image: Image, packages: Path | None) -> None:
    if image.instance is not None and packages is not None:
        raise InputError(
            "an instance is started with its packages by `wheelmount exec`",
            hint="do that first, and leave --packages out here",
        )
