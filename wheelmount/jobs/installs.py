"""Packages, installed on every host from what is mounted there: wheels, packed or unpacked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from blake3 import blake3
from packaging.utils import parse_wheel_filename

from wheelmount.config import Settings
from wheelmount.containers import probe
from wheelmount.errors import InputError
from wheelmount.hosts.runner import Command
from wheelmount.hosts.runners import Result, Results, Runners, worst
from wheelmount.hosts.session import Session
from wheelmount.hosts.spec import HostSpec
from wheelmount.jobs import sites
from wheelmount.jobs.containers import Image, execute, packages_point
from wheelmount.jobs.mounts import on_mounts
from wheelmount.progress import Progress
from wheelmount.wheels.redirect import PACKAGES
from wheelmount.wheels.shipment import Shipment, prepare
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

Tool: TypeAlias = Literal["wheelmount", "uv", "pip"]
LinkMode: TypeAlias = Literal["copy", "symlink"]


@dataclasses.dataclass(frozen=True, slots=True)
class Venv:
    """Install into a virtual environment of each host.

    Attributes:
        path: where; ``{host}`` becomes the host's name, which is added where hosts share a machine.
    """

    path: str


def install(
    spec: HostSpec,
    wanted: Wanted,
    into: Venv | Image,
    settings: Settings,
    progress: Progress,
    *,
    tool: Tool = "uv",
    link_mode: LinkMode = "copy",
    bytecode: bool = True,
    directory: Path | None = None,
    target: Target | None = None,
) -> Results:
    """Download, prove complete, mount, and install on every host from the mount, offline.

    Args:
        spec: the hosts.
        wanted: what to install.
        into: where to.
        settings: in force.
        progress: told about each step.
        tool: what installs: for pip and uv the wheelhouse is mounted, and each host unpacks it;
            for ``wheelmount`` wheels are unpacked here and mounted so.
        link_mode: with ``wheelmount``: ``copy``, or ``symlink`` for links into the mount, which
            then stays.
        bytecode: with ``wheelmount``: whether it is made here, once for all hosts.
        directory: the wheelhouse; default one of its own in the cache for these requirements.
        target: default the image's Python, or this one.
    """
    if link_mode != "copy" and tool != "wheelmount":
        raise InputError(f"{tool} has no links to make", hint="leave --with or --link-mode away")
    if target is None:
        target = Target.here()
        if isinstance(into, Image):
            python = probe.python(into.path)
            target = Target.parse(python.version, python.platform)
    house = Wheelhouse(directory or _wheelhouse(settings, wanted, target))
    report = house.add(wanted, targets=[target], progress=progress)
    # What is in the wheels was published so; reading it all would take longer than to install it.
    house.check(wanted, targets=[target], contents=False, progress=progress).raise_if_any()
    if tool == "wheelmount":
        cache = Path(settings.cache_dir) / "unpacked"
        tree = _growing_tree(spec, into, link_mode, settings)
        shipment = prepare(
            house.directory, report.wheels, target, cache, progress, bytecode=bytecode, tree=tree
        )
        return _place(spec, shipment, into, link_mode, settings, progress)
    named = [str(requirement) for requirement in wanted.requirements]
    if not wanted.by_name:  # hosts do not have the files, and ask by name
        pins = (parse_wheel_filename(wheel)[:2] for wheel in report.wheels)
        named = [f"{name}=={version}" for name, version in pins]
    if isinstance(into, Image):
        argv = [tool, "install"] if tool == "pip" else [tool, "pip", "install"]
        return execute(spec, into, [*argv, "--", *named], house.directory, settings, progress)
    venv = _venv(into, spec)

    def command(host: str, path: str) -> Command:
        where = venv.replace("{host}", host)
        return Command(("python", "-m", "wheelmount.wheels", tool, path, where, *named))

    packages = packages_point(settings)
    return on_mounts(spec, house.directory, packages, command, settings, progress, "install")


def _place(
    spec: HostSpec,
    shipment: Shipment,
    into: Venv | Image,
    link_mode: LinkMode,
    settings: Settings,
    progress: Progress,
) -> Results:
    """Mount unpacked wheels and put them into environments."""
    if isinstance(into, Image):
        argv = shipment.command("python3", PACKAGES, link_mode)
        results = execute(spec, into, argv, shipment.tree, settings, progress)
        if link_mode != "copy":
            progress.log(
                f"packages in overlay {into.overlay} are links into {PACKAGES}: "
                f"use it with --packages {shipment.tree}"
            )
        return results
    venv = _venv(into, spec)

    def command(host: str, path: str) -> Command:
        where = venv.replace("{host}", host)
        program = ("python", "-m", "wheelmount.wheels", "wheelmount", path, where)
        return Command((*program, shipment.plan, link_mode))

    if link_mode == "copy" and spec.session is None:
        packages = packages_point(settings)
        return on_mounts(spec, shipment.tree, packages, command, settings, progress, "install")
    packages = str(settings.private_runtime() / f"links-{shipment.tree.name}-{{host}}")
    if spec.session is not None:
        return on_mounts(spec, shipment.tree, packages, command, settings, progress, "install")
    results = _on_standing_mounts(spec, shipment, packages, command, settings, progress)
    if _linked(results):
        progress.log(
            f"environments are links into {packages}, which stays mounted: see wheelmount status"
        )
    return results


def _growing_tree(
    spec: HostSpec, into: Venv | Image, link_mode: LinkMode, settings: Settings
) -> str | None:
    """Name of a tree that serves more than one installation; None for one of its own."""
    if isinstance(into, Image) and link_mode != "copy":  # all links in it are to one path
        return f"overlay-{into.overlay}"
    if spec.session is not None:  # its mount stays, and is refreshed
        created = Session(spec.session, settings).read().created
        return f"session-{spec.session}-{created:.0f}"
    return None


def _on_standing_mounts(
    spec: HostSpec,
    shipment: Shipment,
    mntpoint: str,
    command: Callable[[str, str], Command],
    settings: Settings,
    progress: Progress,
) -> Results:
    """Like ``on_mounts``, but a mount that is linked into stays, and serves the next time."""
    with sites.at(spec, settings, progress, namespaces=False) as site:
        points = {host.name: mntpoint.replace("{host}", host.name) for host in site.hosts}
        plans = {name: f"{point}/{shipment.plan}" for name, point in points.items()}
        probes = {name: Command(("test", "-e", plan)) for name, plan in plans.items()}
        if not worst(site.runners.run(probes)):
            return _run(site.runners, points, command, progress)
        with site.mount(shipment.tree, mntpoint) as mount:
            results = _run(site.runners, points, command, progress)
            if _linked(results):
                mount.keep()
                mount.release()
        return results


def _run(
    runners: Runners,
    points: Mapping[str, str],
    command: Callable[[str, str], Command],
    progress: Progress,
) -> Results:
    with progress.task("install", unit="hosts") as task:
        results = runners.run({name: command(name, point) for name, point in points.items()})
        task.advance(len(results))
        return results


def _linked(results: Results) -> bool:
    """Whether any host has come to need the mount."""
    return any(isinstance(result, Result) and not result.code for result in results.values())


def _venv(into: Venv, spec: HostSpec) -> str:
    """Path of the environment, with ``{host}`` in it where hosts share a machine."""
    return f"{into.path}-{{host}}" if spec.shared and "{host}" not in into.path else into.path


def _wheelhouse(settings: Settings, wanted: Wanted, target: Target) -> Path:
    """The wheelhouse in the cache for one request: what is installed is then what was asked for."""
    name = blake3(f"{target}\0{wanted}".encode()).hexdigest()[:16]
    return Path(settings.cache_dir) / "wheelhouses" / name
