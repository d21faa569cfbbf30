"""``wheelmount run``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from wheelmount import config
from wheelmount.cli import options, output
from wheelmount.cli.console import ConsoleProgress
from wheelmount.cli.image_options import container
from wheelmount.cli.launcher import Launcher
from wheelmount.hosts.spec import HostSpec
from wheelmount.jobs import containers, scripts
from wheelmount.jobs.image import Image


@click.command(cls=Launcher, after_source=True)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--mntpoint", help="Where to mount on the hosts; default the path of SOURCE.")
@options.hosts
@container
@options.adapter
@output.options
@options.quiet
def run(
    source: Path,
    script: str,
    arguments: tuple[str, ...],
    mntpoint: str | None,
    spec: HostSpec,
    image: Image | None,
    adapter: str,
    show: output.Show,
    quiet: bool,
) -> int:
    """Mount SOURCE on every host and run the script SCRIPT (`-`: standard input) on each.

    Options stand before SCRIPT; all that follows is its own. Its first line may name what runs it
    (`#!/usr/bin/env python3`), else that is bash.
    It runs in the mounted directory, which is read-only, as soon as that stands: what it reads
    arrives first. The exit code is the worst of all. One host gets the standard input of this
    command, unless the script is read from it.

    With --image it runs in an offline container of each host, which sees SOURCE where the host
    has it.
    """
    text = scripts.read(script)
    progress = ConsoleProgress(quiet=quiet)
    settings = replace(config.load(), adapter=adapter)
    stdin = None if script == "-" else output.standard_input()
    given = source, text, arguments, mntpoint, settings, progress
    with show.open(progress) as told:
        if image is None:
            results = scripts.run(spec, *given, output=told, stdin=stdin)
        else:
            results = containers.script(spec, image, *given, output=told, stdin=stdin)
    return show.end(results, progress)
