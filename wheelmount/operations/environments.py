"""Commands in environments that are mounted: nothing is installed on any host."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from packaging.specifiers import SpecifierSet

from wheelmount.config import Settings
from wheelmount.containers import probe
from wheelmount.errors import InputError, MountError, WaitError
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Results
from wheelmount.hosts.spec import HostSpec
from wheelmount.mount.kernel.points import PRIVATE
from wheelmount.mount.snapshot.tree import Tree
from wheelmount.operations import cache, containers, pools, pulled, scripts, targets
from wheelmount.operations.containers import SCRIPT
from wheelmount.operations.image import Image, Shown, carry_out, order, packages_point
from wheelmount.operations.launch import Launch
from wheelmount.progress import Progress
from wheelmount.wheels import carried, venv
from wheelmount.wheels.carried import Carried
from wheelmount.wheels.interpreter import base_executable
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


def run(
    spec: HostSpec,
    needed: Needed,
    words: Sequence[str],
    text: bytes | None,
    image: Image | None,
    launch: Launch,
    settings: Settings,
    progress: Progress,
    *,
    source: Path | None = None,
    mntpoint: str | None = None,
) -> Results:
    """Run a script or a command on every host in an environment that is mounted there.

    Args:
        spec: the hosts.
        needed: the environment.
        words: what the script is called, or the command, and its arguments.
        text: of the script; None for a command.
        image: the container to run it in, if any.
        launch: how to run it.
        settings: in force.
        progress: told about each step.
        source: another directory to mount, in which the command starts.
        mntpoint: mount point of that directory on the hosts.
    """
    name, *arguments = words
    interpreter: Sequence[str] = ()
    if text is not None:
        plain = name == "-" and not text.startswith(b"#!")
        interpreter = scripts.PYTHON if plain else scripts.interpreter(text, name, environment=True)

    def command(image: Image | None, host: str, path: str | None, environment: str) -> Command:
        more = dict(launch.variables)
        if path is not None:
            more["WHEELMOUNT_MOUNT"] = path
        if image is not None:
            shown = None if path is None or source is None else Shown(source, path)
            plain = order(host, image, shown, launch, settings, path)
            seen = [one for one in (environment, path) if one is not None]
            ordered = dataclasses.replace(
                plain,
                binds=[*plain.binds, *((one, one, False) for one in seen)],
                environment={**plain.environment, **more},
                files=plain.files if text is None else {**plain.files, SCRIPT: os.fsdecode(text)},
            )
            argv = words if text is None else (*interpreter, SCRIPT, *arguments)
            return carry_out(ordered, scripts.activated(environment, argv, image.variables))
        through = scripts.activated(environment, words if text is None else interpreter, more)
        return Command(
            through if text is None else tuple(arguments),
            text,
            through,
            environment=more,
            cwd=launch.within(path),
            timeout=launch.timeout,
        )

    return _on_mounts(spec, needed, source, mntpoint, command, image, launch, settings, progress)


def execute(
    spec: HostSpec,
    needed: Needed,
    argv: Sequence[str],
    image: Image,
    packages: Path | None,
    launch: Launch,
    settings: Settings,
    progress: Progress,
) -> Results:
    """Run a command on every host in an offline container that has an environment.

    Args:
        spec: the hosts.
        needed: the environment.
        argv: the command.
        image: the container.
        packages: see ``containers.execute``.
        launch: how to run it.
        settings: in force.
        progress: told about each step.
    """

    def command(seen: Image | None, host: str, path: str | None, environment: str) -> Command:
        shown = None if path is None or packages is None else Shown(packages, path)
        plain = order(host, seen or image, shown, launch, settings)
        ordered = dataclasses.replace(
            plain, binds=[*plain.binds, (environment, environment, False)]
        )
        return carry_out(ordered, scripts.activated(environment, argv, image.variables))

    if image.instance is not None:  # what a command leaves there runs on, and would hold them open
        launch = dataclasses.replace(launch, lent={})
    point = None if packages is None else packages_point(spec, packages)
    with pulled.here(image, settings, progress) as found:
        containers.check(spec, found, argv)
        return _on_mounts(spec, needed, packages, point, command, found, launch, settings, progress)


def remove(names: Sequence[str], settings: Settings) -> list[Environment]:
    """Remove environments from the cache.

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
    with cache.alone(settings):
        for name in names:
            folder = known[name].folder
            if folder in cache.mounted(settings):
                raise MountError(
                    f"a session has environment {name} mounted",
                    hint="wheelmount umount where `wheelmount status` shows it",
                )
            if not cache.removable(folder):
                raise WaitError(f"a command uses environment {name}", hint="wait for it, or end it")
            cache.discard(folder)
    return [known[name] for name in names]


