"""``--hosts SPEC``: where hosts are to come from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wheelmount.config import Settings
from wheelmount.errors import InputError
from wheelmount.hosts.local import LocalHosts

MOST_LOCAL = 64
"""Hosts that one machine is asked to play at most; each is some 50 MB of processes."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A parsed SPEC.

    Attributes:
        kind: ``local``.
        count: number of hosts.
    """

    kind: str
    count: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}"

    @property
    def shared(self) -> bool:
        """Whether several of these hosts share one machine, and so its paths."""
        return self.count > 1

    def make(self, settings: Settings, *, namespaces: bool) -> LocalHosts:
        """The hosts, not started yet; see ``LocalHosts`` for ``namespaces``."""
        return LocalHosts(self.count, settings, namespaces=namespaces)


def parse(text: str) -> HostSpec:
    """Read ``local:N``.

    Raises:
        InputError: it is nothing that hosts can be made of.
    """
    match = re.fullmatch(r"local(?::(\d{1,4}))?", text.strip())
    if match is None:
        raise InputError(
            f"cannot make hosts of {text!r}", hint="give local:N, for example --hosts local:2"
        )
    count = int(match.group(1) or 1)
    if not 1 <= count <= MOST_LOCAL:
        raise InputError(
            f"{text!r} asks for {count} hosts", hint=f"give a number from 1 to {MOST_LOCAL}"
        )
    return HostSpec("local", count)
