"""Install packages on every host from mounted wheels, packed or unpacked."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, TypeAlias

from blake3 import blake3
from packaging.utils import parse_wheel_filename

from wheelmount.config import Settings
from wheelmount.containers import probe
from wheelmount.containers.overlay import name_for
from wheelmount.errors import InputError
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Output, Result, Results, worst
from wheelmount.hosts.session import Session
from wheelmount.hosts.spec import HostSpec
from wheelmount.mount.kernel.points import PRIVATE
from wheelmount.operations import cache, pools, pulled, targets
from wheelmount.operations.containers import execute
from wheelmount.operations.image import ONE, Image, packages_point
from wheelmount.operations.launch import Launch
from wheelmount.operations.pools import HostPool
from wheelmount.operations.site import Site
from wheelmount.wheels.install import pinned
from wheelmount.wheels.redirect import PACKAGES
from wheelmount.wheels.shipment import Shipment, prepare
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

Tool: TypeAlias = Literal["wheelmount", "uv", "pip"]
LinkMode: TypeAlias = Literal["copy", "symlink"]

_Hosts: TypeAlias = Callable[[], AbstractContextManager[HostPool]]


@dataclasses.dataclass(frozen=True, slots=True)
class Venv:
    """A virtual environment on each host, to install into.

    Attributes:
        path: path of the environment. ``{host}`` in it is replaced by the host's name; if hosts
            share a machine and it is missing, the name is appended.
    """

    path: str


def install(
    site: Site,
    wanted: Wanted,
    into: Venv | Image,
    *,
    tool: Tool = "uv",
    link_mode: LinkMode = "copy",
    bytecode: bool = True,
    directory: Path | None = None,
    target: Target | None = None,
    output: Output | None = None,
) -> Results:
    """Download packages, and install them on every host from a mount, without an index.

    Nothing is installed unless the wheels are proven to be complete.

    Args:
        site: the hosts.
        wanted: the packages to install.
        into: the virtual environments, or the image, to install into.
        tool: the installer. With ``pip`` and ``uv`` the wheelhouse is mounted, and each host
            unpacks the wheels. With ``wheelmount`` this process unpacks them, and the result is
            mounted.
        link_mode: with ``wheelmount``: ``copy``, or ``symlink`` for links into the mount, which
            then stays.
        bytecode: with ``wheelmount``: whether this process compiles bytecode, once for all hosts.
        directory: the wheelhouse; default one in the cache, for the session or else this request.
        target: the Python and platform of the wheels; default those of the images, of existing
            environments, or of the Pythons that will make environments.
        output: called with output as it arrives.

    Returns:
        Results and errors of the installer by host.

    Raises:
        InputError: the options contradict each other, or the hosts' Pythons differ.
        WheelmountError: the wheels are not complete, or hosts cannot be started.
    """
    if link_mode != "copy" and tool != "wheelmount":
        raise InputError(f"{tool} makes no links", hint="omit --tool or --link-mode")
    spec, settings, progress = site.spec, site.settings, site.progress
    with contextlib.ExitStack() as stack:
        if isinstance(into, Image):
            into = stack.enter_context(pulled.here(into, site))
        stack.enter_context(cache.used(settings))
        found, hosts = stack.enter_context(_targets(site, into, target))
        if tool == "wheelmount" and len(found) > 1:
            raise InputError(
                f"different Pythons: {', '.join(map(str, found))}",
                hint="install for one of them at a time, or use --tool uv",
            )
        growing = _growing_tree(spec, into, link_mode, settings) if tool == "wheelmount" else None
        house = Wheelhouse(directory or _wheelhouse(spec, settings, wanted, found))
        report = house.add(wanted, targets=found, progress=progress)
        cache.touch(house.directory, settings)
        house.check(wanted, targets=found, progress=progress).raise_if_any()
        if tool == "wheelmount":
            shipment = prepare(
                house.directory,
                report.answers[0],
                found[0],
                Path(settings.cache_dir) / "unpacked",
                progress,
                bytecode=bytecode,
                tree=growing,
            )
            return _place(site, hosts, shipment, into, link_mode, target, output)
        if len(found) == 1:  # exactly the packages that were proven to be complete
            packages = ["-r", report.requests[0]]
        elif wanted.by_name:
            packages = [str(requirement) for requirement in wanted.requirements]
        else:  # hosts do not have the requested files, so packages are requested by name
            pins = (parse_wheel_filename(wheel)[:2] for wheel in report.wheels)
            packages = [f"{name}=={version}" for name, version in pins]
        if isinstance(into, Image):
            argv = [tool, "install"] if tool == "pip" else [tool, "pip", "install"]
            if len(found) == 1:
                argv += [*pinned(tool), "-r", f"{PACKAGES}/{report.requests[0]}"]
            else:
                argv += ["--", *packages]
            return execute(site, into, argv, house.directory, Launch(output))
        venv = _venv(into, spec)

        def command(host: str, path: str) -> Command:
            environment = venv.replace("{host}", host)
            return Command((*_program(target), tool, path, environment, *packages))

        point = packages_point(spec, house.directory)
        with hosts() as pool:
            return pool.run_on_mounts(house.directory, point, command, "install", Launch(output))


@contextlib.contextmanager
def _targets(
    site: Site, into: Venv | Image, target: Target | None
) -> Iterator[tuple[list[Target], _Hosts]]:
    """Yield the targets of the wheels, and the hosts; hosts started to be asked are used again."""

    spec = site.spec

    def hosts() -> AbstractContextManager[HostPool]:
        return pools.at(site, namespaces=False)

    if target is not None:
        yield [target], hosts
    elif isinstance(into, Image):
        yield _of_images(into), hosts
    elif spec.kind == "local":
        yield targets.here(spec, _venv(into, spec)), hosts
    else:
        with hosts() as pool:
            venv = _venv(into, spec)
            venvs = {host.name: venv.replace("{host}", host.name) for host in pool.hosts}
            asked = targets.ask(pool, venvs)
            yield asked, lambda: contextlib.nullcontext(pool)


def _of_images(image: Image) -> list[Target]:
    _check_named(image)
    pythons = dict.fromkeys(map(probe.python, dict.fromkeys(image.paths.values())))
    return [Target.parse(python.version, python.platform) for python in pythons]


def _check_named(image: Image) -> None:
    """Refuse to install where no image is given.

    Raises:
        InputError: none is.
    """
    if not image.paths:
        raise InputError("no image to install in", hint=ONE)


def _place(
    site: Site,
    hosts: _Hosts,
    shipment: Shipment,
    into: Venv | Image,
    link_mode: LinkMode,
    target: Target | None,
    output: Output | None,
) -> Results:
    """Mount unpacked wheels, and copy or link them into environments."""
    spec, progress, tree = site.spec, site.progress, shipment.tree
    if isinstance(into, Image):
        argv = shipment.command("python3", PACKAGES, link_mode)
        results = execute(site, into, argv, tree, Launch(output))
        if link_mode != "copy":
            progress.log(
                f"packages in the overlay are links into {PACKAGES}: use the overlay with "
                f"--packages {tree}"
            )
        return results
    venv = _venv(into, spec)

    def command(host: str, path: str) -> Command:
        environment = venv.replace("{host}", host)
        program = (*_program(target), "wheelmount", path, environment)
        return Command((*program, shipment.plan, link_mode))

    if link_mode == "copy" or spec.session is not None:  # mounts of a session stay anyway
        point = packages_point(spec, tree)
        with hosts() as pool:
            return pool.run_on_mounts(tree, point, command, "install", Launch(output))
    point = f"{PRIVATE}/links-{tree.name}-{{host}}"
    results, points = _on_kept_mounts(hosts, shipment, point, command, output)
    if _linked(results):
        progress.log(
            f"environments contain links into {', '.join(points)}, which stays mounted: "
            "see wheelmount status"
        )
    return results


def _program(target: Target | None) -> tuple[str, ...]:
    """Return the installer's command, which makes environments of the given Python if any."""
    program = ("python", "-m", "wheelmount.wheels")
    if target is None:
        return program
    free = "t" if target.free_threaded else ""
    pypy = "pypy" if target.implementation == "pypy" else ""
    return (*program, "--python", f"{pypy}{target.minor_release}{free}")


