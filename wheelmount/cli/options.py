"""Options that several commands share."""

from __future__ import annotations

from typing import Any

import click

from wheelmount import config
from wheelmount.hosts.spec import HostSpec, parse


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
    help="Where hosts come from: local:N for N hosts on this machine.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print results as JSON.")
quiet = click.option("-q", "--quiet", is_flag=True, help="No progress, only results and errors.")
