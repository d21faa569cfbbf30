"""``wheelmount setup``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from wheelmount import machine
from wheelmount.cli import options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.errors import UnavailableError


@click.command("setup")
@click.option("--check", is_flag=True, help="Change nothing; say what this machine lacks.")
@click.option(
    "--apptainer",
    type=options.GivenPath(path_type=Path, exists=True, dir_okay=False),
    envvar="APPTAINER_DEB",
    metavar="FILE",
    help="Debian package of apptainer to install, instead of a downloaded one.",
)
@options.as_json
@options.quiet
def setup(check: bool, apptainer: Path | None, as_json: bool, quiet: bool) -> int:
    """Install what mounts and containers need on this Debian machine.

    As root. The packages fuse3, debootstrap and apptainer are installed if their programs are
    missing, users may use /dev/fuse and open mounts to others, and root gets subordinate ids.
    Ends with 69 if something is still missing.
    """
    progress = ConsoleProgress(quiet=quiet)
    left = machine.lacks() if check else machine.set_up(apptainer, progress)
    if as_json:
        print(json.dumps({"missing": [dataclasses.asdict(lack) for lack in left]}))
    else:
        for lack in left:
            print(f"missing: {lack.name}; {lack.effect}")
        if not left:
            print("nothing is missing")
    return UnavailableError.exit_code if left else 0
