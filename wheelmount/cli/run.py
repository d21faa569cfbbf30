"""``wheelmount run``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import click

from wheelmount import config
from wheelmount.cli import options, output
from wheelmount.cli.console import ConsoleProgress
from wheelmount.cli.environments import environment
from wheelmount.cli.image_options import container
from wheelmount.cli.launcher import Launcher
from wheelmount.errors import InputError
from wheelmount.hosts.spec import HostSpec
from wheelmount.jobs import containers, environments, scripts
from wheelmount.jobs.environments import Needed
from wheelmount.jobs.image import Image
from wheelmount.wheels import inline
from wheelmount.wheels.inline import Inline


@click.command(cls=Launcher, after_source=True)
@click.argument("source")
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--mntpoint", help="Where to mount on the hosts; default the path of SOURCE.")
@options.hosts
@environment
@container
@options.variables
@options.adapter
@output.options
@options.quiet
def run(
    source: str,
    script: str | None,
    arguments: tuple[str, ...],
    mntpoint: str | None,
    spec: HostSpec,
    needed: Callable[[Inline | None], Needed | None],
    image: Image | None,
    variables: dict[str, str],
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

    With --with, -r or --project, or if the script says what it needs (PEP 723), it runs in an
    environment that is made here and mounted on the hosts, which need nothing but Python. SOURCE
    may be left out then, and SCRIPT be a command of the environment, such as python.

    With --image it runs in an offline container of each host, which sees SOURCE where the host
    has it.
    """
    if image is not None:
        image = replace(image, variables=variables)
    words = (source, *((script,) if script is not None else ()), *arguments)
    folder = Path(source) if Path(source).is_dir() else None
    if folder is not None:
        if script is None:
            raise click.UsageError("Missing argument 'SCRIPT'.")
        words = words[1:]
    named = words[0]
    text = None
    if named == "-" or folder is not None or Path(named).exists() or "/" in named:
        text = scripts.read(named)
    found = needed(None if text is None else inline.read(text))
    if found is None:
        if folder is None and Path(source).is_file() and script is None:
            raise InputError(
                f"{source} is a script, and there is no directory to run it in",
                hint=f"wheelmount run . {source}; or name packages that it needs: --with NAME",
            )
        if script is None:
            raise click.UsageError("Missing argument 'SCRIPT'.")
        if folder is None:  # the directory that is missing is told of by what mounts it
            folder, named, words = Path(source), script, words[1:]
            text = None
        if text is None:
            text = scripts.read(named)
    progress = ConsoleProgress(quiet=quiet)
    settings = replace(config.load(), adapter=adapter)
    stdin = None if named == "-" else output.standard_input()
    with show.open(progress) as told:
        if found is not None:
            results = environments.run(
                spec,
                found,
                words,
                text,
                image,
                settings,
                progress,
                source=folder,
                mntpoint=mntpoint,
                output=told,
                stdin=stdin,
                variables=variables,
            )
            return show.end(results, progress)
        given = cast(Path, folder), cast(bytes, text), words[1:], mntpoint, settings, progress
        if image is None:
            results = scripts.run(spec, *given, output=told, stdin=stdin, variables=variables)
        else:
            results = containers.script(spec, image, *given, output=told, stdin=stdin)
    return show.end(results, progress)
