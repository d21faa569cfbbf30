"""Mounts that stand, made by a client that is gone: what another has to know to go on with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wheelmount.errors import MountError
from wheelmount.hosts import engine
from wheelmount.mount.layout import Layout

MESSAGE = 4 << 20
"""Bytes of a description that one call brings; Monarch's messages should stay below 16 MiB."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A mount that stands.

    Attributes:
        identity: of its tree.
        length: of the tree's description, for ``describe``, bytes.
        lost: numbers of the files that are not there because they changed at the source.
        missing: blocks that have not arrived.
        block_size: of its blocks, bytes.
        mntpoint: where it is.
    """

    identity: bytes
    length: int
    lost: list[int]
    missing: int
    block_size: int
    mntpoint: str


@dataclass(frozen=True, slots=True)
class Standing:
    """A mount on all its hosts.

    Attributes:
        layout: what they show.
        lost: see ``Adopted``; of all hosts together.
        missing: size in bytes of the blocks in which bytes of the whole tree have yet to arrive on
            some hosts; 0 if none have.
        points: where it is, by host.
    """

    layout: Layout
    lost: set[int]
    missing: int
    points: dict[str, str]


def find(agents: Mapping[str, Any], timeout: float) -> Standing:
    """Have agents take charge of a mount.

    Args:
        agents: of its hosts, by name.
        timeout: seconds for each answer.

    Raises:
        MountError: there is none on a host.
        HostError, WaitError: a host is lost.
    """
    calls = {name: agent.adopt.call_one() for name, agent in agents.items()}
    found: dict[str, Adopted] = engine.raise_first(engine.gather(calls, timeout))
    if len({each.identity for each in found.values()}) > 1:
        raise MountError(
            "its hosts do not all show the same", hint="unmount it, and mount it again"
        )
    name, first = next(iter(found.items()))
    description = bytearray()
    while len(description) < first.length:
        call = agents[name].describe.call_one(len(description), MESSAGE)
        description += engine.one(call, timeout)
    return Standing(
        Layout.decode(bytes(description)),
        {number for each in found.values() for number in each.lost},
        max(each.block_size if each.missing else 0 for each in found.values()),
        {name: each.mntpoint for name, each in found.items()},
    )
