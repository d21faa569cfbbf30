"""List and delete overlays, on this machine and on hosts."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wheelmount.config import Settings
from wheelmount.containers.overlay import Overlay
from wheelmount.errors import ContainerError, WheelmountError

if TYPE_CHECKING:
    from wheelmount.hosts.commands import Results  # with Monarch

ASK = "python", "-m", "wheelmount.cli.main", "overlay", "ls", "--json"
"""Has a host tell of its own."""


def here(settings: Settings) -> list[dict[str, Any]]:
    """Return this machine's overlays for JSON; ``user`` is the process that uses it, or None."""
    return [
        {
            "name": each.name,
            "host": each.host,
            "kind": each.found or "directory",
            "bytes": each.used(),
            "user": each.user() or None,
            "path": str(each.layer),
        }
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


def told(results: Results) -> list[dict[str, Any]]:
    """Those of which hosts told that were asked; of a host that did not nothing is known."""
    found: list[dict[str, Any]] = []
    for name, result in results.items():
        if not isinstance(result, WheelmountError) and result.code == 0:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # it says something else
                found += [each for each in json.loads(result.stdout) if each["host"] == name]
    return found
