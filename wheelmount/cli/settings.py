"""``wheelmount config``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from wheelmount import config
from wheelmount.cli import options


@click.group("config", invoke_without_command=True)
@options.as_json
@click.pass_context
def show(context: click.Context, as_json: bool) -> None:
    """Show the settings in force here, and the origin of each."""
    if context.invoked_subcommand is not None:
        return
    settings, origins = config.load_with_origins()
    records = [
        {"name": name, "value": value, "from": origins[name]}
        for name, value in dataclasses.asdict(settings).items()
    ]
    if as_json:
        print(json.dumps(records))
        return
    for record in records:
        print("{name} = {value!r}  ({from})".format(**record))


@show.command()
@click.argument("directory", type=options.GivenPath(path_type=Path), default=".")
@click.option("--remove", is_flag=True, help="Withdraw the trust.")
@options.as_json
def trust(directory: Path, remove: bool, as_json: bool) -> None:
    """Let the settings file for DIRECTORY set everything, until its content changes.

    By itself a project's file may not say where code runs, or which: not hosts, python, store or
    any directory. A file that others may write to does not count at all.
    """
    file, table = config.trust(directory, trusted=not remove)
    if as_json:
        print(json.dumps({"file": str(file), "trusted": not remove, "settings": table}))
        return
    print(f"{file} is {'not trusted' if remove else 'trusted'}")
    for name, value in table.items():
        print(f"{name} = {value!r}")
