"""Options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wheelmount import config
from wheelmount.cli import completion
from wheelmount.cli.console import errors_as_json, tell_all
from wheelmount.errors import InputError
from wheelmount.hosts import slurm
from wheelmount.hosts.address import DANGER, OPEN
from wheelmount.hosts.names import expand
from wheelmount.hosts.session import DEFAULT, hosts_by_default, hosts_named
from wheelmount.hosts.spec import HostSpec
from wheelmount.mount.serve.adapters import NAMES

if TYPE_CHECKING:
    from wheelmount.operations.launch import Launch  # with Monarch
    from wheelmount.wheels.target import Target  # with packaging


class _Hosts(click.ParamType[HostSpec]):
    name = "spec"

    def convert(
        self, value: Any, _param: click.Parameter | None, ctx: click.Context | None
    ) -> HostSpec:
        if isinstance(value, HostSpec):
            return value
        spec = hosts_named(value, config.load())
        if spec.kind == OPEN:
            check_insecure(ctx is not None and INSECURE in ctx.meta, value)
        return spec


class GivenPath(click.Path):
    """A path on the command line. An empty one is refused: it is that of an unset variable."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Return the path; see ``click.Path``."""
        if value == "":  # it would stand for the working directory
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


INSECURE = "wheelmount.insecure"
"""Key of what a command's options have in common: whether ``--insecure`` is given."""


def check_insecure(said: bool, address: str) -> None:
    """Check that hosts without certificates were asked for.

    Raises:
        InputError: they were not.
    """
    if not said:
        raise InputError(
            f"{address}: {DANGER}",
            hint="use tls://, or --insecure if the network has no other users",
        )


def _note_insecure(ctx: click.Context, _param: click.Parameter, said: bool) -> None:
    if said:
        ctx.meta[INSECURE] = True


insecure = click.option(
    "--insecure",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_note_insecure,
    help="Accept hosts at tcp:// addresses, which are neither authenticated nor encrypted.",
)


