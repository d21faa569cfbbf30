"""What actors are made of, from Monarch loaded by ``socketguard`` before anything imports it."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from wheelmount import disk
from wheelmount.hosts import deferred, socketguard

socketguard.load()

from monarch.actor import Actor as MonarchActor  # noqa: E402 - see above
from monarch.actor import ActorError  # noqa: E402
from monarch.actor import concurrent_endpoint as monarch_endpoint  # noqa: E402
from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning  # noqa: E402

deferred.end()


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


def concurrent_endpoint(method: Callable[..., Awaitable[Any]]) -> Any:
    """Make a method one that other processes call, at the same time as others.

    Which file system is full or read-only can only be found here, on the host.
    """

    @functools.wraps(method)
    async def call(*arguments: Any, **named: Any) -> Any:
        with disk.explained():
            return await method(*arguments, **named)

    return monarch_endpoint(call)


__all__ = [
    "Actor",
    "ActorError",
    "RDMABuffer",
    "RDMATcpFallbackWarning",
    "concurrent_endpoint",
]