def _growing_tree(
    spec: HostSpec, into: Venv | Image, link_mode: LinkMode, settings: Settings
) -> str | None:
    """Return the name of a tree that serves several installations; None for a tree of its own.

    Raises:
        InputError: neither an overlay nor an image is given, whose links the tree is for.
    """
    if isinstance(into, Image) and link_mode != "copy":  # all links of an overlay are to one path
        if into.overlay:
            return f"overlay-{into.overlay}"
        _check_named(into)
        # Named as the image's overlay: the image may be given by several paths. Of an image that
        # is not on this machine, only the name of its file is known here.
        names = set(map(name_for, into.paths.values()))
        if len(names) > 1:
            names = {blake3("\0".join(sorted(names)).encode()).hexdigest()[:16]}
        return f"overlay-{names.pop()}"
    if spec.session is not None:  # the session's mount stays, and is refreshed
        return _of_session(spec.session, settings)
    return None


def _on_kept_mounts(
    hosts: _Hosts,
    shipment: Shipment,
    mntpoint: str,
    command: Callable[[str, str], Command],
    output: Output | None,
) -> tuple[Results, Sequence[str]]:
    """Run commands on mounts of a shipment; keep mounts that environments link into.

    Mounts that a former installation of the same shipment left are used again.

    Returns:
        Results and errors of the commands by host, and the mount points.
    """
    with hosts() as pool:
        points = pool.places(mntpoint)
        commands = {name: command(name, point) for name, point in points.items()}
        plans = {name: f"{point}/{shipment.plan}" for name, point in points.items()}
        probes = {name: Command(("test", "-e", plan)) for name, plan in plans.items()}
        if not worst(pool.commands.run(probes)):
            return pool.run(commands, "install", Launch(output)), list(points.values())
        with pool.mount(shipment.tree, mntpoint) as mount:
            results = pool.run(commands, "install", Launch(output))
            if _linked(results):
                mount.keep()
                mount.release()
        return results, list(points.values())


def _linked(results: Results) -> bool:
    """Return whether the installation succeeded on any host, which then needs the mount."""
    return any(isinstance(result, Result) and not result.code for result in results.values())


def _venv(into: Venv, spec: HostSpec) -> str:
    """Return the path of the environment, with ``{host}`` in it if hosts share a machine."""
    return f"{into.path}-{{host}}" if spec.shared and "{host}" not in into.path else into.path


def _of_session(name: str, settings: Settings) -> str:
    """Return the name of a directory that all installations of a session add to."""
    return f"session-{name}-{Session(name, settings).read().created:.0f}"


def _wheelhouse(
    spec: HostSpec, settings: Settings, wanted: Wanted, targets: Sequence[Target]
) -> Path:
    """Return the path of a wheelhouse in the cache.

    A session has one wheelhouse, whose mount serves all its installations. Otherwise each request
    has its own, so that hosts receive only the requested wheels.
    """
    if spec.session is not None:
        name = _of_session(spec.session, settings)
    else:
        name = blake3(f"{'+'.join(map(str, targets))}\0{wanted}".encode()).hexdigest()[:16]
    return cache.wheelhouse(settings, name)
