"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from wheelmount import config
from wheelmount.hosts.spec import HostSpec, parse
from wheelmount.mount.adapter import NAMES
from wheelmount.wheels.target import Target


class _Hosts(click.ParamType[HostSpec]):
    name = "spec"

    def convert(
        self, value: Any, _param: click.Parameter | None, _ctx: click.Context | None
    ) -> HostSpec:
        return value if isinstance(value, HostSpec) else parse(value)


hosts = click.option(
    "--hosts",
    "spec",
    type=_Hosts(),
    default=lambda: config.load().hosts,
    show_default="$WHEELMOUNT_HOSTS, else local:1",
    help="Where hosts come from: local:N for N hosts on this machine, tcp://HOST:PORT,… for "
    "workers that run already.",
)
adapter = click.option(
    "--adapter",
    type=click.Choice(NAMES),
    default=lambda: config.load().adapter,
    show_default="$WHEELMOUNT_ADAPTER, else auto",
    help="How hosts show the mount; auto is the best that each allows.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print results as JSON.")
quiet = click.option("-q", "--quiet", is_flag=True, help="No progress, only results and errors.")
requirements = click.argument("requirements", nargs=-1)
files = click.option(
    "-r",
    "--requirement",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="File of requirements; may be given more than once.",
)


def target(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options for the Python that wheels are for, given on as ``target``: None if not given."""

    @click.option("--python-version", metavar="X.Y", help="Python that the wheels are for.")
    @click.option(
        "--platform", help="Platform that the wheels are for, such as manylinux_2_28_aarch64."
    )
    @wraps(command)
    def wrapped(
        *arguments: Any, python_version: str | None, platform: str | None, **values: Any
    ) -> Any:
        given = python_version is not None or platform is not None
        values["target"] = Target.parse(python_version, platform) if given else None
        return command(*arguments, **values)

    return wrapped
