"""Commands in an offline container of one host that read this process's input."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from wheelmount.containers.terminal import Terminal, raw
from wheelmount.errors import InputError
from wheelmount.hosts import runtime
from wheelmount.hosts.commands import Results
from wheelmount.mount.client.remote import remotemount
from wheelmount.operations import pools, pulled
from wheelmount.operations.containers import check
from wheelmount.operations.image import Image, Shown, carry_out, order, packages_point
from wheelmount.operations.launch import Launch
from wheelmount.operations.site import Site

_ALONE = {"WHEELMOUNT_RANK": "0", "WHEELMOUNT_SIZE": "1", "WHEELMOUNT_LOCAL_RANK": "0"}
"""Variables that tell a command its place among all copies: there is one."""


def pipe(
    site: Site,
    image: Image,
    argv: Sequence[str],
    packages: Path | None,
    launch: Launch,
    *,
    terminal: bool = False,
) -> Results:
    """Run a command in a container of one host, with input; output is passed on as it comes.

    Args:
        site: the hosts.
        image: the container.
        argv: the command.
        packages: directory of wheels for the container, as for ``containers.execute``.
        launch: how to run it.
        terminal: whether the command gets a terminal, of the size of this process's; all keys are
            its input then, but ``^C`` interrupts this process until the hosts have started.

    Raises:
        InputError: more than one host is chosen.
    """
    spec = site.spec
    with pulled.here(image, site) as image:
        check(spec, image, argv)
        _refuse_new_instance(image, packages)
        if spec.kind == "local":
            _choose(spec.local_names, spec.only)
        lasts = image.instance is not None  # later commands with other namespaces enter it
        with (
            pools.at(site, namespaces=False, visible=lasts) as pool,
            pulled.shown(image, pool, spec) as image,
        ):
            chosen = _choose([each.name for each in pool.hosts], spec.only)
            with contextlib.ExitStack() as stack:
                shown = None
                if packages is not None:
                    mount = stack.enter_context(
                        pool.mount(packages, packages_point(spec, packages))
                    )
                    shown = Shown(packages, mount.mntpoints[chosen])
                ordered = order(chosen, image, shown, launch, site)
                if terminal:
                    size = stack.enter_context(raw())
                    ordered = dataclasses.replace(
                        ordered, terminal=size, environment={**ordered.environment, **_kind()}
                    )
                command = dataclasses.replace(carry_out(ordered, argv), environment=_ALONE)
                lent = {} if image.instance else launch.lent  # what it leaves there runs on
                return pool.commands.run({chosen: command}, launch.output, launch.stdin, lent=lent)


def attach(
    site: Site,
    image: Image,
    argv: Sequence[str],
    packages: Path | None,
    launch: Launch,
) -> int:
    """Run a command in a container of a host of this machine, on this process's terminal.

    Args:
        site: the hosts.
        image: the container.
        argv: the command.
        packages: directory of wheels for the container, as for ``containers.execute``.
        launch: how to run it.

    Returns:
        The command's exit code.

    Raises:
        InputError: more than one host is chosen.
    """
    spec = site.spec
    with pulled.here(image, site) as image:
        check(spec, image, argv)
        _refuse_new_instance(image, packages)
        chosen = _choose(spec.local_names, spec.only)
        only = dataclasses.replace(image, paths={"": image.own(chosen)} if image.paths else {})

        def run(shown: Shown | None) -> int:
            ordered = order(chosen, only, shown, launch, site)
            who = {"WHEELMOUNT_HOST": chosen, **_ALONE}
            ordered = dataclasses.replace(ordered, environment={**ordered.environment, **who})
            with Terminal() as terminal:
                return ordered.run(argv, terminal=terminal)

        if packages is None:
            return run(None)
        # Here and not on a session's host, whose mounts are in a namespace of its own.
        here = dataclasses.replace(spec, count=1, session=None)
        where = packages_point(here, packages).replace("{host}", chosen)
        with here.make(site.settings, namespaces=False) as hosts:
            try:
                with remotemount(
                    hosts, packages, where, settings=site.settings, progress=site.progress
                ) as mount:
                    return run(Shown(packages, next(iter(mount.mntpoints.values()))))
            finally:
                runtime.stop()


def _kind() -> dict[str, str]:
    """Return variables that tell a command the type of this process's terminal."""
    return {"TERM": os.environ.get("TERM", "dumb")}


def _choose(names: Sequence[str], only: Sequence[str]) -> str:
    pools.check(only, names)
    chosen = only or names
    if len(chosen) != 1:
        raise InputError(
            "input can go to one host only", hint=f"say which: --on {' or --on '.join(names)}"
        )
    return chosen[0]


def _refuse_new_instance(image: Image, packages: Path | None) -> None:
    if image.instance is not None and packages is not None:
        raise InputError(
            "an instance is started with its packages by `wheelmount exec`",
            hint="do that first, and leave --packages out here",
        )
