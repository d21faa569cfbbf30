"""A host as the rest of the package sees it, of any kind."""

from __future__ import annotations

import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from wheelmount.errors import InputError, WaitError
from wheelmount.hosts import runtime
from wheelmount.hosts.names import fold

if TYPE_CHECKING:
    from typing_extensions import Self

    from wheelmount.config import Settings

log = logging.getLogger("wheelmount")

GLANCE = 0.1
"""Seconds between attempts to reach hosts that come up."""

FIRST_WAIT = 4.0
"""Seconds without an answer after which a host that listens is called again; then twice as many.
Answers take milliseconds, and seconds where processors are far too few."""

SETTLE = 3.0
"""Seconds that hosts may take for their last answers."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Attributes:
        name: how it is called in output and in ``{host}`` of paths (``host0``).
        mesh: Monarch's mesh of exactly this host. One mesh a host and not one for all: a mesh
            with a dead member does not recover, and its other members would be lost with it.
    """

    name: str
    mesh: Any


class Hosts(ABC):
    """Hosts of one kind: started together, stopped together. A context manager."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = list(names)
        self._hosts: list[Host] = []
        # Of calls given up; kept, so that late answers still have a receiver (see ``settle``).
        self._unanswered: list[Host] = []

    @property
    def names(self) -> list[str]:
        """What each is called, as far as that is known: of some kinds only once they run."""
        return list(self._names)

    @property
    @abstractmethod
    def addresses(self) -> list[str]:
        """Where Monarch reaches each."""

    @abstractmethod
    def start(self) -> None:
        """Start them, and wait until each answers.

        Raises:
            HostError: one did not come up; none is left running.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop them and all that runs on them. May be called twice."""

    @abstractmethod
    def leave(self) -> dict[str, Any]:
        """Let go of them without stopping them.

        Returns:
            What ``resume`` needs, fit for JSON.
        """

    @classmethod
    @abstractmethod
    def resume(cls, record: dict[str, Any], settings: Settings) -> Self:
        """Hosts that another process left, for ``attach`` or ``stop``."""

    @abstractmethod
    def check(self) -> None:
        """Check that each host's address still has a listener.

        Raises:
            HostError: nothing does.
        """

    def ended(self) -> str | None:
        """Return why the scheduler took the hosts back; None if it did not, or if unknown."""
        return None

    def check_lease(self) -> None:
        """See that whoever lent the hosts has not taken them all back, as far as that is cheap.

        Called every second in which an answer of hosts is waited for.

        Raises:
            HostError: the hosts were taken back.
        """
        return

    @abstractmethod
    def attach(self) -> None:
        """Reach hosts that run.

        Raises:
            HostError: one does not answer.
        """

    def settle(self) -> None:
        """Hear what hosts that go on have still to say to this process, before it ends Monarch.

        Whoever stops actors has Monarch tell others of it that may be gone as well, and their
        hosts then report that nobody is there. A host that cannot deliver such a report ends
        itself (Monarch 0.7.0: "client received undeliverable message: crashing"). What was said
        on a connection before an answer has arrived with that answer. Bounded, and silent about
        hosts that do not answer.
        """
        if self._hosts:
            answers(self._reached(), SETTLE)

    def _await_answers(self, timeout: float) -> list[Host]:
        """Reach hosts that listen, until each has answered.

        A host that listens may not have its own agent yet. A call that comes so early fails, or its
        message is lost, which Monarch does not always report, and the call never ends. Then the
        host is reached anew, by another mesh: one that has failed stays so.

        Args:
            timeout: seconds for an answer, and those in which calls may fail.

        Raises:
            HostError: one does not listen any more, or fails all calls.
            WaitError: one does not answer.
        """
        deadline = time.monotonic() + timeout
        wait = FIRST_WAIT
        answered: dict[str, Host] = {}
        while True:
            self.check()
            hosts = self._reached(answered)
            addresses = dict(zip(self._names, self.addresses, strict=True))
            called = [addresses[host.name] for host in hosts]
            left = max(deadline - time.monotonic(), GLANCE)
            with runtime.watching(functools.partial(runtime.check_agents, called)):
                failed = runtime.errors(answers(hosts, min(wait, left)))
            answered |= {host.name: host for host in hosts if host.name not in failed}
            self._unanswered += [host for host in hosts if host.name in failed]
            if not failed:
                return [answered[name] for name in self._names]
            silent = [name for name, error in failed.items() if isinstance(error, WaitError)]
            if time.monotonic() > deadline:
                runtime.raise_first(failed | dict.fromkeys(silent, runtime.silence(timeout)))
            if silent:
                log.debug("host: called again after %g s: %s", wait, fold(silent))
                wait *= 2
            time.sleep(GLANCE)

    def _reached(self, answered: Collection[str] = ()) -> list[Host]:
        """Hosts that run, by their addresses, without those that have answered."""
        pairs = zip(self._names, self.addresses, strict=True)
        return [Host(name, runtime.attach(at)) for name, at in pairs if name not in answered]

    @abstractmethod
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()


def answers(hosts: Sequence[Host], timeout: float) -> dict[str, Any]:
    """Call each host, and return answers by name as ``runtime.gather`` does."""
    return runtime.gather({host.name: host.mesh.initialized for host in hosts}, timeout)


def as_hosts(host_mesh: Any) -> list[Host]:
    """Take apart what a caller may give for hosts: ours, or a Monarch ``HostMesh`` of any size.

    Hosts of a slice are called what they are in the mesh that it was cut from.

    Raises:
        InputError: it is neither.
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
