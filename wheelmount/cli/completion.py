"""What a shell offers for words of the command line: names of what there is on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from wheelmount import config
from wheelmount.config import Settings

_Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _of(find: Callable[[Settings], Iterable[tuple[str, str]]]) -> _Complete:
    """What completes a word with names, each with what it is; nothing where none can be had."""

    def complete(
        _ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        try:
            found = dict(find(config.load()))
        except Exception:
            return []
        return [
            CompletionItem(name, help=what)
            for name, what in found.items()
            if name.startswith(incomplete)
        ]

    return complete


@_of
def overlays(settings: Settings) -> Iterable[tuple[str, str]]:
    from wheelmount.containers.overlay import Overlay

    for each in Overlay.all(Path(settings.state_dir)):
        yield each.name, f"overlay of {each.host}"


def _instances(settings: Settings) -> Iterable[tuple[str, str]]:
    from wheelmount.containers.instance import Instance

    for each in Instance.all(settings.private_runtime()):
        yield each.name, f"instance of {each.host}"


@_of
def sessions(settings: Settings) -> Iterable[tuple[str, str]]:
    from wheelmount.hosts.session import Session

    for each in Session.all(settings):
        yield each.name, "session"


def _mounts(settings: Settings) -> Iterable[tuple[str, str]]:
    from wheelmount.operations import standing

    return standing.names(settings)


@_of
def logged(settings: Settings) -> Iterable[tuple[str, str]]:
    yield from _mounts(settings)
    yield from _instances(settings)


@_of
def environments(settings: Settings) -> Iterable[tuple[str, str]]:
    from wheelmount.wheels import venv

    for each in venv.every(Path(settings.cache_dir)):
        yield each.folder.name, " ".join(each.packages[:6])


@_of
def own_definitions(_settings: Settings) -> Iterable[tuple[str, str]]:
    from wheelmount.containers import definitions

    for name in definitions.names():
        yield name, "definition of wheelmount's own"


def _files(pattern: str, incomplete: str) -> list[CompletionItem]:
    """Files by their ending, and directories, in which there may be more."""
    folder, _, start = incomplete.rpartition("/")
    place = Path(folder or ("/" if incomplete.startswith("/") else "."))
    head = incomplete[: len(incomplete) - len(start)]
    try:
        paths = sorted(place.iterdir())
    except OSError:
        return []
    return [
        CompletionItem(f"{head}{path.name}" + ("/" if path.is_dir() else ""))
        for path in paths
        if path.name.startswith(start)
        and (path.match(pattern) or (path.is_dir() and not path.name.startswith(".")))
    ]


def images(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the path of an image."""
    return _files("*.sif", incomplete)


def definitions(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a definition: a name of the package's own, or a file."""
    return own_definitions(ctx, param, incomplete) + _files("*.def", incomplete)


instances = _of(_instances)
mounts = _of(_mounts)
