"""``wheelmount image``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from wheelmount import config
from wheelmount.cli import completion, options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.containers import definitions
from wheelmount.containers import image as images
from wheelmount.errors import InputError, SourceError


@click.group()
def image() -> None:
    """Build, list and inspect container images."""


@image.command()
@click.argument("definition", shell_complete=completion.definitions)
@click.argument(
    "sif", type=options.GivenPath(path_type=Path), required=False, shell_complete=completion.images
)
@click.option("--build-arg", "build_args", multiple=True, metavar="NAME=VALUE")
@options.as_json
@options.quiet
def build(
    definition: str, sif: Path | None, build_args: tuple[str, ...], as_json: bool, quiet: bool
) -> None:
    """Build SIF from DEFINITION, unless it is there and what it is made of has not changed.

    DEFINITION is a file, or the name of one of wheelmount's own: python, python-docker, ci, gpu,
    baked. SIF is NAME.sif here unless given. The build argument `uv` is the path of uv's program
    here unless you give it. Of those that start from python's image, which `base` names, that is
    python.sif beside SIF, and built first.
    """
    values = {}
    for argument in build_args:
        name, found, value = argument.partition("=")
        if not found:
            raise InputError(f"{argument!r} is no build argument", hint="give NAME=VALUE")
        values[name] = value
    file = definitions.find(definition)
    made = sif or Path(f"{file.stem}.sif")
    built = images.build_with_base(file, made, values, ConsoleProgress(quiet=quiet))
    if as_json:
        print(json.dumps({"path": str(made), "built": built}))
    else:
        print(f"{made}: {'built' if built else 'up to date'}")


@image.command()
@click.argument("name", default=definitions.BASE, shell_complete=completion.own_definitions)
@click.argument("directory", type=options.GivenPath(path_type=Path), default=".")
@options.as_json
def init(name: str, directory: Path, as_json: bool) -> None:
    """Write one of wheelmount's own definitions into DIRECTORY, to be edited and built.

    What it copies into the image is written beside it: pip's and uv's settings.
    """
    written = list(map(str, definitions.copy(name, directory)))
    print(json.dumps(written) if as_json else "\n".join(written))


@image.command()
@click.argument("references", nargs=-1, required=True)
@options.as_json
@options.quiet
def pull(references: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Pull images of registries into the cache: docker://…, oras://…, library://….

    `--image` does so for an image that is missing. A tag may name another image by now: this
    command pulls the current one.
    """
    from wheelmount.operations import pulled  # with Monarch

    settings, progress = config.load(), ConsoleProgress(quiet=quiet)
    paths = [str(pulled.pull(reference, settings, progress)) for reference in references]
    print(json.dumps(paths) if as_json else "\n".join(paths))


@image.command("ls")
@click.argument("directories", nargs=-1, type=options.GivenPath(path_type=Path))
@options.as_json
def ls(directories: tuple[Path, ...], as_json: bool) -> None:
    """List images in DIRECTORIES, default this one: path, size, what it stands to its definition.

    That is `current`, `outdated` (the definition or what it is made of has changed since), or
    `foreign` (not built here).
    """
    for directory in directories:
        if not directory.is_dir():
            raise SourceError(f"{directory} is no directory", hint="give directories with images")
    found = [
        sif
        for each in directories or [Path()]
        for sif in sorted(each.glob("*.sif"))
        if sif.exists()  # and is no dangling link
    ]
    records: list[dict[str, Any]] = [
        {"path": str(sif), "bytes": sif.stat().st_size, "state": images.state(sif)} for sif in found
    ]
    if as_json:
        print(json.dumps(records))
        return
    for each in records:
        print(f"{each['path']}  {each['bytes'] / 1e6:.1f} MB  {each['state']}")


@image.command()
@click.argument("sif", type=options.GivenPath(path_type=Path), shell_complete=completion.images)
@options.as_json
def inspect(sif: Path, as_json: bool) -> None:
    """Show an image's labels and the definition it was built from."""
    found = images.inspect(sif)
    if as_json:
        print(json.dumps({"labels": found.labels, "definition": found.definition}))
        return
    for name, value in sorted(found.labels.items()):
        print(f"{name}: {value}")
    print(f"\n{found.definition}")
