"""Packages, installed on every host from a wheelhouse that is mounted there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from blake3 import blake3
from packaging.utils import parse_wheel_filename

from wheelmount.config import Settings
from wheelmount.containers import probe
from wheelmount.errors import InputError
from wheelmount.hosts.runner import Command
from wheelmount.hosts.runners import Output, Results
from wheelmount.hosts.spec import HostSpec
from wheelmount.jobs.containers import execute
from wheelmount.jobs.image import Image, packages_point
from wheelmount.jobs.mounts import on_mounts
from wheelmount.progress import Progress
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse


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
    tool: Literal["uv", "pip"],
    settings: Settings,
    progress: Progress,
    *,
    directory: Path | None = None,
    target: Target | None = None,
    output: Output | None = None,
) -> Results:
    """Download, prove complete, mount, and install on every host from the mount, offline.

    Args:
        spec: the hosts.
        wanted: what to install.
        into: where to.
        tool: what installs.
        settings: in force.
        progress: told about each step.
        directory: the wheelhouse; default one of its own in the cache for these requirements.
        target: default the images' Pythons, or this one.
        output: told of output as it comes.
    """
    targets = _targets(into) if target is None else [target]
    house = Wheelhouse(directory or _wheelhouse(settings, wanted, targets))
    report = house.add(wanted, targets=targets, progress=progress)
    # What is in the wheels was published so; reading it all would take longer than to install it.
    house.check(wanted, targets=targets, contents=False, progress=progress).raise_if_any()
    named = [str(requirement) for requirement in wanted.requirements]
    if not wanted.by_name:  # hosts do not have the files, and ask by name
        pins = (parse_wheel_filename(wheel)[:2] for wheel in report.wheels)
        named = [f"{name}=={version}" for name, version in pins]
    if isinstance(into, Image):
        argv = [tool, "install"] if tool == "pip" else [tool, "pip", "install"]
        argv += ["--", *named]
        return execute(spec, into, argv, house.directory, settings, progress, output=output)
    venv = into.path
    if spec.shared and "{host}" not in venv:
        venv += "-{host}"

    def command(host: str, path: str) -> Command:
        where = venv.replace("{host}", host)
        return Command(("python", "-m", "wheelmount.wheels", tool, path, where, *named))

    packages = packages_point(spec, house.directory, settings)
    return on_mounts(
        spec, house.directory, packages, command, settings, progress, "install", output=output
    )


def _targets(into: Venv | Image) -> list[Target]:
    """What wheels are needed for: the Pythons of the images, or this one."""
    if isinstance(into, Venv):
        return [Target.here()]
    if not into.paths:
        raise InputError("no image to install in", hint="give --image; images/python.def makes one")
    pythons = dict.fromkeys(map(probe.python, dict.fromkeys(into.paths.values())))
    return [Target.parse(python.version, python.platform) for python in pythons]


def _wheelhouse(settings: Settings, wanted: Wanted, targets: Sequence[Target]) -> Path:
    """The wheelhouse in the cache for one request: what is installed is then what was asked for."""
    name = blake3(f"{'+'.join(map(str, targets))}\0{wanted}".encode()).hexdigest()[:16]
    return Path(settings.cache_dir) / "wheelhouses" / name
