"""``wheelmount install``."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from wheelmount import config
from wheelmount.cli import options, output
from wheelmount.cli.console import ConsoleProgress
from wheelmount.cli.image_options import container
from wheelmount.errors import InputError, WaitError
from wheelmount.hosts.spec import HostSpec
from wheelmount.operations import cache, installs
from wheelmount.operations.image import Image
from wheelmount.operations.site import Site
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted


@click.command()
@options.wanted
@options.hosts
@click.option("--with", "named", hidden=True, multiple=True)
@click.option(
    "--venv",
    type=options.GivenPath(),
    help="Virtual environment on the hosts; created if missing.  [.venv]",
)
@container
@click.option(
    "--tool",
    type=click.Choice(["uv", "pip", "wheelmount"]),
    help="Installer. uv and pip unpack wheels on each host; wheelmount unpacks them here and "
    "delivers the files.  [uv; with --link-mode: wheelmount]",
)
@click.option(
    "--link-mode",
    type=click.Choice(["copy", "symlink"]),
    help="Copy the unpacked files, or link into the mount, which then stays: linked packages work "
    "as long as the mount exists.  [copy]",
)
@click.option(
    "--compile/--no-compile",
    "bytecode",
    default=True,
    show_default=True,
    help="Deliver bytecode with unpacked wheels, compiled here if this machine has that Python.",
)
@click.option(
    "-d",
    "--directory",
    type=options.GivenPath(path_type=Path),
    help="The wheelhouse. Default: one for these requirements in the cache.",
)
@options.target
@output.options
@options.quiet
def install(
    wanted: Wanted | None,
    spec: HostSpec,
    named: tuple[str, ...],
    venv: str | None,
    image: Image | None,
    tool: installs.Tool | None,
    link_mode: installs.LinkMode | None,
    bytecode: bool,
    directory: Path | None,
    target: Target | None,
    show: output.Show,
    quiet: bool,
) -> int:
    """Install REQUIREMENTS on every host, from wheels that only this machine downloads.

    They go into a virtual environment (several hosts on one machine: one each, with the name of the
    host in its path), or with --image into an overlay of offline containers.
    """
    if named:
        raise InputError(
            "install has no --with", hint=f"the tool that installs: --tool; a package: {named[0]}"
        )
    if wanted is None:
        raise InputError("nothing to install", hint="name a package, or -r a file of them")
    if venv is not None and image is not None:
        raise InputError("--venv and --image exclude each other", hint="give one of them")
    into = installs.Venv(str(Path(venv or ".venv").absolute())) if image is None else image
    settings, progress = config.load(), ConsoleProgress(quiet=quiet)
    with show.open(progress) as told:
        results = installs.install(
            Site(spec, settings, progress),
            wanted,
            into,
            tool=tool or ("wheelmount" if link_mode else "uv"),
            link_mode=link_mode or "copy",
            bytecode=bytecode,
            directory=directory,
            target=target,
            output=told,
        )
    if settings.cache_size:
        with contextlib.suppress(WaitError):  # another command uses it, and may do this itself
            cache.prune(settings, settings.cache_size)
    return show.end(results, progress)
