"""Default targets of wheels: the Pythons and platforms of the hosts."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING

from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError, WheelmountError
from wheelmount.hosts.spec import HostSpec
from wheelmount.progress import Progress
from wheelmount.wheels.interpreter import describe
from wheelmount.wheels.target import Target

if TYPE_CHECKING:  # Monarch, half a second, is imported to ask hosts of other machines only
    from wheelmount.hosts.commands import Result
    from wheelmount.operations.pools import HostPool

_HINT = "name it with --python-version and --platform"


def of_hosts(spec: HostSpec, settings: Settings, progress: Progress) -> list[Target]:
    """What the hosts are, each target once; those on this machine are not started to be asked.

    Raises:
        HostError: a host does not say it.
        WheelmountError: the hosts cannot be started.
    """
    if spec.kind == "local":
        return here(spec)
    from wheelmount.operations import pools

    with pools.at(spec, settings, progress, namespaces=False) as pool:
        return ask(pool, {host.name: "" for host in pool.hosts})


def here(spec: HostSpec, venv: str = "") -> list[Target]:
    """What hosts on this machine are, or their virtual environments that are there already.

    Args:
        spec: the hosts.
        venv: path of an environment, with ``{host}`` for the host's name.

    Raises:
        HostError: the Python of one can't be run.
    """
    paths = dict.fromkeys(venv.replace("{host}", name) for name in spec.local_names)
    try:
        return list(dict.fromkeys(_parse("this machine", describe(path)) for path in paths))
    except (OSError, subprocess.SubprocessError) as error:
        code = getattr(error, "returncode", None)
        raise HostError(
            f"the Python of {venv} does not say what it is: "
            + (str(error) if code is None else f"it ended with {code}"),
            hint="remove the environment, or name its Python with --python-version",
        ) from None


def ask(pool: HostPool, venvs: Mapping[str, str]) -> list[Target]:
    """What hosts are, or their virtual environments that are there already, each target once.

    Args:
        pool: the hosts.
        venvs: by host, path of the environment, or nothing.

    Raises:
        HostError: a host does not say it.
    """
    from wheelmount.hosts.command_actor import Command

    program = ("python", "-m", "wheelmount.wheels.interpreter")
    commands = {name: Command((*program, venv)) for name, venv in venvs.items()}
    results = pool.run(commands, "ask")
    return list(dict.fromkeys(_target(name, result) for name, result in results.items()))


def ask_bases(pool: HostPool) -> list[tuple[Target, str]]:
    """Return the Python of each host, and the path of its base interpreter.

    Raises:
        HostError: a host does not say it.
    """
    from wheelmount.hosts.command_actor import Command

    program = ("python", "-m", "wheelmount.wheels.interpreter", "--base")
    results = pool.run({host.name: Command(program) for host in pool.hosts}, "ask")
    found = []
    for name, result in results.items():
        version, platform, path = (*_said(name, result).strip().split(None, 2), "", "", "")[:3]
        found.append((_parse(name, f"{version} {platform}"), path))
    return found


def _target(name: str, result: Result | WheelmountError) -> Target:
    return _parse(name, _said(name, result))


def _said(name: str, result: Result | WheelmountError) -> str:
    if isinstance(result, WheelmountError):
        raise result
    if result.code:
        said = result.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise HostError(f"{name} does not say which Python it has: {said[-1]}", hint=_HINT)
    return result.stdout.decode(errors="replace")


def _parse(name: str, said: str) -> Target:
    version, _, platform = said.strip().partition(" ")
    if not platform:
        raise HostError(f"{name} has no glibc that wheels can be chosen for", hint=_HINT)
    try:
        return Target.parse(version, platform)
    except InputError as error:
        raise HostError(f"{name} does not say which Python it has: {error}", hint=_HINT) from None
