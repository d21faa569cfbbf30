"""A container as it is ordered from a host."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What a host needs to know to run a command in a container.

    Attributes:
        host: the host's name.
        image: path of the SIF there.
        overlay: name of the overlay that keeps what is installed.
        state_dir: where overlays are kept.
        runtime_dir: private directory for what goes with the container.
        packages: where the wheelhouse is mounted, or None.
        environment: variables to set in it.
        files: texts it finds at these paths.
        identity: tells containers of one host apart.
    """

    host: str
    image: str
    overlay: str
    state_dir: str
    runtime_dir: str
    packages: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    identity: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))

    def command(self, argv: Sequence[str]) -> tuple[str, ...]:
        """The command that carries it out; ``python`` is to be the host's own."""
        spec = json.dumps(dataclasses.asdict(self))
        return "python", "-m", "wheelmount.containers", spec, *argv
