"""Blocks over sockets, as both ends know it: in which words.

Where there is no RDMA device, Monarch's ``RDMABuffer`` travels in its messages, at a third of the
speed of a socket (``benchmarks.rdma``). So there blocks are asked for and come over connections of
their own (``Inlet``, ``Outlet``; see ``hosts.sockets``); where they are to be had, and by which
secret, is told through Monarch.
"""

from __future__ import annotations

import struct

from wheelmount.hosts.address import SECURE
from wheelmount.hosts.sockets import Where
from wheelmount.mount.traffic import LOCAL, TCP, TLS

REQUEST = struct.Struct("<16sI??")
"""What is asked for: secret, block, whether to compress it, whether a reader waits for it."""

REPLY = struct.Struct("<BI")
"""What follows (``REFUSED``, ``GIVEN``, ``WAIT``), and bytes of its head (msgpack)."""

REFUSED, GIVEN, WAIT = 0, 1, 2
"""A message and a hint; seconds that the other end waited for the block, and the fields of a
``Staged``, before that many bytes of it; nothing yet: the other end itself waits for the block, and
another reply will follow."""

PULSE = 0.25
"""Part of a time-out after which the other end hears ``WAIT``, and again."""

PATIENCE = 40
"""Time-outs that ``WAIT`` is said for; then whatever the block is waited for counts as stuck."""


def way(where: Where) -> str:
    """How bytes come from a place, as ``Traffic`` counts them."""
    if isinstance(where, str):
        return LOCAL
    return TLS if where.scheme == SECURE else TCP