def _hosts(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    option = click.option("--hosts", "spec", type=_Hosts(), **options)
    return lambda command: option(insecure(command))


_FROM = (
    "Where hosts come from: local:N for N hosts on this machine, ssh:HOST,…, slurm:N, "
    "kubernetes:N, or tls://HOST:PORT,… for workers that run already"
)
_FROM_SESSION = f"{_FROM}; session:NAME for those of `wheelmount up`."

hosts = _hosts(
    default=lambda: hosts_by_default(config.load()),
    show_default="$WHEELMOUNT_HOSTS, else the session `default` if it is up, else the Slurm "
    "allocation that this runs in, else local:1",
    help=_FROM_SESSION,
)
some_hosts = _hosts(help=_FROM_SESSION)
new_hosts = _hosts(
    default=lambda: config.load().hosts or slurm.allocation() or "local:1",
    show_default="$WHEELMOUNT_HOSTS, else the Slurm allocation that this runs in, else local:1",
    help=f"{_FROM}.",
)
session = click.option(
    "--name",
    default=DEFAULT,
    show_default=True,
    shell_complete=completion.sessions,
    help="Name of the session.",
)
adapter = click.option(
    "--adapter",
    type=click.Choice(NAMES),
    default=lambda: config.load().adapter,
    show_default="$WHEELMOUNT_ADAPTER, else auto",
    help="How hosts show the mount; auto chooses the fastest that each host supports.",
)


def _read_variables(
    _ctx: click.Context, _param: click.Parameter, given: tuple[str, ...]
) -> dict[str, str]:
    """Read ``NAME=VALUE``, or ``NAME`` for the value that it has here.

    Raises:
        InputError: it is no variable, or has no value here.
    """
    variables = {}
    for each in given:
        name, equals, value = each.partition("=")
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            raise InputError(
                f"{name!r} cannot name a variable", hint="give --env NAME=VALUE, or --env NAME"
            )
        if not equals and name not in os.environ:
            raise InputError(f"{name} has no value here", hint=f"give one: --env {name}=VALUE")
        variables[name] = value if equals else os.environ[name]
    return variables


variables = click.option(
    "--env",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    callback=_read_variables,
    help="Set an environment variable; NAME alone passes the value it has here. Repeatable.",
)


def launch(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for how commands start; passes ``launch``. ``--on`` narrows ``spec``."""

    @click.option(
        "--on",
        "only",
        metavar="HOST[,HOST…]",
        callback=lambda _ctx, _param, text: () if text is None else _names(text),
        help="Run on these hosts only; host[0-3] names four.",
    )
    @variables
    @click.option(
        "--cwd",
        metavar="DIRECTORY",
        help="Start in this directory of the host or container.",
    )
    @click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="End the command with all its processes on a host where it takes longer; its exit "
        "code is 124 then.",
    )
    @wraps(command)
    def wrapped(
        *arguments: Any,
        spec: HostSpec,
        only: tuple[str, ...],
        variables: dict[str, str],
        cwd: str | None,
        timeout: float | None,
        **values: Any,
    ) -> Any:
        from wheelmount.operations.launch import Launch  # with Monarch

        values["launch"] = Launch(variables=variables, cwd=cwd, timeout=timeout)
        return command(*arguments, spec=replace(spec, only=only), **values)

    return wrapped


def collected(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for collecting files that commands leave; passed in ``launch``."""

    @click.option(
        "--collect",
        nargs=2,
        metavar="PATH DIRECTORY",
        help="After the command has ended, also with an error, copy PATH of each host or container "
        "to DIRECTORY/HOST. '$WHEELMOUNT_OUTPUT' is a directory made for that purpose.",
    )
    @click.option("--overwrite", is_flag=True, help="Collect into directories that are not empty.")
    @wraps(command)
    def wrapped(
        *arguments: Any,
        launch: Launch,
        collect: tuple[str, str] | None,
        overwrite: bool,
        **values: Any,
    ) -> Any:
        from wheelmount.hosts.collection import OUTPUT, Collection

        if collect is not None:
            # The shell here knows no such variable, and makes nothing of it without quotes.
            path, directory = collect[0] or OUTPUT, Path(collect[1])
            if not collect[1]:  # it would stand for the working directory
                raise InputError("the directory of --collect is empty", hint="give its path")
            launch = replace(launch, collect=Collection(path, directory, overwrite))
        return command(*arguments, launch=launch, **values)

    return wrapped


def _names(text: str) -> tuple[str, ...]:
    return tuple(expand(text))


def _note_json(_ctx: click.Context, _param: click.Parameter, wanted: bool) -> bool:
    if wanted:
        errors_as_json()
    return wanted


def json_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option for output as JSON; passes ``as_json``.

    Args:
        text: help of the option.
    """
    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=_note_json, help=text
    )


as_json = json_option("Print results, and on standard error errors, as JSON.")


def _explain(_ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        tell_all()


def quiet(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --verbose and --quiet; passes only ``quiet``."""
    verbose = click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_explain,
        help="Show how hosts are started, where they are, and the settings in force.",
    )
    less = click.option(
        "-q", "--quiet", is_flag=True, help="Show no progress, only results and errors."
    )
    return less(verbose(command))


def requirement_files(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option ``-r`` with a help text; passes ``files``."""
    return click.option("-r", "--requirement", "files", multiple=True, metavar="FILE", help=text)


def indexes(*short: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the options for package indexes, set for uv before the command runs.

    Args:
        short: further names of ``--index-url``.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.option(
            *short, "--index-url", default="", help="Package index to use instead of PyPI."
        )
        @click.option(
            "--extra-index-url", multiple=True, help="Additional package index, searched first."
        )
        @click.option(
            "-f",
            "--find-links",
            multiple=True,
            help="Directory, or page with links, with more wheels.",
        )
        @wraps(command)
        def wrapped(
            *arguments: Any,
            index_url: str,
            extra_index_url: tuple[str, ...],
            find_links: tuple[str, ...],
            **values: Any,
        ) -> Any:
            if index_url or extra_index_url or find_links:
                from wheelmount.wheels import uvsettings

                uvsettings.use_indexes(index_url, extra_index_url, find_links)
            return command(*arguments, **values)

        return wrapped

    return decorate


def wanted(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments and options for requirements; passes ``wanted``: None without any."""

    @click.argument("requirements", nargs=-1)
    @requirement_files(
        "File of requirements, pyproject.toml, uv.lock or pylock.toml, or its URL; - is standard "
        "input; may be repeated."
    )
    @click.option(
        "-c",
        "--constraint",
        "constraints",
        multiple=True,
        metavar="FILE",
        help="Constraints file, or its URL; repeatable.",
    )
    @click.option(
        "--override",
        "overrides",
        multiple=True,
        metavar="FILE",
        help="File of requirements that replace all others of the same names.",
    )
    @indexes("-i")
    @click.option("--pre", is_flag=True, help="Allow prereleases.")
    @click.option(
        "--no-deps", is_flag=True, help="Leave out the dependencies of the named packages."
    )
    @click.option(
        "--exclude-newer", metavar="DATE", help="Ignore what was published after this date."
    )
    @click.option(
        "--extra", "extras", multiple=True, help="Extra of the project of -r pyproject.toml."
    )
    @click.option("--group", "groups", multiple=True, help="Dependency group of the same project.")
    @click.option(
        "--build",
        "builds",
        multiple=True,
        metavar="REQUIREMENT",
        help="Build this package here from its source distribution; repeatable.",
    )
    @click.option(
        "--require-hashes",
        is_flag=True,
        help="Refuse packages that no requirements file pins by --hash.",
    )
    @click.option(
        "--sandbox/--no-sandbox",
        "confined",
        default=True,
        show_default=True,
        help="Build sources of others without network, home directory and temporary files. They "
        "can read your files elsewhere, such as in /scratch.",
    )
    @wraps(command)
    def wrapped(
        *arguments: Any,
        requirements: tuple[str, ...],
        files: tuple[str, ...],
        constraints: tuple[str, ...],
        overrides: tuple[str, ...],
        pre: bool,
        no_deps: bool,
        exclude_newer: str | None,
        extras: tuple[str, ...],
        groups: tuple[str, ...],
        builds: tuple[str, ...],
        require_hashes: bool,
        confined: bool,
        **values: Any,
    ) -> Any:
        from wheelmount.wheels.given import file_of
        from wheelmount.wheels.wanted import NO_DEPS, PRE, Wanted

        place = config.load().private_runtime() / "given"
        found = [[file_of(one, place) for one in some] for some in (files, constraints, overrides)]
        given = requirements, found[0], found[1], extras, groups, builds
        flags = [PRE] * pre + [NO_DEPS] * no_deps
        flags += [f"--exclude-newer={exclude_newer}"] if exclude_newer else []
        values["wanted"] = None
        if any(given):
            values["wanted"] = Wanted.of(
                *given,
                require_hashes=require_hashes,
                confined=confined,
                flags=flags,
                override_files=found[2],
            )
            return command(*arguments, **values)
        changes = {
            "--override": overrides,
            "--pre": pre,
            "--no-deps": no_deps,
            "--exclude-newer": exclude_newer,
            "--require-hashes": require_hashes,
        }
        if alone := [name for name, value in changes.items() if value]:
            raise InputError(
                f"{alone[0]} changes nothing without requirements",
                hint="name a package, or -r a file of them",
            )
        return command(*arguments, **values)

    return wrapped


_python_version = click.option(
    "--python-version",
    "python_versions",
    multiple=True,
    metavar="X.Y",
    help="Python that the wheels are for: 3.12, 3.14t (free-threaded), pypy3.11.",
)
_platform = click.option(
    "--platform",
    "platforms",
    multiple=True,
    help="Platform that the wheels are for: x86_64, manylinux_2_28_aarch64, musllinux_1_2_x86_64.",
)


def targets(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for target Pythons and platforms; passes ``targets``: empty by default."""

    @_python_version
    @_platform
    @wraps(command)
    def wrapped(
        *arguments: Any, python_versions: tuple[str, ...], platforms: tuple[str, ...], **values: Any
    ) -> Any:
        values["targets"] = []
        if python_versions or platforms:
            from wheelmount.wheels.target import Target

            values["targets"] = Target.parse_all(python_versions, platforms)
        return command(*arguments, **values)

    return wrapped


def target(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for one target; passes ``target``: None by default."""

    @targets
    @wraps(command)
    def wrapped(*arguments: Any, targets: list[Target], **values: Any) -> Any:
        if len(targets) > 1:
            raise InputError("more than one target", hint="give one of each option")
        values["target"] = targets[0] if targets else None
        return command(*arguments, **values)

    return wrapped
