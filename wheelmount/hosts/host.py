"""Hosts of any kind, as the rest of the package uses them."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from wheelmount.errors import HostError, InputError, WaitError
from wheelmount.hosts import runtime
from wheelmount.hosts.address import LOCAL, Address
from wheelmount.hosts.names import fold

if TYPE_CHECKING:
    from typing_extensions import Self

    from wheelmount.config import Settings

log = logging.getLogger("wheelmount")

POLL_INTERVAL = 0.1
"""Seconds between attempts to reach hosts that come up."""

FIRST_WAIT = 4.0
"""Seconds without an answer after which a host that listens is called again; then twice as many.
Answers take milliseconds, and seconds where processors are far too few."""

FIRST_PART = 0.25
"""Part of the time for an answer after which a process that gives none is started again."""

ERRNO = re.compile(r"\[Errno (\d+)\]")
"""Numbers in the text of an ``OSError``."""

CONNECT_TIMEOUT = 2.0
"""Seconds in which a host that listens accepts a connection."""

SETTLE = 3.0
"""Seconds in which hosts may give their last answers."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Attributes:
        name: its name in output and for ``{host}`` in paths (``host0``).
        mesh: Monarch's mesh of this host alone: a mesh with a dead member does not recover, and
            its other members would be lost too.
        address: Monarch's address of it; empty if it is unknown, as for hosts of a user's mesh.
    """

    name: str
    mesh: Any
    address: str = ""


class Hosts(ABC):
    """Hosts of one kind, started and stopped together; a context manager.

    Attributes:
        killed: whether ``stop`` kills all processes of the hosts at once, so that Monarch need not
            stop them before, which takes longer.
        left: whether hosts may go on, because ``give_up`` could not stop them.
    """

    killed = False
    left = False

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.begun: Callable[[dict[str, Any]], object] = lambda _record: None
        """Told the ``record`` before anything is started that stays if this process is killed."""
        self._names = list(names)
        self._hosts: list[Host] = []
        # Of calls given up; kept, so that late answers still have a receiver (see ``settle``).
        self._unanswered: list[Host] = []

    @property
    def names(self) -> list[str]:
        """Names of the hosts; those of some kinds are known only when the hosts run."""
        return list(self._names)

    @property
    @abstractmethod
    def addresses(self) -> list[str]:
        """Monarch's address of each host."""

    @abstractmethod
    def start(self) -> None:
        """Start the hosts, and wait until each answers.

        Raises:
            HostError: a host did not start; none is left running.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the hosts and all that runs on them. May be called twice."""

    def give_up(self) -> None:
        """Stop the hosts after an error, which another error must not hide."""
        try:
            self.stop()
        except HostError as error:
            self.left = True
            log.warning("%s", error)

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return a record for ``resume``, as JSON has it: for ``stop``, also before they run."""

    def leave(self) -> dict[str, Any]:
        """Disconnect from the hosts without stopping them; return their ``record``."""
        return self.record()

    @classmethod
    @abstractmethod
    def resume(cls, record: dict[str, Any], settings: Settings) -> Self:
        """Return hosts that another process left running, for ``attach`` or ``stop``."""

    @abstractmethod
    def check(self) -> None:
        """Check that a process listens at each host's address.

        Raises:
            HostError: no process does at one of them.
        """

    def ended(self) -> str | None:
        """Return why the scheduler ended the hosts; None if it did not, or if that is unknown."""
        return None

    def check_lease(self) -> None:
        """Check that the scheduler has not ended all hosts, where that is cheap to learn.

        Called every second while an answer of hosts is awaited.

        Raises:
            HostError: the scheduler has ended the hosts.
        """
        return

    @abstractmethod
    def attach(self) -> None:
        """Connect to running hosts.

        Raises:
            HostError: a host does not answer.
        """

    def reach(self) -> None:
        """Connect to running hosts of which some may not answer."""
        self._hosts = self._reached()

    def settle(self) -> None:
        """Receive the last messages of hosts that go on, before this process ends Monarch.

        A host that cannot deliver a report to this process ends itself (Monarch 0.7.0: "client
        received undeliverable message: crashing"), and hosts report late that actors which were
        stopped have gone. All that a host sent before an answer has arrived with that answer, so
        each host is called once more. Bounded; hosts that do not answer are passed over.
        """
        if self._hosts:
            answers(self._reached(), SETTLE)

    def _await_answers(self, timeout: float) -> list[Host]:
        """Call listening hosts until each has answered.

        A host that listens may not have its agent yet. Such an early call fails, or its message is
        lost, which Monarch does not always report, and the call never ends. The host is then called
        through a new mesh, because a mesh that has failed stays so.

        Args:
            timeout: seconds in which another host has to answer, until all have. Many hosts of one
                machine start one after the other.

        Raises:
            HostError: a host listens no more, or all calls to it fail.
            WaitError: a host does not answer.
        """
        deadline = time.monotonic() + timeout
        wait = FIRST_WAIT
        answered: dict[str, Host] = {}
        while True:
            self.check()
            hosts = self._reached(answered)
            addresses = dict(zip(self._names, self.addresses, strict=True))
            called = [addresses[host.name] for host in hosts]
            left = max(deadline - time.monotonic(), POLL_INTERVAL)
            with runtime.watching(functools.partial(runtime.check_agents, called)):
                failed = runtime.errors(answers(hosts, min(wait, left)))
            if new := {host.name: host for host in hosts if host.name not in failed}:
                answered |= new
                deadline = time.monotonic() + timeout
            self._unanswered += [host for host in hosts if host.name in failed]
            if not failed:
                return [answered[name] for name in self._names]
            silent = [name for name, error in failed.items() if isinstance(error, WaitError)]
            if time.monotonic() > deadline:
                runtime.raise_first(failed | dict.fromkeys(silent, runtime.silence(timeout)))
            if silent:
                log.debug("host: called again after %g s: %s", wait, fold(silent))
                wait *= 2
            time.sleep(POLL_INTERVAL)

    def _reached(self, answered: Collection[str] = ()) -> list[Host]:
        """Connect to running hosts, without those that have answered."""
        runtime.expect(len(self._names))
        pairs = zip(self._names, self.addresses, strict=True)
        return [Host(name, runtime.attach(at), at) for name, at in pairs if name not in answered]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()


class Roster:
    """The hosts that a client uses, by name, and what is known of them.

    Args:
        hosts: the first of them.

    Attributes:
        hosts: the hosts by name.
        dead: names of those that were found to have died.
        unreachable: names of those that accepted no connection when ``lost`` last looked at them:
            they are out of reach, or too busy, and may come back.
    """

    def __init__(self, hosts: Iterable[Host] = ()) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.dead: set[str] = set()
        self.unreachable: set[str] = set()

    def add(self, host: Host) -> None:
        """Add a host, which may replace one of the same name that died."""
        self.hosts[host.name] = host
        self.dead.discard(host.name)
        self.unreachable.discard(host.name)

    async def lost(self, names: Iterable[str]) -> dict[str, HostError]:
        """Look at hosts, and return errors of those that have died: no process listens there."""
        hosts = [self.hosts[name] for name in names if name in self.hosts]
        found = {
            host.name: error
            for host, error in zip(hosts, await asyncio.gather(*map(_look, hosts)), strict=True)
            if error is not None
        }
        dead = {name: error for name, error in found.items() if isinstance(error, HostError)}
        self.dead |= dead.keys()
        self.unreachable -= {host.name for host in hosts}
        self.unreachable |= found.keys() - dead.keys()
        return dead


async def _look(host: Host) -> HostError | WaitError | None:
    """Return why a host accepts no connection; None if it does, or if its address is unknown."""
    if not host.address:
        return None
    try:
        if host.address.startswith(LOCAL):
            path = host.address.removeprefix(LOCAL)
            connecting: Awaitable[Any] = asyncio.open_unix_connection(path)
        else:
            address = Address.parse(host.address)
            connecting = asyncio.open_connection(address.host, address.port)
        _, writer = await asyncio.wait_for(connecting, CONNECT_TIMEOUT)
        writer.close()
    except (TimeoutError, asyncio.TimeoutError):
        return runtime.silence(CONNECT_TIMEOUT)
    except OSError as error:
        # Of several addresses of one name, asyncio joins the texts of different errors.
        numbers = {error.errno} if error.errno else {*map(int, ERRNO.findall(str(error)))}
        if numbers and numbers <= {errno.ECONNREFUSED, errno.ENOENT}:
            reason = os.strerror(numbers.pop())
            return HostError(f"the host died: {host.address}: {reason}")
        return WaitError(f"{host.address}: {error}")
    return None


def answers(hosts: Sequence[Host], timeout: float) -> dict[str, Any]:
    """Call each host, and return answers by name as ``runtime.gather`` does."""
    return runtime.gather({host.name: host.mesh.initialized for host in hosts}, timeout)


def as_hosts(host_mesh: Any) -> list[Host]:
    """Return the hosts of a list of hosts, or of a Monarch ``HostMesh`` of any size.

    Hosts of a slice have the names that they have in the mesh from which it was cut.

    Raises:
        InputError: the argument is neither.
    """
    if isinstance(host_mesh, Hosts | Sequence):
        given: list[Any] = list(host_mesh)
        if all(isinstance(each, Host) for each in given):
            return given
    if not hasattr(host_mesh, "spawn_procs"):
        kind = type(host_mesh).__name__
        hint = "give a HostMesh, such as this_host(), or hosts of wheelmount.hosts"
        if kind == "ProcMesh":
            hint = "give the HostMesh that its processes were spawned on"
        raise InputError(f"a mount is made on hosts, and this is a {kind}", hint=hint)
    numbers = list(host_mesh.region.slice())
    if not host_mesh.sizes:
        return [Host(f"host{number}", host_mesh) for number in numbers]
    counts = [range(size) for size in host_mesh.sizes.values()]
    places = [dict(zip(host_mesh.sizes, place, strict=True)) for place in product(*counts)]
    return [
        Host(f"host{number}", host_mesh.slice(**place))
        for number, place in zip(numbers, places, strict=True)
    ]
