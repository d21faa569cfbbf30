"""``wheelmount install | exec``."""

from __future__ import annotations

from pathlib import Path

import click

from wheelmount import config
from wheelmount.cli import options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.cli.run import finish
from wheelmount.errors import InputError
from wheelmount.hosts.spec import HostSpec
from wheelmount.jobs import containers, installs
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted

image_option = click.option(
    "--image", type=click.Path(path_type=Path), help="In an offline container of this SIF."
)
overlay_option = click.option(
    "--overlay",
    default="default",
    show_default=True,
    help="Name of the overlay that keeps what containers install, one a host.",
)


@click.command()
@options.wanted
@options.hosts
@click.option("--venv", help="Virtual environment on the hosts; made if there is none.  [.venv]")
@image_option
@overlay_option
@click.option(
    "--with",
    "tool",
    type=click.Choice(["uv", "pip", "wheelmount"]),
    help="What installs. uv and pip unpack wheels on each host; for wheelmount they are unpacked "
    "here, and travel so.  [uv, with --link-mode wheelmount]",
)
@click.option(
    "--link-mode",
    type=click.Choice(["copy", "symlink"]),
    help="Copy unpacked wheels, or make links into the mount, which then stays: the packages work "
    "for as long as it does.  [copy]",
)
@click.option(
    "--compile/--no-compile",
    "bytecode",
    default=True,
    show_default=True,
    help="Have bytecode travel with unpacked wheels, made here if this machine has that Python.",
)
@click.option(
    "-d",
    "--directory",
    type=click.Path(path_type=Path),
    help="The wheelhouse; default one of its own in the cache.",
)
@options.target
@options.as_json
@options.quiet
def install(
    wanted: Wanted | None,
    spec: HostSpec,
    venv: str | None,
    image: Path | None,
    overlay: str,
    tool: installs.Tool | None,
    link_mode: installs.LinkMode | None,
    bytecode: bool,
    directory: Path | None,
    target: Target | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Install REQUIREMENTS on every host, from wheels that only this machine downloads.

    They go into a virtual environment (several hosts on one machine: one each, with the name of the
    host in its path), or with --image into an overlay of offline containers.
    """
    if wanted is None:
        raise InputError("nothing to install", hint="name a package, or -r a file of them")
    if venv is not None and image is not None:
        raise InputError("--venv and --image exclude each other", hint="give one of them")
    into = (
        installs.Venv(str(Path(venv or ".venv").absolute()))
        if image is None
        else containers.Image(image, overlay)
    )
    progress = ConsoleProgress(quiet=quiet)
    results = installs.install(
        spec,
        wanted,
        into,
        config.load(),
        progress,
        tool=tool or ("wheelmount" if link_mode else "uv"),
        link_mode=link_mode or "copy",
        bytecode=bytecode,
        directory=directory,
        target=target,
    )
    return finish(results, progress, as_json=as_json)


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@options.hosts
@image_option
@overlay_option
@click.option(
    "--packages",
    type=click.Path(path_type=Path),
    help="A wheelhouse to mount on the hosts: pip and uv in the containers install from it.",
)
@options.as_json
@options.quiet
def execute(
    command: tuple[str, ...],
    spec: HostSpec,
    image: Path | None,
    overlay: str,
    packages: Path | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Run COMMAND on every host in a container without network.

    What it installs or writes stays in the overlay. Output is printed host by host, in order; the
    exit code is the worst of all.
    """
    if image is None:
        raise InputError("no image to run it in", hint="give --image; images/python.def makes one")
    progress = ConsoleProgress(quiet=quiet)
    results = containers.execute(
        spec, containers.Image(image, overlay), command, packages, config.load(), progress
    )
    return finish(results, progress, as_json=as_json)
