"""What actors are made of, from Monarch loaded by ``socketguard`` before anything imports it."""

from __future__ import annotations

from collections.abc import Iterable

from wheelmount.hosts import socketguard

socketguard.load()

from monarch.actor import Actor as MonarchActor  # noqa: E402 - see above
from monarch.actor import ActorError, concurrent_endpoint  # noqa: E402
from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning  # noqa: E402


class _Listed(type(MonarchActor)):  # type: ignore[misc]
    """Classes that list their attributes once.

    Monarch lists them for each endpoint of each reference to an actor that it makes (0.7.0), which
    is a third of the milliseconds that this takes.
    """

    _names: Iterable[str]

    def __dir__(cls) -> Iterable[str]:
        if "_names" not in vars(cls):
            cls._names = super().__dir__()
        return cls._names


class Actor(MonarchActor, metaclass=_Listed):  # type: ignore[misc]
    """What wheelmount's actors are derived from."""


__all__ = [
    "Actor",
    "ActorError",
    "RDMABuffer",
    "RDMATcpFallbackWarning",
    "concurrent_endpoint",
]
