"""Commands in environments that are mounted: nothing is installed on any host."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from packaging.specifiers import SpecifierSet

from wheelmount.config import Settings
from wheelmount.containers import probe
from wheelmount.errors import InputError, MountError, WaitError
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Results
from wheelmount.mount.kernel.points import PRIVATE
from wheelmount.mount.snapshot.tree import Tree
from wheelmount.operations import cache, containers, pools, pulled, scripts, targets
from wheelmount.operations.image import Image, Shown, carry_out, order, packages_point
from wheelmount.operations.launch import Launch
from wheelmount.operations.scripts import Program
from wheelmount.operations.site import Site
from wheelmount.wheels import carried, venv
from wheelmount.wheels.carried import Carried
from wheelmount.wheels.inline import Inline
from wheelmount.wheels.interpreter import base_executable, full_version
from wheelmount.wheels.target import Target
from wheelmount.wheels.venv import Environment
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

_Made: TypeAlias = Callable[[Image | None, str, str | None, str], Command]
"""Of the image as hosts see it, a host's name, its mount point of the source if there is one, and
of the environment."""


@dataclasses.dataclass(frozen=True, slots=True)
class Needed:
    """The requested contents of an environment.

    Attributes:
        wanted: packages; None for none.
        python: allowed versions of Python; empty for any.
        upgrade: whether to choose the newest versions instead of those of the last time.
        interpreter: version or path of a Python to send along; empty for the hosts' own.
    """

    wanted: Wanted | None = None
    python: str = ""
    upgrade: bool = False
    interpreter: str = ""

    @classmethod
    def of(
        cls,
        packages: Iterable[str],
        files: Sequence[Path] = (),
        script: Inline | None = None,
        *,
        extras: Iterable[str] = (),
        groups: Iterable[str] = (),
        upgrade: bool = False,
        interpreter: str = "",
    ) -> Needed:
        """Return what a request and the metadata of a script ask for together.

        Args:
            packages: requirements, or paths of wheels and projects.
            files: requirements files, ``pyproject.toml`` files or locks.
            script: the script's metadata, if it has any.
            extras: of the projects among the files.
            groups: likewise.
            upgrade: see above.
            interpreter: see above.

        Raises:
            WheelmountError: a requirement or a file cannot be understood.
        """
        own = script or Inline()
        packages = [*packages, *own.dependencies]
        wanted = None
        if packages or files:
            flags = [f"--exclude-newer={own.exclude_newer}"] if own.exclude_newer else []
            wanted = Wanted.of(packages, files, (), tuple(extras), tuple(groups), flags=flags)
        return cls(wanted, own.requires_python, upgrade, interpreter)


def run(
    site: Site,
    needed: Needed,
    program: Program,
    image: Image | None,
    launch: Launch,
    *,
    source: Path | None = None,
    mntpoint: str | None = None,
) -> Results:
    """Run a script or a command on every host in an environment that is mounted there.

    Args:
        site: the hosts.
        needed: the environment.
        program: the script or command.
        image: the container to run it in, if any.
        launch: how to run it.
        source: another directory to mount, in which the command starts.
        mntpoint: mount point of that directory on the hosts.
    """
    through = program.through(environment=True)
    if program.text is not None and program.words[0] == "-" and program.text[:2] != b"#!":
        through = scripts.PYTHON

    def command(image: Image | None, host: str, path: str | None, environment: str) -> Command:
        if image is not None:
            shown = None if path is None or source is None else Shown(source, path)
            ordered = order(
                host,
                image,
                shown,
                launch,
                site,
                there=True,
                environment=environment,
                script=program.text,
            )
            argv = program.inside(through)
            return carry_out(ordered, scripts.activated(environment, argv, image.variables))
        variables = dict(launch.variables)
        if path is not None:
            variables["WHEELMOUNT_MOUNT"] = path
        activated = scripts.activated(environment, through, variables)
        return program.command(activated, variables, launch, path, site.settings)

    return _on_mounts(site, needed, source, mntpoint, command, image, launch)


def execute(
    site: Site,
    needed: Needed,
    argv: Sequence[str],
    image: Image,
    packages: Path | None,
    launch: Launch,
) -> Results:
    """Run a command on every host in an offline container that has an environment.

    Args:
        site: the hosts.
        needed: the environment.
        argv: the command.
        image: the container.
        packages: see ``containers.execute``.
        launch: how to run it.
    """

    def command(seen: Image | None, host: str, path: str | None, environment: str) -> Command:
        shown = None if path is None or packages is None else Shown(packages, path)
        used = seen or image
        ordered = order(host, used, shown, launch, site, environment=environment)
        return carry_out(ordered, scripts.activated(environment, argv, image.variables))

    point = None if packages is None else packages_point(site.spec, packages)
    with pulled.here(image, site) as found:
        containers.check(site.spec, found, argv)
        return _on_mounts(site, needed, packages, point, command, found, launch)


def remove(names: Sequence[str], settings: Settings) -> list[Environment]:
    """Remove environments from the cache: all of the named ones, or none.

    Args:
        names: names of environments.
        settings: the settings in force.

    Returns:
        The removed environments.

    Raises:
        InputError: there is no environment of a name.
        MountError: a session has one mounted.
        WaitError: a command uses one.
    """
    known = {one.folder.name: one for one in venv.every(Path(settings.cache_dir))}
    for name in names:
        if name not in known:
            raise InputError(f"there is no environment {name}", hint="see `wheelmount env ls`")
    folders = {name: known[name].folder for name in names}
    with cache.alone(settings):
        for name, folder in folders.items():
            if folder in cache.mounted(settings):
                raise MountError(
                    f"a session has environment {name} mounted",
                    hint="wheelmount umount where `wheelmount status` shows it",
                )
            if not cache.removable(folder):
                raise WaitError(f"a command uses environment {name}", hint="wait for it, or end it")
        for folder in folders.values():
            cache.discard(folder)
    return [known[name] for name in folders]


def _on_mounts(
    site: Site,
    needed: Needed,
    source: Path | None,
    mntpoint: str | None,
    command: _Made,
    image: Image | None,
    launch: Launch,
) -> Results:
    """Mount the environment and maybe a directory, and run a command on each host."""
    if image is not None:
        launch.check_container()
    if image is not None and image.instance is not None:
        raise InputError(
            "an environment cannot be shown to an instance that may run already",
            hint="omit --instance",
        )
    with contextlib.ExitStack() as stack:
        if image is not None:
            image = stack.enter_context(pulled.here(image, site)).found_in(source)

        def hosts() -> pools.HostPool:
            return stack.enter_context(pools.at(site, namespaces=True))

        pool = hosts() if image is None and site.spec.kind != "local" else None
        folder, make = stack.enter_context(_planned(site, needed, image, pool))
        pool = pool or hosts()
        if image is not None:
            image = stack.enter_context(pulled.shown(image, pool, site.spec))
        seen = image
        point = f"{PRIVATE}/environment-{folder.name}"  # in the user's own directory on hosts
        with pool.mount(folder, point, fixed=True, make=make) as mounted:
            paths = mounted.mntpoints
            if source is not None:
                results = pool.run_on_mounts(
                    source,
                    mntpoint,
                    lambda host, path: command(seen, host, path, paths[host]),
                    "run",
                    launch,
                )
            else:
                commands = {host: command(seen, host, None, path) for host, path in paths.items()}
                results = pool.run(commands, "run", launch)
        results.shortfall = results.shortfall or mounted.shortfall()
    return results


@contextlib.contextmanager
def _planned(
    site: Site,
    needed: Needed,
    image: Image | None,
    pool: pools.HostPool | None,
) -> Iterator[tuple[Path, Callable[[], Tree | None] | None]]:
    """The directory of the environment, and a function that makes it; None if it is there.

    The directory is kept from being removed meanwhile.
    """
    target, python, versions = _interpreter(needed, image, pool)
    for version in versions if needed.python else ():
        # As for uv, a pre-release counts as the release, and so does a build of a checkout ("+").
        if not SpecifierSet(needed.python).contains(re.sub(r"[^\d.].*", "", version)):
            raise InputError(
                f"the script requires Python {needed.python}, and this is {version}",
                hint=f"send such a Python along: --python '{needed.python}'",
            )
    settings, progress = site.settings, site.progress
    place = Path(settings.cache_dir)
    with contextlib.ExitStack() as ends, contextlib.ExitStack() as used:
        used.enter_context(cache.used(settings))
        house = Wheelhouse(cache.wheelhouse(settings, "environments"))
        request = None
        if needed.wanted is not None:
            report = house.add(
                needed.wanted, targets=[target], progress=progress, upgrade=needed.upgrade
            )
            (request,) = report.answers
            cache.touch(house.directory, settings)
        planned = venv.plan(house.directory, request, target, python, place, progress)

        def make() -> Tree | None:
            with used:
                tree = planned.make()
                ends.enter_context(cache.hold(planned.folder))
            return tree

        if planned.items is not None:
            yield planned.folder, make
            return
        make()  # nothing to make: it is held
        yield planned.folder, None


def _interpreter(
    needed: Needed, image: Image | None, pool: pools.HostPool | None
) -> tuple[Target, str | Carried, Sequence[str]]:
    """Return the environment's target and the path of its interpreter, one for all hosts.

    Also return its versions with the patch levels, in which hosts may differ.
    """
    if image is not None:
        found = dict.fromkeys(map(probe.python, dict.fromkeys(image.paths.values())))
        answers = [
            (Target.parse(one.version, one.platform), one.executable, one.full) for one in found
        ]
        if not answers:
            raise InputError("no image to run it in", hint="give --image")
    elif pool is not None:
        answers = targets.ask_bases(pool)
    else:
        answers = [(Target.here(), base_executable(), full_version())]
    pythons = dict.fromkeys((target, path) for target, path, _ in answers)
    if needed.interpreter and len({target.platform for target, _ in pythons}) == 1:
        brought = carried.find(needed.interpreter)
        return brought.target(next(iter(pythons))[0]), brought, [brought.full]
    if len(pythons) > 1:
        each = ", ".join(f"{path} ({target})" for target, path in pythons)
        raise InputError(
            f"hosts have different Pythons: {each}",
            hint="use hosts with the same Python, or send one along: --python 3.12",
        )
    return (*next(iter(pythons)), list(dict.fromkeys(full for _, _, full in answers)))
