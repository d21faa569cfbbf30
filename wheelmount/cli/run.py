"""``wheelmount run``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from wheelmount import config
from wheelmount.cli import options, output
from wheelmount.cli.console import ConsoleProgress
from wheelmount.cli.environments import environment
from wheelmount.cli.image_options import container
from wheelmount.cli.launcher import Launcher, Module
from wheelmount.errors import InputError
from wheelmount.hosts.spec import HostSpec
from wheelmount.operations import scripts
from wheelmount.operations.launch import Launch
from wheelmount.operations.site import Site
from wheelmount.wheels import inline
from wheelmount.wheels.inline import Inline

if TYPE_CHECKING:
    from wheelmount.operations.environments import Needed
    from wheelmount.operations.image import Image


@click.command(cls=Launcher, after_source=True)
@click.argument("source")
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-m",
    "module",
    cls=Module,
    metavar="MODULE",
    help="Run this Python module instead of a script; all words after it are its arguments.",
)
@click.option(
    "--per-host",
    "copies",
    type=click.IntRange(1, 1024),
    default=1,
    metavar="N",
    help="Number of copies on each host; not in containers.",
)
@click.option(
    "--mntpoint",
    type=options.GivenPath(),
    help="Mount point on the hosts; default the path of SOURCE.",
)
@options.hosts
@environment
@container
@options.launch
@options.collected
@options.adapter
@output.options
@options.quiet
def run(
    source: str,
    script: str | None,
    arguments: tuple[str, ...],
    module: str | None,
    copies: int,
    mntpoint: str | None,
    spec: HostSpec,
    needed: Callable[[Inline | None], Needed | None],
    image: Image | None,
    launch: Launch,
    adapter: str,
    show: output.Show,
    quiet: bool,
) -> int:
    """Mount SOURCE on every host and run the script SCRIPT (`-`: standard input) on each.

    Options stand before SCRIPT; all words after it are its arguments. The interpreter is that of
    the script's first line (`#!/usr/bin/env python3`), or else Python for `….py` and bash for other
    names. With -m, a Python module runs instead. The script starts in the mounted, read-only
    directory as soon as the mount exists; files that it reads arrive first. If SOURCE is a virtual
    environment, its Python and programs are found first. The exit code is the worst of all hosts.
    A single host gets the standard input of this command, unless the script is read from it.

    With --with, -r or --project, or if the script has inline metadata (PEP 723), it runs in an
    environment that is made here and mounted on the hosts, which need only Python. SOURCE may be
    left out then, and SCRIPT may be a command of the environment, such as python.

    With --image, the script runs in an offline container on each host, which shows SOURCE at the
    host's mount point.
    """
    if not source and module is None:  # it would stand for the working directory
        raise click.UsageError("SOURCE is empty.")
    launch = replace(launch, copies=copies)
    if image is not None:
        launch.check_container()
        image = replace(image, variables=launch.variables)
    words = (source, *((script,) if script is not None else ()), *arguments)
    folder = Path(source) if Path(source).is_dir() else None
    text = None
    if module is not None:
        folder = Path(source) if source else None
        words = (*scripts.PYTHON, "-m", module, *words[1:])
    else:
        if folder is not None:
            if script is None:
                raise click.UsageError("Missing argument 'SCRIPT'.")
            words = words[1:]
        if words[0] == "-" or folder is not None or Path(words[0]).exists() or "/" in words[0]:
            text = scripts.read(words[0])
    found = needed(None if text is None else inline.read(text))
    if found is None:
        if module is not None and folder is None:
            raise InputError(
                f"there is no directory to run {module} in, and no environment",
                hint=f"wheelmount run . -m {module}; or name packages that it needs: --with NAME",
            )
        if folder is None and Path(source).is_file() and script is None:
            raise InputError(
                f"{source} is a script, and there is no directory to run it in",
                hint=f"wheelmount run . {source}; or name packages that it needs: --with NAME",
            )
        if module is None and script is None:
            raise click.UsageError("Missing argument 'SCRIPT'.")
        if folder is None:  # the directory that is missing is told of by what mounts it
            folder, words = Path(source), words[1:]
            text = None
        if module is None and text is None:
            text = scripts.read(words[0])
    program = scripts.Program(words, text)
    progress = ConsoleProgress(quiet=quiet)
    site = Site(spec, replace(config.load(), adapter=adapter), progress)
    stdin = None if module is None and words[0] == "-" else output.standard_input()
    with show.open(progress) as told:
        launch = replace(launch, output=told, stdin=stdin)
        if found is not None:
            from wheelmount.operations import environments

            results = environments.run(
                site, found, program, image, launch, source=folder, mntpoint=mntpoint
            )
            return show.end(results, progress)
        given = cast(Path, folder), program, mntpoint, launch
        if image is None:
            results = scripts.run(site, *given)
        else:
            from wheelmount.operations import containers

            results = containers.script(site, image, *given)
    return show.end(results, progress)
