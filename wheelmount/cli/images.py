"""``wheelmount image``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import uv

from wheelmount import config
from wheelmount.cli import options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.containers import image as images
from wheelmount.errors import InputError


@click.group()
def image() -> None:
    """Build, list and inspect container images."""


@image.command()
@click.argument("definition", type=click.Path(path_type=Path))
@click.argument("sif", type=click.Path(path_type=Path))
@click.option("--build-arg", "build_args", multiple=True, metavar="NAME=VALUE")
@options.as_json
@options.quiet
def build(
    definition: Path, sif: Path, build_args: tuple[str, ...], as_json: bool, quiet: bool
) -> None:
    """Build SIF from DEFINITION, unless it is there and what it is made of has not changed.

    The build argument `uv` is the path of uv's program here unless you give it.
    """
    values = {"uv": uv.find_uv_bin()} if _takes_uv(definition) else {}
    for argument in build_args:
        name, found, value = argument.partition("=")
        if not found:
            raise InputError(f"{argument!r} is no build argument", hint="give NAME=VALUE")
        values[name] = value
    progress = ConsoleProgress(quiet=quiet)
    built = images.build(definition, sif, build_args=values, progress=progress)
    if as_json:
        print(json.dumps({"path": str(sif), "built": built}))
    else:
        print(f"{sif}: {'built' if built else 'up to date'}")


@image.command()
@click.argument("references", nargs=-1, required=True)
@options.as_json
@options.quiet
def pull(references: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Bring images of registries into the cache: docker://…, oras://…, library://….

    `--image` does so where one is not there. A tag may have come to mean another image: this
    brings what it means now.
    """
    from wheelmount.operations import pulled  # with Monarch

    settings, progress = config.load(), ConsoleProgress(quiet=quiet)
    paths = [str(pulled.pull(reference, settings, progress)) for reference in references]
    print(json.dumps(paths) if as_json else "\n".join(paths))


@image.command("ls")
@click.argument("directories", nargs=-1, type=click.Path(path_type=Path))
@options.as_json
def ls(directories: tuple[Path, ...], as_json: bool) -> None:
    """List images in DIRECTORIES, default this one: path, size, what it stands to its definition.

    That is `current`, `outdated` (the definition or what it is made of has changed since), or
    `foreign` (not built here).
    """
    found = [sif for each in directories or [Path()] for sif in sorted(each.glob("*.sif"))]
    records: list[dict[str, Any]] = [
        {"path": str(sif), "bytes": sif.stat().st_size, "state": images.state(sif)} for sif in found
    ]
    if as_json:
        print(json.dumps(records))
        return
    for each in records:
        print(f"{each['path']}  {each['bytes'] / 1e6:.1f} MB  {each['state']}")


@image.command()
@click.argument("sif", type=click.Path(path_type=Path))
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


def _takes_uv(definition: Path) -> bool:
    try:
        return "{{ uv }}" in definition.read_text()
    except (OSError, UnicodeDecodeError):
        return False  # the build says what is wrong with it
