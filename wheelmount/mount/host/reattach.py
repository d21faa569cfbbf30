"""Reattach to existing mounts whose client is gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wheelmount.errors import MountError
from wheelmount.hosts import runtime
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.tree import ROOT, Tree

MESSAGE = 4 << 20
"""Bytes of a description in one call; Monarch's messages should stay below 16 MiB."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """An existing mount on one host.

    Attributes:
        identity: of its tree.
        length: of the tree's description, for ``describe``, bytes.
        lost: numbers of the files that are missing because they changed at the source.
        finished: whether all bytes have arrived, and all names and attributes are set.
        block_size: of its blocks, bytes.
        mntpoint: its mount point.
    """

    identity: bytes
    length: int
    lost: list[int]
    finished: bool
    block_size: int
    mntpoint: str


@dataclass(frozen=True, slots=True)
class Apart:
    """Hosts that show another tree than the others: a refresh left them out, or reached only them.

    Attributes:
        hosts: their names.
        layout: the tree that they show.
        lost: as in ``Adopted``, for all of them together.
    """

    hosts: frozenset[str]
    layout: Layout
    lost: frozenset[int]

    def other(self, tree: Tree) -> set[int]:
        """Return numbers of another tree that stand for other files or directories here.

        They may have been used here for another file. Numbers that were never used here are
        not among them.
        """
        mine, places, theirs = self.layout.tree, self.layout.tree.parents(), tree.parents()

        def same(number: int) -> bool:
            if number not in mine.inodes or number in self.lost:
                return False
            if number in theirs:
                return theirs[number] == places.get(number)
            inode, stamp = tree.inodes[number], tree.stamps[number]
            return (inode, stamp) == (mine.inodes[number], mine.stamps[number])

        used = (number for number in tree.inodes if number < mine.limit and number != ROOT)
        return {number for number in used if not same(number)}


@dataclass(frozen=True, slots=True)
class Standing:
    """An existing mount on all its hosts.

    Attributes:
        layout: the tree that they show, except for hosts of ``apart``.
        lost: as in ``Adopted``, for all these hosts together.
        missing: bytes of the blocks of a delivery that some hosts did not finish; 0 if all did.
        points: mount points by host.
        apart: hosts that show another tree.
    """

    layout: Layout
    lost: set[int]
    missing: int
    points: dict[str, str]
    apart: list[Apart]


def ask(agents: Mapping[str, Any], timeout: float) -> dict[str, Adopted]:
    """Have agents take over an existing mount, and return its state by host, without its tree.

    Args:
        agents: the agents of its hosts, by name.
        timeout: seconds for each answer.

    Raises:
        MountError: a host has no such mount.
        HostError, WaitError: a host is lost.
    """
    calls = {name: agent.adopt.call_one() for name, agent in agents.items()}
    return runtime.raise_first(runtime.gather(calls, timeout))


def is_whole(found: Iterable[Adopted]) -> bool:
    """Return whether all hosts show one tree, with all bytes of all its files."""
    found = list(found)
    same = len({each.identity for each in found}) == 1
    return same and all(each.finished and not each.lost for each in found)


def find(agents: Mapping[str, Any], timeout: float, known: Layout | None = None) -> Standing:
    """Have agents take over an existing mount, and return its state.

    Args:
        agents: the agents of its hosts, by name.
        timeout: seconds for each answer.
        known: a layout that is not fetched again if hosts show it.

    Raises:
        MountError: a host has no such mount, or not all of its tree's description; or hosts show
            different trees and one is incomplete.
        HostError, WaitError: a host is lost.
    """
    found = ask(agents, timeout)
    groups: dict[bytes, list[str]] = {}
    for name, each in found.items():
        groups.setdefault(each.identity, []).append(name)
    lacking = [name for name, each in found.items() if not each.finished]
    if len(groups) > 1 and lacking:
        raise MountError(
            f"its hosts do not all show the same, and {', '.join(lacking)} did not get everything",
            hint="refresh these first, by their mount points",
        )
    shown = [
        Apart(
            frozenset(names),
            known
            if known is not None and known.identity == identity
            else _layout(names[0], agents[names[0]], found[names[0]].length, timeout),
            frozenset(number for name in names for number in found[name].lost),
        )
        for identity, names in groups.items()
    ]
    newest = max(shown, key=lambda each: each.layout.tree.limit)
    # What is made from it has numbers that were never used on any host.
    return Standing(
        newest.layout,
        set(newest.lost),
        max(0 if each.finished else each.block_size for each in found.values()),
        {name: each.mntpoint for name, each in found.items()},
        [each for each in shown if each is not newest],
    )


def _layout(host: str, agent: Any, length: int, timeout: float) -> Layout:
    """Return the layout that a host shows."""
    description = bytearray()
    while len(description) < length:
        piece = runtime.one(agent.describe.call_one(len(description), MESSAGE), timeout)
        if not piece:
            raise MountError(
                f"{host}: the description of its tree ends after {len(description)} of {length} "
                "bytes",
                hint="unmount, and mount again",
            )
        description += piece
    return Layout.decode(bytes(description))
