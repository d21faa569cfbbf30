"""The versions of the client and of its hosts, compared before anything else is said between them.

Objects are pickled for hosts, and so both sides must have the same code. What the handshake itself
sends is text only. The agent of a mount answers it by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from blake3 import blake3

import wheelmount
from wheelmount.errors import HostError
from wheelmount.hosts import runtime
from wheelmount.hosts.actor import Actor, concurrent_endpoint

Versions = Mapping[str, str]
"""By name of a package; ``code`` is a hash of wheelmount's own files."""

CODE = "code"

HINT = "install the same wheelmount on the client and on the hosts"


@functools.cache
def here() -> Versions:
    """Those of this process."""
    digest = blake3()
    root = Path(wheelmount.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode()).update(file.read_bytes())
    return {
        "wheelmount": wheelmount.__version__,
        "torchmonarch": metadata.version("torchmonarch"),
        CODE: digest.hexdigest(4),
    }


class Handshake(Actor):
    """The actor that answers on a host."""

    @concurrent_endpoint
    async def versions(self) -> dict[str, str]:
        """Return the versions of the host's wheelmount and torchmonarch, as ``here`` does."""
        return dict(here())


def begin(procs: Any) -> Any:
    """Ask a process on a host for its versions; return a future of Monarch."""
    return procs.spawn(f"{runtime.NAME}handshake", Handshake).versions.call_one()


def compare(host: str, theirs: Versions) -> None:
    """Check that a host has the same versions as this process.

    Raises:
        HostError: it has others.
    """
    if difference := differ(theirs):
        raise HostError(f"{host}: it has {difference}", hint=HINT)


def differ(theirs: Versions) -> str | None:
    """How other versions differ from those of this process, in words; None if they do not."""
    ours = here()
    for package in ("wheelmount", "torchmonarch"):
        if ours[package] != theirs.get(package):
            return f"{package} {theirs.get(package)}, and this client {ours[package]}"
    if ours[CODE] != theirs.get(CODE):
        return f"other code of wheelmount {ours['wheelmount']} than this client"
    return None
