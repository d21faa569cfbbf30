"""``wheelmount config``."""

from __future__ import annotations

import dataclasses
import json

import click

from wheelmount import config
from wheelmount.cli import options


@click.command("config")
@options.as_json
def show(as_json: bool) -> None:
    """Show the settings in force here, and where each comes from."""
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
