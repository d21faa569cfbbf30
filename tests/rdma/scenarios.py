"""What only RDMA can do to a delivery: each case by its name, on the machine of the client.

In processes of their own, as the device is there for programs that are started with it only.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tests.rdma.guest import (
    HOST,
    ORIGINAL,
    SECOND,
    SOURCE,
    STATE,
    make,
    on_host,
    tell,
)
from wheelmount import Cluster, config
from wheelmount.errors import WheelmountError
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.mount.serve.traffic import describe

REFRESHES = 100
DEAD_BOUND = 200.0
"""Seconds after which the client must have said that a host was killed, and the host that took
blocks from it have all bytes. Monarch has 120 s to notice it here (``guest.FOR_VERBS``)."""

CASES: dict[str, Callable[[], None]] = {}


def case(test: Callable[[], None]) -> Callable[[], None]:
    CASES[test.__name__] = test
    return test


def cluster(*hosts: str, **settings: object) -> Cluster:
    names = ",".join([hosts[0], *(host.removeprefix("tls://") for host in hosts[1:])])
    return Cluster(names, settings=replace(config.load(), **settings))  # type: ignore[arg-type]


def ways(mount: RemoteMount) -> dict[str, str]:
    """Tell by which way each host got its bytes, as ``wheelmount status`` says it."""
    found = {name: describe(its["delivery"]) for name, its in mount.status().items()}
    for name, way in found.items():
        tell(f"{name}: by {way}")
    return found


def same(hosts: Cluster) -> None:
    results = hosts.run(["diff", "-r", ".", str(ORIGINAL)], mount=SOURCE)
    results.raise_for_status()
    tell("no difference on", ", ".join(results))


def registered() -> Counter[str]:
    """Registrations of memory by now that did not end, by machine."""
    count: Counter[str] = Counter()
    for log in STATE.glob("verbs.*"):
        for line in log.read_text().splitlines():
            what = line.split()[1]
            count[log.suffix[1:]] += {"register": 1, "unregister": -1}.get(what, 0)
    return count


@case
def registrations() -> None:
    """Memory is registered once, however often a directory is refreshed."""
    make(ORIGINAL, 2)
    counts = []
    with cluster(HOST, transport="rdma") as hosts:
        mount = hosts.mount(SOURCE)
        mount.wait()
        for number in range(REFRESHES):
            (ORIGINAL / "new").write_bytes(os.urandom(300_000) + bytes([number]))
            mount.refresh()
            counts.append(registered())
        same(hosts)
        ways(mount)
    tell(f"registered after 1, 10, {REFRESHES} refreshes:", counts[0], counts[9], counts[-1])
    assert all(counts[-1][name] <= counts[9][name] for name in counts[-1])


@case
def large() -> None:
    """Blocks may be larger than what Monarch reads at once, 4 MiB."""
    make(ORIGINAL, 33)
    with cluster(HOST, transport="rdma", block_size=16 << 20) as hosts:
        mount = hosts.mount(SOURCE)
        mount.wait()
        same(hosts)
        assert set(ways(mount).values()) == {"rdma"}


@case
def path() -> None:
    """Packets of RDMA are dropped, and later come again; the network is there all the time."""
    make(ORIGINAL, 4)
    with cluster(HOST, transport="auto", fetch_timeout=60) as hosts:
        on_host("drop")
        began = time.monotonic()
        mount = hosts.mount(SOURCE)
        mount.wait()
        took = time.monotonic() - began
        tell(f"without a path it took {took:.0f} s")
        same(hosts)
        (said,) = ways(mount).values()
        assert "tls" in said and "no rdma from client: it failed" in said
        on_host("pass")
        (ORIGINAL / "new").write_bytes(os.urandom(4 << 20))
        mount.refresh()
        same(hosts)
        (said,) = ways(mount).values()
        assert "rdma" in said.partition(" (")[0]


@case
def dead() -> None:
    """The host that gives blocks to another is killed."""
    make(ORIGINAL, 12)
    with cluster(HOST, SECOND, transport="rdma", fanout=1, fetch_timeout=20) as hosts:
        mount = hosts.mount(SOURCE)
        on_host("kill")
        began = time.monotonic()
        try:
            mount.wait()
        except WheelmountError as error:
            tell(f"the client says: {error}")
        took = time.monotonic() - began
        tell(f"{took:.0f} s after a host was killed the client said so; the other has all bytes")
        assert took < DEAD_BOUND
        try:
            mount.refresh()
        except WheelmountError as error:
            tell(f"a refresh says: {error}")
        same(hosts.on("10.9.0.1"))
        ways(mount)


if __name__ == "__main__":
    CASES[sys.argv[1]]()
