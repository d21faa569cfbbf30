"""Commands in offline containers, on every host."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from wheelmount.errors import InputError
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Result, Results
from wheelmount.hosts.spec import HostSpec
from wheelmount.operations import instances, pools, pulled, scripts
from wheelmount.operations.image import Image, Shown, carry_out, order, packages_point
from wheelmount.operations.launch import Launch
from wheelmount.operations.mounts import hosts_for
from wheelmount.operations.site import Site
from wheelmount.progress import Progress
from wheelmount.wheels.missing import absent

_FULL = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")


def execute(
    site: Site,
    image: Image,
    argv: Sequence[str],
    packages: Path | None,
    launch: Launch,
) -> Results:
    """Run a command on every host in an offline container.

    Args:
        site: the hosts.
        image: the container.
        argv: the command.
        packages: a wheelhouse to mount on the hosts and show at ``/packages``; or a directory with
            one in ``packages/`` and an image beside.
        launch: how to run it.
    """
    spec = site.spec
    launch.check_container()
    with pulled.here(image, site) as image:
        check(spec, image, argv)
        if launch.collect is not None and launch.collect.output and image.instance is not None:
            raise InputError(
                "an instance that may run already sees no directory for output",
                hint="omit --instance, or give a path in it: --collect PATH DIRECTORY",
            )

        if (
            image.instance is not None
        ):  # processes that it leaves in the instance would keep them open
            launch = dataclasses.replace(launch, lent={})

        def ordered(image: Image, host: str, shown: Shown | None) -> Command:
            return carry_out(order(host, image, shown, launch, site), argv)

        if packages is not None and image.instance is not None:
            results = instances.on_standing(site, image, packages, ordered, launch)
        elif packages is not None:
            point = packages_point(spec, packages)
            with (
                hosts_for(site, point) as pool,
                pulled.shown(image, pool, spec) as seen,
            ):
                results = pool.run_on_mounts(
                    packages,
                    point,
                    lambda host, path: ordered(seen, host, Shown(packages, path)),
                    "run",
                    launch,
                )
        else:
            lasts = image.instance is not None
            with (
                # Instances are entered by later commands, which have other namespaces.
                pools.at(site, namespaces=False, visible=lasts) as pool,
                pulled.shown(image, pool, spec) as seen,
            ):
                commands = {host.name: ordered(seen, host.name, None) for host in pool.chosen}
                results = pool.run(commands, "run", launch)
        explain(results, image, packages, site.progress)
        return results


def script(
    site: Site,
    image: Image,
    source: Path,
    program: scripts.Program,
    mntpoint: str | None,
    launch: Launch,
) -> Results:
    """Mount a directory on all hosts and run a script on each, in a container that shows it.

    The container shows the directory at its path on the host, read-only, and the script starts
    there. ``WHEELMOUNT_MOUNT`` has this path; ``WHEELMOUNT_HOST`` and ``WHEELMOUNT_RANK`` identify
    the host. Wheels in the directory, or in its ``packages/``, are at ``/packages``, too.

    Args:
        site: the hosts.
        image: the container.
        source: the directory.
        program: the script or command.
        mntpoint: mount point on the hosts.
        launch: how to run it.
    """
    spec = site.spec
    launch.check_container()
    with pulled.here(image, site) as image:
        inside = scripts.is_environment(source)
        argv = program.inside(program.through(environment=inside))
        check(spec, image, argv)
        if image.instance is not None:
            raise InputError(
                "a script cannot be shown to an instance that may run already",
                hint="omit --instance, or use `wheelmount exec`",
            )

        def ordered(image: Image, host: str, path: str) -> Command:
            shown = Shown(source, path)
            ordered = order(host, image, shown, launch, site, there=True, script=program.text)
            if inside:
                return carry_out(ordered, scripts.activated(path, argv, image.variables))
            return carry_out(ordered, argv)

        with (
            hosts_for(site, mntpoint) as pool,
            pulled.shown(image, pool, spec) as seen,
        ):
            results = pool.run_on_mounts(
                source, mntpoint, lambda host, path: ordered(seen, host, path), "run", launch
            )
        explain(results, image, source, site.progress)
        return results


def check(spec: HostSpec, image: Image, argv: Sequence[str]) -> None:
    """Refuse impossible combinations before anything is started.

    Raises:
        InputError: there is no command, or images are named for missing hosts.
    """
    if not argv:
        raise InputError("no command to run in the container", hint="name one, such as: -- python")
    if spec.kind != "local":  # their names are known when they answer
        return
    known = spec.local_names
    pools.check([*filter(None, image.paths), *spec.only], known)
    if image.paths:
        for name in spec.only or known:
            image.own(name)


def _called(image: Image) -> str:
    return f"overlay {image.overlay}" if image.overlay else "the overlay"


def explain(results: Results, image: Image, packages: Path | None, progress: Progress) -> None:
    """Add explanations to failures that the command's output reveals."""
    failed = {n: r for n, r in results.items() if isinstance(r, Result) and r.code}
    said = {name: result.stderr.decode(errors="replace") for name, result in failed.items()}
    lacking = {name for text in said.values() for name in absent(text)}
    if lacking and packages is not None:
        folder = Shown(packages, str(packages)).packages
        progress.log(f"hint: wheelmount download {shlex.join(sorted(lacking))} -d {folder}")
    full = [name for name, text in said.items() if any(sign in text for sign in _FULL)]
    if full:
        progress.log(
            f"hint: {_called(image)} is full on {', '.join(full)}; what was in it before "
            "still is. A larger one: --overlay NAME --overlay-size SIZE; "
            "what there is: wheelmount overlay ls"
        )
