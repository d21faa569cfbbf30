"""List and delete overlays, on this machine and on hosts."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from wheelmount import typed
from wheelmount.config import Settings
from wheelmount.containers.overlay import Overlay
from wheelmount.errors import ContainerError, WheelmountError

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


def prune(settings: Settings, unused: float) -> list[dict[str, Any]]:
    """Delete overlays of this machine that were unused for some seconds.

    Returns:
        The deleted overlays, for JSON.
    """
    gone = []
    for each in Overlay.all(Path(settings.state_dir)):
        if each.user() or time.time() - each.last_used() < unused:
            continue
        record = {"name": each.name, "host": each.host, "bytes": each.used()}
        with contextlib.suppress(ContainerError):  # a container has started to use it
            each.remove()
            gone.append(record)
    return gone


def told(results: Results) -> list[State]:
    """Return what hosts answered to ``ASK``; nothing of a host that gave no valid answer."""
    found: list[State] = []
    for name, result in results.items():
        if not isinstance(result, WheelmountError) and result.code == 0:
            with contextlib.suppress(ValueError):
                states = typed.decode(result.stdout, list[State])
                found += [each for each in states if each["host"] == name]
    return found
