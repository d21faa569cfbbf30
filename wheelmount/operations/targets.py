"""Default targets of wheels: the Pythons and platforms of the hosts."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING

from wheelmount.child import last_words
from wheelmount.errors import HostError, InputError, WheelmountError
from wheelmount.hosts.spec import HostSpec
from wheelmount.operations.site import Site
from wheelmount.wheels.interpreter import describe
from wheelmount.wheels.target import Target

if TYPE_CHECKING:  # Monarch, half a second, is imported to ask hosts of other machines only
    from wheelmount.hosts.commands import Result
    from wheelmount.operations.pools import HostPool

_HINT = "name its Python with --python-version and --platform"


def of_hosts(site: Site) -> list[Target]:
    """Return the targets of hosts, each once; hosts on this machine are not started for this.

    Raises:
        HostError: a host does not report its Python.
        WheelmountError: the hosts cannot be started.
    """
    if site.spec.kind == "local":
        return here(site.spec)
    from wheelmount.operations import pools

    with pools.at(site, namespaces=False) as pool:
        return ask(pool, {host.name: "" for host in pool.hosts})


def here(spec: HostSpec, venv: str = "") -> list[Target]:
    """Return the targets of hosts on this machine, or of their virtual environments that exist.

    Args:
        spec: the hosts.
        venv: path of an environment, in which ``{host}`` stands for the host's name; empty: none.

    Raises:
        HostError: the Python of an environment cannot be run.
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
    """Return the targets of hosts, or of their virtual environments that exist, each once.

    Args:
        pool: the hosts.
        venvs: path of the environment by host name; empty: none.

    Raises:
        HostError: a host does not report its Python.
    """
    from wheelmount.hosts.command_actor import Command

    program = ("python", "-m", "wheelmount.wheels.interpreter")
    commands = {name: Command((*program, venv)) for name, venv in venvs.items()}
    results = pool.run(commands, "ask")
    answers = ((name, _answer(name, result)) for name, result in results.items())
    return list(dict.fromkeys(_parse(name, answer) for name, answer in answers))


def ask_bases(pool: HostPool) -> list[tuple[Target, str, str]]:
    """Return of each host the target, the path of its Python's base interpreter, and its full
    version.

    Raises:
        HostError: a host does not report its Python.
    """
    from wheelmount.hosts.command_actor import Command

    program = ("python", "-m", "wheelmount.wheels.interpreter", "--base")
    results = pool.run({host.name: Command(program) for host in pool.hosts}, "ask")
    found = []
    for name, result in results.items():
        described, full, path = (*_answer(name, result).splitlines(), "", "", "")[:3]
        found.append((_parse(name, described), path, full))
    return found


def _answer(name: str, result: Result | WheelmountError) -> str:
    """Return the output of the command that describes a host's Python."""
    if isinstance(result, WheelmountError):
        raise result
    if result.code:
        reason = last_words(result.stderr, f"exit code {result.code}")
        raise HostError(f"{name} does not report its Python: {reason}", hint=_HINT)
    return result.stdout.decode(errors="replace")


def _parse(name: str, answer: str) -> Target:
    version, _, platform = answer.strip().partition(" ")
    if not platform:
        raise HostError(f"{name} has no glibc, so no wheels can be chosen for it", hint=_HINT)
    try:
        return Target.parse(version, platform)
    except InputError as error:
        raise HostError(f"{name} does not report its Python: {error}", hint=_HINT) from None
