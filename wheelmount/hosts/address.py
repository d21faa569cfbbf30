"""Addresses of hosts on a network: ``tls://HOST:PORT``, or ``tcp://`` without certificates."""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from wheelmount.errors import HostError, InputError

GLANCE = 0.05
"""Seconds between attempts to reach what comes up."""

SECURE, OPEN = "tls", "tcp"
"""Schemes: with certificates of the user's own, and without."""

DANGER = "whoever can reach this port can run programs there as you; nobody is asked who they are"
"""What is to be said wherever a worker is reached without certificates."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens.

    Attributes:
        scheme: ``SECURE`` or ``OPEN``.
        host: name or IPv4 address.
        port: of TCP.
    """

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, scheme: str = "") -> Address:
        """Read ``tls://HOST:PORT`` or ``tcp://HOST:PORT``.

        Args:
            text: to be read.
            scheme: what it has if it does not say.

        Raises:
            InputError: it is something else.
        """
        match = re.fullmatch(r"(?:(tls|tcp)://)?([\w.-]+):(\d{1,5})", text.strip(), re.ASCII)
        if match is None or not 0 < int(match[3]) < 1 << 16 or not (match[1] or scheme):
            raise InputError(
                f"{text!r} is not the address of a host", hint="give tls://HOST:PORT,HOST:PORT,…"
            )
        return cls(match[1] or scheme, match[2], int(match[3]))

    @classmethod
    def parse_all(cls, text: str) -> tuple[Address, ...]:
        """Read several with commas between; one without a scheme has that of the first.

        Raises:
            InputError: one is something else, twice there, or of another scheme.
        """
        first, *more = text.split(",")
        head = cls.parse(first)
        found = (head, *(cls.parse(word, head.scheme) for word in more))
        if len(set(found)) < len(found):
            raise InputError(f"{text!r} names a host twice", hint="give each address once")
        if len({address.scheme for address in found}) > 1:
            raise InputError(f"{text!r} mixes tls and tcp", hint="use tls:// for all")
        return found

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"

    def names(self) -> list[str]:
        """What stands for the host, as it sees it: a certificate is to hold for each."""
        try:
            found = [str(each[4][0]) for each in socket.getaddrinfo(self.host, None)]
        except OSError:
            found = []
        return list(dict.fromkeys([self.host, *found]))

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

    def await_answer(
        self, timeout: float, patience: float = 0, in_vain: Callable[[], bool] = lambda: False
    ) -> None:
        """See that something listens there.

        Args:
            timeout: seconds for an attempt.
            patience: seconds in which what comes up may refuse.
            in_vain: tells whether it does not come up any more.

        Raises:
            HostError: nothing does, or there is no way to it.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout).close()
            except OSError as error:
                if in_vain() or time.monotonic() > deadline:
                    raise HostError(
                        f"{self} cannot be reached: {error.strerror or error}",
                        hint=f"run there: wheelmount worker {self}",
                    ) from None
                time.sleep(GLANCE)
            else:
                return

    def reached_from(self) -> Address:
        """Where the host there reaches this machine; any port.

        Raises:
            HostError: there is no way to it.
        """
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((self.host, self.port))  # sends nothing, looks for the way
                return Address(self.scheme, probe.getsockname()[0], 0)
        except OSError as error:
            raise HostError(f"there is no way to {self}: {error.strerror or error}") from None
