"""Addresses of hosts on a network: ``tls://HOST:PORT``, or ``tcp://`` without certificates."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from wheelmount.errors import HostError, InputError

POLL_INTERVAL = 0.05
"""Seconds between attempts to reach what comes up."""

SECURE, OPEN = "tls", "tcp"
"""Schemes: with certificates of the user's own, and without."""

LOCAL = "ipc://"
"""Beginning of the address of a socket on this machine."""

DANGER = "without authentication: anyone who reaches this port can run programs there as you"
"""What is to be said wherever a worker is reached without certificates."""


HOST = r"[\w.-]+|\[[0-9A-Fa-f:.]+\]"
"""What stands for a host where a port may follow: a name, or an address, of IPv6 in brackets."""


def bare(host: str) -> str:
    """A host without the brackets of an address of IPv6.

    Raises:
        InputError: there is something else in them.
    """
    inner = host.strip("[]")
    if inner != host and not (":" in inner and is_literal(inner)):
        raise InputError(f"{host!r} is no address of IPv6", hint="write it as in [fd00::1]")
    return inner


def bracketed(host: str) -> str:
    """A host as it is written where a port may follow; the inverse of ``bare``."""
    return f"[{host}]" if ":" in host else host


def is_literal(host: str) -> bool:
    """Whether it is an IP address, and no name."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def called(host: str) -> str:
    """What to call a host in paths and words: an address of IPv6 as in ``fd00--1``."""
    return host.replace(":", "-").strip("-")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens.

    Attributes:
        scheme: ``SECURE`` or ``OPEN``.
        host: name or IP address.
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
        match = re.fullmatch(rf"(?:(tls|tcp)://)?({HOST}):(\d{{1,5}})", text.strip(), re.ASCII)
        if match is None or not 0 < int(match[3]) < 1 << 16 or not (match[1] or scheme):
            raise InputError(
                f"{text!r} is not the address of a host", hint="give tls://HOST:PORT,HOST:PORT,…"
            )
        return cls(match[1] or scheme, bare(match[2]), int(match[3]))

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
        return f"{self.scheme}://{bracketed(self.host)}:{self.port}"

    def names(self) -> list[str]:
        """Return the host's name and its addresses, as resolved here; certificates name all."""
        try:
            found = [str(each[4][0]) for each in socket.getaddrinfo(self.host, None)]
        except OSError:
            found = []
        return list(dict.fromkeys([self.host, *found]))

    def check_own(self) -> None:
        """Check that other machines can reach this machine at the address.

        Raises:
            InputError: they cannot. An explicit loopback address is accepted: all hosts may be on
                one machine.
        """
        try:
            meant = [str(each[4][0]) for each in socket.getaddrinfo(self.host, None)]
        except OSError as error:
            raise InputError(
                f"{self.host}: {error.strerror or error}", hint="give an address of this machine"
            ) from None
        # Of a name that stands for addresses of both kinds, most programs take the older kind.
        found = ipaddress.ip_address(min(meant, key=lambda each: ":" in each).partition("%")[0])
        if found.is_unspecified or (found.is_loopback and not is_literal(self.host)):
            raise InputError(
                f"{self.host} is {found} here, which other machines cannot reach",
                hint="give an address of this machine on the network that it shares with them",
            )

    def await_answer(
        self, timeout: float, patience: float = 0, in_vain: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until a process listens at the address.

        Args:
            timeout: seconds for each attempt.
            patience: seconds in which attempts may fail, while the process starts.
            in_vain: whether to give up at once, as the process will not start.

        Raises:
            HostError: no process listens, or there is no route to the host.
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
                time.sleep(POLL_INTERVAL)
            else:
                return

    def reached_from(self) -> Address:
        """Return this machine's address on the route to the host, with port 0.

        Raises:
            HostError: there is no route to the host.
        """
        try:
            ways = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)
            family, kind, _, _, place = min(ways, key=lambda way: way[0] != socket.AF_INET)
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing; the kernel chooses the route
                return Address(self.scheme, probe.getsockname()[0], 0)
        except OSError as error:
            raise HostError(f"there is no way to {self}: {error.strerror or error}") from None
