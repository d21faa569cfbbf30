"""What containers have installed, on this machine and on the hosts of sessions."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wheelmount.config import Settings
from wheelmount.containers.overlay import Overlay
from wheelmount.errors import WheelmountError

if TYPE_CHECKING:
    from wheelmount.hosts.commands import Results  # with Monarch

ASK = "python", "-m", "wheelmount.cli.main", "overlay", "ls", "--json"
"""Has a host tell of its own."""


def here(settings: Settings) -> list[dict[str, Any]]:
    """Those of this machine, fit for JSON; ``user`` is the process that has it in use, or None."""
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


def told(results: Results) -> list[dict[str, Any]]:
    """Those of which hosts told that were asked; of a host that did not nothing is known."""
    found: list[dict[str, Any]] = []
    for name, result in results.items():
        if not isinstance(result, WheelmountError) and result.code == 0:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # it says something else
                found += [each for each in json.loads(result.stdout) if each["host"] == name]
    return found
