"""``--hosts SPEC``: where hosts are to come from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wheelmount.config import Settings
from wheelmount.errors import InputError
from wheelmount.hosts.address import OPEN, SECURE, Address
from wheelmount.hosts.host import Hosts
from wheelmount.hosts.local import LocalHosts
from wheelmount.hosts.network import NetworkHosts

MOST_LOCAL = 64
"""Hosts that one machine is asked to play at most; each is some 50 MB of processes."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A parsed SPEC.

    Attributes:
        kind: ``local``, ``tls`` or ``tcp``.
        count: number of hosts.
        addresses: where they listen; not of ``local``.
        session: name of the session whose hosts they are, if they are there already.
    """

    kind: str
    count: int
    addresses: tuple[Address, ...] = ()
    session: str | None = None

    def __str__(self) -> str:
        if self.addresses:
            return ",".join(map(str, self.addresses))
        return f"{self.kind}:{self.count}"

    @property
    def shared(self) -> bool:
        """Whether several of these hosts share one machine, and so its paths."""
        machines = len({address.host for address in self.addresses}) or 1
        return self.count > machines

    def make(self, settings: Settings, *, namespaces: bool, guarded: bool = True) -> Hosts:
        """The hosts, not started yet.

        Args:
            settings: in force.
            namespaces: of hosts on this machine; see ``LocalHosts``.
            guarded: end them when this process ends. Else they stay until they are stopped.
        """
        if self.addresses:
            return NetworkHosts(self.addresses, settings)
        return LocalHosts(self.count, settings, namespaces=namespaces, guarded=guarded)


KINDS: dict[str, type[Hosts]] = {"local": LocalHosts, SECURE: NetworkHosts, OPEN: NetworkHosts}
"""What makes hosts of each kind."""


def parse(text: str) -> HostSpec:
    """Read ``local:N`` or ``tls://HOST:PORT,HOST:PORT,…``.

    Raises:
        InputError: it is nothing that hosts can be made of.
    """
    text = text.strip()
    if "://" in text:
        addresses = Address.parse_all(text)
        return HostSpec(addresses[0].scheme, len(addresses), addresses)
    match = re.fullmatch(r"local(?::(\d{1,4}))?", text)
    if match is None:
        raise InputError(
            f"cannot make hosts of {text!r}",
            hint="give local:N, for example --hosts local:2, or tls://HOST:PORT,HOST:PORT,…",
        )
    count = int(match.group(1) or 1)
    if not 1 <= count <= MOST_LOCAL:
        raise InputError(
            f"{text!r} asks for {count} hosts", hint=f"give a number from 1 to {MOST_LOCAL}"
        )
    return HostSpec("local", count)
