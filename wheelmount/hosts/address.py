"""Addresses of hosts on a network: ``tcp://HOST:PORT``."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from wheelmount.errors import HostError, InputError

SCHEME = "tcp://"

DANGER = "whoever can reach this port can run programs there as you; nobody is asked who they are"
"""What is to be said wherever a worker is reached over a network."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens.

    Attributes:
        host: name or IPv4 address.
        port: of TCP.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``tcp://HOST:PORT``; the scheme may be left out.

        Raises:
            InputError: it is something else.
        """
        match = re.fullmatch(r"([\w.-]+):(\d{1,5})", text.strip().removeprefix(SCHEME), re.ASCII)
        if match is None or not 0 < int(match[2]) < 1 << 16:
            raise InputError(
                f"{text!r} is not the address of a host", hint="give tcp://HOST:PORT,HOST:PORT,…"
            )
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"{SCHEME}{self.host}:{self.port}"

    def check_own(self) -> None:
        """See that this machine can listen there and be reached by others.

        Raises:
            InputError: the address is none that others can reach. Where that is what was asked
                for, for hosts that are all on one machine, it is no error.
        """
        try:
            found = ipaddress.ip_address(socket.gethostbyname(self.host))
        except OSError as error:
            raise InputError(
                f"{self.host}: {error.strerror or error}", hint="give an address of this machine"
            ) from None
        literal = str(found) == self.host
        if found.is_unspecified or (found.is_loopback and not literal):
            raise InputError(
                f"{self.host} is {found} here, which other machines cannot reach",
                hint="give an address of this machine on the network that it shares with them",
            )

    def await_answer(self, timeout: float) -> None:
        """See that something listens there.

        Args:
            timeout: seconds.

        Raises:
            HostError: nothing does, or there is no way to it.
        """
        try:
            socket.create_connection((self.host, self.port), timeout).close()
        except OSError as error:
            raise HostError(
                f"{self} cannot be reached: {error.strerror or error}",
                hint=f"run there: python -m wheelmount.hosts.worker {self}",
            ) from None

    def seen_from(self) -> str:
        """The address of this machine that the host there sees when it is called.

        Raises:
            HostError: there is no way to it.
        """
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((self.host, self.port))  # sends nothing, looks for the way
                own: str = probe.getsockname()[0]
                return own
        except OSError as error:
            raise HostError(f"there is no way to {self}: {error.strerror or error}") from None
