"""Instances on this machine, and their mounts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.containers.instance import Instance
from wheelmount.errors import ContainerError, MountError, among
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Result, Results
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.mount.kernel.points import PRIVATE
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task
from wheelmount.operations import pools, pulled, standing
from wheelmount.operations.image import Image, Shown, carry_out, mark_of, order, packages_point
from wheelmount.operations.launch import Launch
from wheelmount.operations.pools import HostPool
from wheelmount.operations.site import Site
from wheelmount.progress import SILENT

_OWN = "instance-"
"""Prefix of the names of instances' mount points."""


def on_standing(
    site: Site,
    image: Image,
    packages: Path,
    command: Callable[[Image, str, Shown], Command],
    launch: Launch,
) -> Results:
    """Run a command in instances, with a mount that stays as long as they run.

    Raises:
        ContainerError: the instance runs on only some of the hosts.
    """
    spec = site.spec
    if spec.session is not None:
        where = packages_point(spec, packages)
    else:
        # One place for each directory: an instance that shows another one is told by that.
        name = f"{_OWN}{image.instance}-{mark_of(packages)}-{{host}}"
        where = f"{PRIVATE}/{name}"

    def running(pool: HostPool, places: Mapping[str, Shown]) -> list[str]:
        asked = {
            host: carry_out(order(host, image, shown, Launch(), site), ())
            for host, shown in places.items()
        }
        answers = pool.commands.run(asked)
        return [name for name, r in answers.items() if isinstance(r, Result) and r.code == 0]

    with (
        pools.at(site, namespaces=False, visible=True) as pool,
        pulled.shown(image, pool, spec) as image,
    ):
        points = pool.places(where)
        places = {host: Shown(packages, path) for host, path in points.items()}
        commands = {host: command(image, host, shown) for host, shown in places.items()}
        found = running(pool, places)
        if len(found) == len(commands):
            with _refreshed(site, pool, packages, where):
                return pool.run(commands, "run", launch)
        if found:
            raise ContainerError(
                f"instance {image.instance} runs on {', '.join(found)} only",
                hint=f"end it there first: wheelmount instance stop {image.instance}",
            )
        if kept := _kept(site, list(points.values())):
            with _refreshed(site, pool, packages, where):
                results = pool.run(commands, "run", launch)
            if not running(pool, places):
                for directory in kept:
                    processes.stop(directory, force=False)
            return results
        mounted = pool.mount(packages, where)
        if not isinstance(mounted, RemoteMount):  # those of a session stay by themselves
            with mounted:
                return pool.run(commands, "run", launch)
        mounted.open()
        try:
            mounted.keep()
            results = pool.run(commands, "run", launch)
        except BaseException:
            mounted.clear()
            raise
        if running(pool, places):
            mounted.release()
        else:
            mounted.close(force=True)
        return results


def _kept(site: Site, points: Sequence[str]) -> list[Path]:
    """Return the mounts that an instance has left which was killed; empty unless all are there."""
    if site.spec.session is not None or site.spec.kind != "local":
        return []
    mounts = [each for each in _mounts(site.settings, *points) if not processes.dead(each)]
    if len(mounts) == len(points):
        return mounts
    for directory in mounts:
        processes.stop(directory, force=False)
    return []


@contextlib.contextmanager
def _refreshed(site: Site, pool: HostPool, packages: Path, where: str) -> Iterator[None]:
    """Have running instances show a directory as it is now, during the context.

    Raises:
        WheelmountError: the mount cannot be refreshed.
    """
    if site.spec.session is not None:
        with pool.mount(packages, where):
            yield
        return
    points = pool.places(where).values()
    if site.spec.kind != "local":
        site.progress.log("packages are as they were when the instance was started")
    else:
        mounted: dict[str, list[Path]] = {}
        for directory in _mounts(site.settings, *points):
            mounted.setdefault(processes.identity(directory), []).append(directory)
        for error in among(standing.refresh_found(mounted, site.settings, SILENT, alone=True)):
            raise error
    yield


def find(settings: Settings, names: Sequence[str] = ()) -> list[Instance]:
    """Return this machine's instances by name and host, killed ones included.

    Args:
        settings: settings with the directory of instances.
        names: names of instances; default all.

    Raises:
        ContainerError: there is no instance of a name.
    """
    found = Instance.all(settings.private_runtime())
    for name in names:
        if name not in {each.name for each in found}:
            raise ContainerError(
                f"there is no instance {name} on this machine",
                hint="see `wheelmount instance ls`",
            )
    return [each for each in found if not names or each.name in names]


def stop(instance: Instance, settings: Settings) -> None:
    """End an instance, and unmount its directory.

    Raises:
        WaitError: the instance does not end.
        MountError: its mount is in use.
    """
    instance.stop()
    # Not by its record, which it lacks if its start was killed.
    name = f"{_OWN}{re.escape(instance.name)}-[0-9a-f]{{16}}-{re.escape(instance.host)}"
    for directory in processes.find(settings):
        with contextlib.suppress(FileNotFoundError):  # taken down meanwhile
            if re.fullmatch(name, Path(Task.read(directory).mntpoint).name):
                processes.stop(directory, force=False)


def _mounts(settings: Settings, *mntpoints: str) -> list[Path]:
    """Return the directories of the processes of mounts that are not taken down."""
    try:
        return processes.find(settings, *mntpoints)
    except MountError:
        return []
