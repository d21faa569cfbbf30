"""What actors are made of, from Monarch loaded by ``socketguard`` before anything imports it."""

from __future__ import annotations

from wheelmount.hosts import socketguard

socketguard.load()

from monarch.actor import Actor, ActorError, concurrent_endpoint  # noqa: E402 - see above
from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning  # noqa: E402

__all__ = [
    "Actor",
    "ActorError",
    "RDMABuffer",
    "RDMATcpFallbackWarning",
    "concurrent_endpoint",
]