def _on_mounts(
    spec: HostSpec,
    needed: Needed,
    source: Path | None,
    mntpoint: str | None,
    command: _Made,
    image: Image | None,
    launch: Launch,
    settings: Settings,
    progress: Progress,
) -> Results:
    """Mount the environment and maybe a directory, and run a command on each host."""
    if image is not None and image.instance is not None:
        raise InputError(
            "an environment cannot be shown to an instance that may run already",
            hint="omit --instance",
        )
    with contextlib.ExitStack() as stack:
        if image is not None:
            image = stack.enter_context(pulled.here(image, settings, progress))

        def hosts() -> pools.HostPool:
            return stack.enter_context(pools.at(spec, settings, progress, namespaces=True))

        pool = hosts() if image is None and spec.kind != "local" else None
        folder, make = stack.enter_context(_planned(needed, image, pool, settings, progress))
        pool = pool or hosts()
        if image is not None:
            image = stack.enter_context(pulled.shown(image, pool, spec))
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
    needed: Needed,
    image: Image | None,
    pool: pools.HostPool | None,
    settings: Settings,
    progress: Progress,
) -> Iterator[tuple[Path, Callable[[], Tree | None] | None]]:
    """The directory of the environment, and a function that makes it; None if it is there.

    The directory is kept from being removed meanwhile.
    """
    target, python = _interpreter(needed, image, pool)
    if needed.python and not SpecifierSet(needed.python).contains(_release(target)):
        raise InputError(
            f"the script requires Python {needed.python}, and this is {target.python_version}",
            hint="send such a Python along: --python 3.12",
        )
    place = Path(settings.cache_dir)
    with contextlib.ExitStack() as ends, contextlib.ExitStack() as used:
        used.enter_context(cache.used(settings))
        house = Wheelhouse(place / "wheelhouses" / "environments")
        wheels: Sequence[str] = ()
        if needed.wanted is not None:
            report = house.add(
                needed.wanted, targets=[target], progress=progress, upgrade=needed.upgrade
            )
            wheels = report.wheels
        planned = venv.plan(house.directory, wheels, target, python, place, progress)

        def make() -> Tree | None:
            with used:
                tree = planned.make()
                held = os.open(planned.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                ends.callback(os.close, held)
                with contextlib.suppress(OSError):  # of a file system without locks
                    fcntl.flock(held, fcntl.LOCK_SH)
            return tree

        if planned.items is not None:
            yield planned.folder, make
            return
        make()  # nothing to make: it is held
        yield planned.folder, None


def _release(target: Target) -> str:
    return target.release if target.release.count(".") > 1 else f"{target.minor_release}.0"


def _interpreter(
    needed: Needed, image: Image | None, pool: pools.HostPool | None
) -> tuple[Target, str | Carried]:
    """Return the environment's target and the path of its interpreter, one for all hosts."""
    if image is not None:
        found = dict.fromkeys(map(probe.python, dict.fromkeys(image.paths.values())))
        pythons: Mapping[tuple[Target, str], None] = {
            (Target.parse(one.version, one.platform), one.executable): None for one in found
        }
        if not pythons:
            raise InputError("no image to run it in", hint="give --image")
    elif pool is not None:
        pythons = dict.fromkeys(targets.ask_bases(pool))
    else:
        pythons = {(Target.here(), base_executable()): None}
    if needed.interpreter and len({target.platform for target, _ in pythons}) == 1:
        brought = carried.find(needed.interpreter)
        return brought.target(next(iter(pythons))[0]), brought
    if len(pythons) > 1:
        each = ", ".join(f"{path} ({target})" for target, path in pythons)
        raise InputError(
            f"hosts have different Pythons: {each}",
            hint="use hosts with the same Python, or send one along: --python 3.12",
        )
    return next(iter(pythons))
