"""List and delete overlays, on this machine and on hosts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from wheelmount import typed
from wheelmount.config import Settings
from wheelmount.containers.overlay import Overlay
from wheelmount.errors import ContainerError, OverlayInUseError, WheelmountError

if TYPE_CHECKING:
    from wheelmount.hosts.commands import Results  # with Monarch

ASK = "python", "-m", "wheelmount.cli.main", "overlay", "ls", "--json"
"""Has a host tell of its own."""


class State(TypedDict):
    """The state of an overlay; ``user`` is the process that uses it, or None."""

    name: str
    host: str
    kind: str
    bytes: int
    user: str | None
    path: str


def here(settings: Settings) -> list[State]:
    """Return the states of this machine's overlays."""
    return [
        State(
            name=each.name,
            host=each.host,
            kind=each.found or "directory",
            bytes=each.used(),
            user=each.user() or None,
            path=str(each.layer),
        )
        for each in Overlay.all(Path(settings.state_dir))
    ]


class Removed(TypedDict):
    """An overlay that was deleted, and the bytes that it took."""

    name: str
    host: str
    bytes: int


def prune(settings: Settings, unused: float) -> tuple[list[Removed], list[WheelmountError]]:
    """Delete overlays of this machine that were unused for some seconds.

    Also what failed removals have left.

    Returns:
        The deleted overlays, and why others could not be deleted.
    """
    state = Path(settings.state_dir)
    old = []
    for each in Overlay.all(state):
        with contextlib.suppress(FileNotFoundError):  # another process has just deleted it
            if not each.user() and time.time() - each.last_used() >= unused:
                old.append(each)
    gone, failed = _remove(old, unused)
    for each in Overlay.half_removed(state):
        if each not in old:  # which has just failed
            try:
                with contextlib.suppress(OverlayInUseError):
                    each.clear()
            except ContainerError as error:
                failed.append(error)
    return gone, [each for each in failed if not isinstance(each, OverlayInUseError)]


def remove(
    settings: Settings, names: Sequence[str], host: str | None
) -> tuple[list[Removed], list[WheelmountError]]:
    """Delete overlays of this machine.

    Args:
        settings: the settings in force.
        names: names of the overlays.
        host: only those of this host; None for all.

    Returns:
        The deleted overlays, and why others could not be deleted.

    Raises:
        ContainerError: there is no overlay of a name.
    """
    state = Path(settings.state_dir)
    every = dict.fromkeys([*Overlay.all(state), *Overlay.half_removed(state)])
    chosen = [each for each in every if each.name in names and host in (None, each.host)]
    for name in names:
        if name not in {each.name for each in chosen}:
            raise ContainerError(
                f"there is no overlay {name}" + (f" of {host}" if host else ""),
                hint="see `wheelmount overlay ls`",
            )
    return _remove(chosen)


def _remove(
    chosen: Sequence[Overlay], unused: float = 0.0
) -> tuple[list[Removed], list[WheelmountError]]:
    gone: list[Removed] = []
    failed: list[WheelmountError] = []
    for each in chosen:
        record = Removed(name=each.name, host=each.host, bytes=each.used())
        try:
            each.remove(unused)
        except ContainerError as error:
            failed.append(error)
        else:
            gone.append(record)
    return gone, failed


def told(results: Results) -> list[State]:
    """Return what hosts answered to ``ASK``; nothing of a host that gave no valid answer."""
    found: list[State] = []
    for name, result in results.items():
        if not isinstance(result, WheelmountError) and result.code == 0:
            with contextlib.suppress(ValueError):
                states = typed.decode(result.stdout, list[State])
                found += [each for each in states if each["host"] == name]
    return found
