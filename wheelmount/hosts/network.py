"""``tls://HOST:PORT,…``: hosts with a running worker, reached over the network."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError, WaitError
from wheelmount.hosts import runtime
from wheelmount.hosts.address import DANGER, OPEN, SECURE, Address
from wheelmount.hosts.address import called as host_name
from wheelmount.hosts.host import Hosts
from wheelmount.hosts.names import distinct

if TYPE_CHECKING:  # cryptography takes long to load, and most commands need none of it
    from wheelmount.hosts.credentials import Authority

log = logging.getLogger("wheelmount")


RESTART = 3.0
"""Seconds in which a worker that Monarch has ended is started again, and refuses clients."""

INSTALL = "wheelmount must be installed there: where this one is, or at WHEELMOUNT_PYTHON"
"""What to do where a worker cannot be started."""


def counted(kind: str, text: str, things: str, hint: str) -> tuple[int, list[str]]:
    """Read ``N,OPTION…``, the number and what follows.

    Args:
        kind: of hosts.
        text: to be read.
        things: what the number is of, for people.
        hint: what to do where there is none.

    Raises:
        InputError: there is none.
    """
    count, *options = text.split(",")
    if re.fullmatch(r"[1-9]\d{0,4}", count) is None:
        raise InputError(f"{kind}:{text} does not say how many {things}", hint=hint)
    return int(count), options


class NetworkHosts(Hosts):
    """Hosts that run ``wheelmount worker``, named as in their addresses.

    ``stop`` only disconnects: the user who started the workers ends them. All must be able to reach
    this machine at the address by which it reaches the first of them.

    Args:
        addresses: where they listen.
        settings: say how long one may take to answer.
    """

    def __init__(self, addresses: Sequence[Address], settings: Settings) -> None:
        super().__init__(called(addresses))
        self._addresses = list(addresses)
        self._settings = settings
        self._authority: Authority | None = None

    def authority(self) -> Authority:
        """Who signs for these hosts, and for this process towards them.

        Their own if they were started together; else the user's.
        """
        from wheelmount.hosts.credentials import Authority

        return self._authority or Authority.of_user(self._settings)

    def _start_authority(self) -> None:
        """Sign by the authority of this process, for hosts that it starts."""
        from wheelmount.hosts.credentials import Authority

        self._authority = Authority.of_process()

    def _certify(self, names: Sequence[str]) -> bytes:
        """Return a certificate and its key for workers that this process starts, as they read it.

        Args:
            names: host names and IP addresses at which the workers are reached.
        """
        from wheelmount.hosts.credentials import OF_HOSTS, encode

        return encode(self.authority().issue(names, OF_HOSTS))

    @property
    def addresses(self) -> list[str]:
        """Where Monarch reaches each."""
        return list(map(str, self._addresses))

    def start(self) -> None:
        """Reach them; they run already, or are about to be started again (``keeper``)."""
        self.check(RESTART)
        if self._addresses[0].scheme == SECURE:
            authority = self.authority()
            with ThreadPoolExecutor() as threads:
                called = threads.map(lambda each: self._as_called(each, authority), self._addresses)
                self._addresses = list(called)
        self._attach()

    def _as_called(self, address: Address, authority: Authority) -> Address:
        """Return the address of a worker with the name by which the worker itself calls its host.

        Monarch's messages to another name, or to an address in place of a name, are lost.

        Raises:
            HostError: the worker cannot be reached by that name from here.
        """
        from wheelmount.hosts.credentials import own_name

        name = own_name(address, authority, self._settings.start_timeout)
        if name in (None, address.host):
            return address
        called = replace(address, host=name)
        try:
            called.await_answer(self._settings.start_timeout)
        except HostError as error:
            raise HostError(
                f"the worker at {address} calls itself {called}, and {error.message}",
                hint=f"start it as tls://{address.host}:{address.port}, or let its name be known "
                "on all machines",
            ) from None
        log.debug("host: %s is called %s", address, called)
        return called

    def check(self, patience: float = 0) -> None:
        """Check that each host listens.

        Args:
            patience: seconds in which those that come up may refuse.
        """
        for address in self._addresses:
            address.await_answer(self._settings.start_timeout, patience)

    def attach(self) -> None:
        """Reach them, and wait until each answers.

        Raises:
            HostError: one does not, or this process has hosts of another kind.
        """
        self.check()
        self._attach()

    def reach(self) -> None:
        """Connect to running hosts of which some may not answer.

        Raises:
            HostError: this process has hosts of another kind.
        """
        first = self._addresses[0]
        if first.scheme == OPEN:
            log.warning("security: %s: %s", ", ".join(map(str, self._addresses)), DANGER)
        runtime.start(first.reached_from(), self.authority())
        for name, address in zip(self._names, self._addresses, strict=True):
            log.debug("host: %s is at %s", name, address)
        super().reach()

    def _attach(self) -> None:
        """Connect to hosts that listen, as ``attach`` does."""
        self.reach()
        try:
            self._hosts = self._await_answers(self._settings.start_timeout)
        except WaitError as error:
            if self._addresses[0].scheme == SECURE:
                error.hint = (
                    "hosts with other credentials do not answer: see `wheelmount worker -h`"
                )
            raise

    def stop(self) -> None:
        """Let go of them."""
        self.settle()
        self._hosts = []

    def record(self) -> dict[str, Any]:
        """Return a record for ``resume``."""
        record: dict[str, Any] = {"addresses": self.addresses, "names": self._names}
        if self._authority is not None:
            record["authority"] = self._authority.encode().decode()
        return record

    @classmethod
    def resume(cls, record: dict[str, Any], settings: Settings) -> NetworkHosts:
        """Hosts that another process left."""
        hosts = cls((), settings)
        hosts.recall(record)
        return hosts

    def recall(self, record: dict[str, Any]) -> None:
        """Take from a record where they are."""
        self._names = record["names"]
        self._addresses = [Address.parse(text) for text in record["addresses"]]
        if "authority" in record:
            from wheelmount.hosts.credentials import Authority

            self._authority = Authority.decode(record["authority"].encode())


def called(addresses: Sequence[Address]) -> list[str]:
    """What to call hosts: as in their addresses, with the port where several have one name."""
    return distinct([host_name(each.host) for each in addresses], [each.port for each in addresses])
