"""``wheelmount cache``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from wheelmount import config
from wheelmount.cli import options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.operations import cache as caches
from wheelmount.operations import standing
from wheelmount.operations.image import parse_size


@click.group()
def cache() -> None:
    """Show and clean the cache of wheelhouses, wheels, environments and images."""


@cache.command()
@options.as_json
def size(as_json: bool) -> None:
    """Show the size of the cache and its items, least recently used first."""
    settings = config.load()
    whole, found = caches.size(settings), caches.items(settings)
    if as_json:
        print(json.dumps({"directory": settings.cache_dir, "bytes": whole, "items": _plain(found)}))
        return
    for kind in ("wheelhouse", "tree", "environment", "image", "unpacked", "reads"):
        of_kind = [item for item in found if item.kind == kind]
        print(f"{kind}: {len(of_kind)}, {sum(item.size for item in of_kind) / 1e6:.1f} MB")
    print(f"in all: {whole / 1e6:.1f} MB in {settings.cache_dir}")


@cache.command()
@click.option(
    "--to",
    "bound",
    metavar="SIZE",
    help="Size to keep, such as 20G; default the setting cache_size.",
)
@options.as_json
def prune(bound: str | None, as_json: bool) -> None:
    """Remove the least recently used items until the cache is small enough."""
    settings = config.load()
    if bound is None and not settings.cache_size:
        raise click.UsageError("how much may stay? Give --to SIZE, or set cache_size.")
    limit = parse_size(bound) if bound is not None else settings.cache_size
    _tell(caches.prune(settings, limit), as_json)
    ConsoleProgress().raise_first(standing.unreadable(settings))


@cache.command()
@options.as_json
def clean(as_json: bool) -> None:
    """Remove everything from the cache except what running sessions have mounted."""
    settings = config.load()
    _tell(caches.clean(settings), as_json)
    ConsoleProgress().raise_first(standing.unreadable(settings))


def _tell(gone: Sequence[caches.Item], as_json: bool) -> None:
    if as_json:
        print(json.dumps(_plain(gone)))
        return
    for item in gone:
        print(f"removed {item.kind} {item.path.name} ({item.size / 1e6:.1f} MB)")
    print(f"{len(gone)} removed")


def _plain(found: Sequence[caches.Item]) -> list[dict[str, Any]]:
    return [
        {"kind": item.kind, "path": str(item.path), "bytes": item.size, "used": item.used}
        for item in found
    ]
