"""What actors are made of, of Monarch as ``gate`` loads it; nothing else imports it before."""

from __future__ import annotations

from wheelmount.hosts import gate

gate.load()

from monarch.actor import Actor, concurrent_endpoint  # noqa: E402 - see above
from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning  # noqa: E402

__all__ = ["Actor", "RDMABuffer", "RDMATcpFallbackWarning", "concurrent_endpoint"]
