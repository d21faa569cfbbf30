"""The client's side of a delivery: offers the source to hosts, and collects each host's result."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any

from wheelmount.config import Settings
from wheelmount.errors import HostError, StoreError, TransferError, WaitError, WheelmountError
from wheelmount.hosts import runtime
from wheelmount.mount.client.agents import Agents
from wheelmount.mount.client.reads import Record
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.source import Source
from wheelmount.mount.transfer.laggards import Laggards, Silence
from wheelmount.mount.transfer.ring import STUCK_AFTER, Ring
from wheelmount.mount.transfer.stream import block_server
from wheelmount.mount.transfer.topology import NO_RACKS, SMALL, Route, routes
from wheelmount.progress import Progress, Task, number_of

log = logging.getLogger("wheelmount")

ASKED = 8
"""Number of hosts that tell what was read. Others mostly read the same, and thousands of answers
would take long."""

AVOIDED_AFTER, STUCK_WHEN_SILENT = 2, 10
"""Number of time-outs of a fetch without a sign of a host after which no other host waits for it,
and after which the delivery to it has failed. Time in which the client itself reads a block does
not count. A healthy host gives a sign sooner, whatever it waits for: bytes arrive, or words of the
host above that it waits itself, or a stuck host above is avoided; what does not arrive is fetched
again after one time-out; and of work on many files hosts tell the client as long as it goes on."""


class Delivery:
    """One layout offered to hosts, until ``end``.

    Args:
        root: the source directory.
        layout: its snapshot, divided into the blocks that are to be sent.
        settings: the mount's settings.
        progress: receives the number of bytes that have arrived.
        before: the layout that hosts have already; they are sent only the differences to it.
        read_before: see ``Source``.
        racks: the rack of each host, by host name.
        record: what programs read first of the directory.

    Attributes:
        origin: reference with which hosts fetch from this process.
        ended: whether ``end`` was called.
    """

    def __init__(
        self,
        root: bytes,
        layout: Layout,
        settings: Settings,
        progress: Progress,
        before: Layout | None = None,
        *,
        read_before: bool = False,
        racks: Mapping[str, str] = NO_RACKS,
        record: Record | None = None,
    ) -> None:
        from wheelmount.mount.transfer.rdma import offer

        self.layout = layout
        self._racks = racks
        self._record = record
        self._first = record.blocks(layout) if record is not None else ()
        self.ended = False
        self._source = Source(root, layout, read_before=read_before)
        # Whether more hosts than the first of each tree fetch from this process.
        self._many_readers = layout.size <= SMALL
        self._ring = Ring(
            self._source,
            slots=settings.ring,
            lease=settings.fetch_timeout,
            readers=lambda _: 0 if self._many_readers else 1,
        )
        self._settings = settings
        self._progress = progress
        self._task: Task | None = None
        self._threads: list[threading.Thread] = []
        self._receivers: list[set[str]] = []  # names of hosts, for each call of ``begin``
        self._outcome: dict[str, Any] = {}
        self._error: BaseException | None = None  # of the delivery itself
        self._bytes = Counter[str]()  # that have arrived, by host
        self._last_arrival: dict[str, float] = {}  # when ``arrived`` was called last, by host
        # Names of hosts that others avoid, as they are out of reach or silent, and may come back.
        self._skipped: set[str] = set()
        # Names of hosts that were silent for so long that this delivery to them has failed.
        self._stuck: set[str] = set()
        self._laggards = Laggards(layout.block_size)
        self._looked = 0.0  # when slow hosts were last looked for
        self._block_server = block_server(self._ring, settings.fetch_timeout)
        ticket = None if self._block_server is None else self._block_server.ticket
        try:
            with runtime.quiet():  # Monarch prints that it found no GPU library
                self.origin = offer(
                    self._ring,
                    ticket,
                    settings.fetch_timeout,
                    layout.encode(before),
                    self.arrived,
                    settings.start_timeout,
                )
        except BaseException:
            if self._block_server is not None:
                self._block_server.close()
            raise

    @property
    def sent(self) -> int:
        """Bytes of files that left this process for hosts."""
        return self._ring.sent

    @property
    def changed(self) -> set[int]:
        """Numbers of files that were found to differ from the snapshot."""
        return self._source.changed

    def routes(self, agents: Mapping[str, Any], later: Collection[str] = ()) -> dict[str, Route]:
        """Return, for each host, the hosts that it fetches blocks from.

        Only hosts in ``later`` fetch from hosts in ``later``.
        """
        fanout = self._settings.fanout
        return routes(agents, self.layout.size, fanout, later, self._racks, self._first)

    def arrived(self, host: str, length: int) -> None:
        """Report that ``length`` more bytes have arrived on a host; 0 if it is at work without."""
        self._bytes[host] += length
        self._last_arrival[host] = time.monotonic()
        if self._task is not None:
            self._task.advance(length)

    def fetch(self, calls: Mapping[str, Any], agents: Agents) -> dict[str, Any]:
        """Wait until hosts have received all blocks.

        Args:
            calls: pending calls by host name, answered when the host has all blocks.
            agents: all agents of the mount by host name; they are told of lost hosts.

        Returns:
            Results and errors by host, as ``runtime.gather`` returns them. A host of which nothing
            was heard for long ends with a ``WaitError``.
        """
        # Each wait for a block has a limit; their sum is a limit for the whole delivery.
        bound = self._settings.fetch_timeout * (self.layout.blocks + STUCK_AFTER)
        bound += self._settings.start_timeout
        with self._progress.task("send", unit="B") as task:
            task.total(self.layout.size * len(calls))
            self._task = task
            pending = set(calls)
            self._stuck.difference_update(calls)
            silence = Silence(calls, time.monotonic())

            def ended(name: str, result: Any) -> None:
                pending.discard(name)
                self._mark_lost(name, result, agents)

            async def lost(names: Iterable[str]) -> dict[str, WheelmountError]:
                names = set(names)
                found = await agents.lost(names)
                self._skip_unreachable(agents)
                return {**self._find_stuck(silence, names, agents), **found}

            with runtime.watching(lambda: self._skip_slow(calls, pending, agents)):
                outcome = runtime.gather(calls, bound, ended, lost)
            if not any(isinstance(end, WheelmountError) for end in outcome.values()):
                task.note(f"{self.layout.size / 1e6:.1f} MB to {number_of(len(calls), 'host')}")
        return outcome

    def _mark_lost(self, name: str, result: Any, agents: Mapping[str, Any]) -> None:
        """Tell the other hosts if the result is an error that means that the host is lost."""
        if isinstance(result, HostError):
            log.warning("%s is lost: %s", name, result.message)
            self._route_around(name, agents)

    def _route_around(self, name: str, agents: Mapping[str, Any]) -> None:
        """Have all other hosts fetch nothing more from a host."""
        self._many_readers = True  # the hosts below that one
        for other, agent in agents.items():
            if other != name:
                with contextlib.suppress(Exception):
                    agent.avoid.broadcast(name)

    def _skip_unreachable(self, agents: Agents) -> None:
        """Tell the other hosts which hosts seem to be lost, long before that is certain.

        Such a host accepts no connection, and no byte has arrived on it meanwhile.
        """
        since = time.monotonic() - runtime.LOST_INTERVAL
        for name in agents.unreachable - self._skipped:
            if self._last_arrival.get(name, 0.0) < since:
                log.info("%s is out of reach: no other host waits for it", name)
                self._skipped.add(name)
                self._route_around(name, agents)

    def _find_stuck(
        self, silence: Silence, names: Set[str], agents: Mapping[str, Any]
    ) -> dict[str, WheelmountError]:
        """Return errors of those of the named hosts that have been silent for too long.

        The one that has been silent for longest is avoided by the others long before: hosts that
        wait for it are silent too.
        """
        most = 2 * (runtime.LOST_INTERVAL + runtime.LOST_COST * len(names))
        now = time.monotonic()
        found = silence.look(self._last_arrival, now, most, reading=self._ring.filling)
        timeout = self._settings.fetch_timeout
        if waited_for := names - self._skipped:
            name = max(sorted(waited_for), key=found.__getitem__)
            if found[name] > AVOIDED_AFTER * timeout:
                log.info("%s is silent: no other host waits for it", name)
                self._skipped.add(name)
                self._route_around(name, agents)
        stuck = {name for name in names if found[name] > STUCK_WHEN_SILENT * timeout}
        self._stuck |= stuck
        return {
            name: WaitError(
                f"nothing was heard of it for {found[name]:.0f} s",
                hint="a disk or network file system of that host may hang: see dmesg there",
            )
            for name in stuck
        }

    def _skip_slow(
        self, names: Iterable[str], pending: Set[str], agents: Mapping[str, Any]
    ) -> None:
        """Tell the other hosts which of the named hosts are slow, ``pending`` of them incomplete.

        Called for each pending call.
        """
        now = time.monotonic()
        if now < self._looked + runtime.POLL_INTERVAL / 2:
            return
        self._looked = now
        arrived = {name: self._bytes[name] for name in names}
        incomplete = frozenset(pending)  # which changes in the thread of the delivery
        for name in self._laggards.find(arrived, incomplete, now):
            log.info("%s is slow: no other host waits for it", name)
            self._route_around(name, agents)

    def begin(self, names: Iterable[str], agents: Agents) -> None:
        """Start to deliver to hosts, without waiting; ``wait`` waits for the end.

        Args:
            names: names of the hosts.
            agents: all agents of the mount by host name.
        """
        receivers = set(names)
        self._receivers.append(receivers)
        words = receivers, agents, runtime.checks()
        thread = threading.Thread(target=self._deliver, args=words, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _deliver(self, names: Set[str], agents: Agents, checks: runtime.Checks) -> None:
        try:
            with runtime.watched(checks):
                self.deliver(names, agents)
        except BaseException as error:  # ``wait`` raises it
            log.exception("a delivery fails")
            self._error = error

    def repair(self, agents: Agents) -> dict[str, WheelmountError]:
        """Have hosts fetch missing blocks again, and return the errors as ``failures`` does."""
        kinds = TransferError, StoreError, WaitError
        with contextlib.suppress(Exception):
            self.failures()
        names = {name for receivers in self._receivers for name in receivers}
        names -= {n for n, end in self._outcome.items() if not isinstance(end, kinds)}
        if names and not self.ended:
            self._error = None
            self.begin(names, agents)
        return self.failures()

    def deliver(self, names: Set[str], agents: Agents) -> None:
        """Have hosts fetch all blocks; record the results of those still in ``names`` then."""
        ordered = sorted(names)
        asked = {*ordered[:: -(-len(ordered) // ASKED)], *ordered[-1:]}
        calls = {name: agents[name].deliver.call_one(name in asked) for name in ordered}
        found = self.fetch(calls, agents)
        self.note(found)
        self._outcome |= {name: end for name, end in found.items() if name in names}

    def note(self, answers: Mapping[str, Any]) -> None:
        """Keep what was read on hosts, by their answers, for the next delivery."""
        if self._record is not None:
            self._record.add(self.layout.tree, answers.values())

    def advance(
        self, agents: Agents, find_lost: Callable[[Iterable[str]], Set[str]]
    ) -> dict[str, WheelmountError]:
        """Have all hosts fetch this layout as a new generation, then show it; end the delivery.

        Hosts that are lost, or of which nothing is heard for long, keep no others from it.

        Args:
            agents: agents of the hosts.
            find_lost: returns those of the named hosts that are lost; the others go on without
                them.

        Returns:
            Errors, by host name, of hosts that do not show the new generation while others do.

        Raises:
            TransferError: a file was edited meanwhile; all hosts show the old generation.
            WheelmountError: a host that answers could not fetch all, and none changes over; or none
                could change over.
        """
        routing = self.routes(agents)
        try:
            origin, identity = self.origin, self.layout.identity
            calls = {n: a.prepare.call_one(origin, routing[n]) for n, a in agents.items()}
            try:
                failed = runtime.errors(self.fetch(calls, agents))
                stuck = self._stuck & failed.keys()
                left = find_lost(failed) | stuck
                if len(left) < len(failed) or len(left) == len(calls):
                    runtime.raise_first(failed)
                if edited := self._source.edited():
                    raise TransferError(
                        f"{os.fsdecode(edited[0])} changed while it was copied",
                        hint="refresh again",
                    )
            except BaseException:
                agents.call(lambda agent: agent.abandon.call_one(identity))
                raise
            ready = calls.keys() - left
            answers = agents.call(lambda agent: agent.advance.call_one(identity), ready)
            behind = runtime.errors(answers)
            if unused := behind.keys() | stuck:  # what these fetched would take their memory
                agents.call(lambda agent: agent.abandon.call_one(identity), unused)
            if len(behind) == len(ready):
                runtime.raise_first(behind)
            return failed | behind
        finally:
            self.end()

    def forget(self, name: str) -> None:
        """Forget the result of a host that is no longer part of the mount."""
        for receivers in self._receivers:
            receivers.discard(name)
        self._outcome.pop(name, None)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all hosts have all blocks; raises the errors of ``RemoteMount.wait``."""
        runtime.raise_first(self.failures(timeout))

    def failures(self, timeout: float | None = None) -> dict[str, WheelmountError]:
        """Wait for the hosts' results; return the errors, by host, of those that lack blocks.

        Args:
            timeout: seconds; default: no limit as long as blocks keep arriving.

        Raises:
            WaitError: the time-out ran out.
            BaseException: the delivery itself failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise WaitError(f"not all bytes arrived within {timeout:g} s")
        if self._error is not None:
            raise self._error
        return runtime.errors(self._outcome)

    def end(self) -> None:
        """Stop offering the layout, and free its memory."""
        from wheelmount.mount.transfer.rdma import withdraw

        if not self.ended:
            self.ended = True
            withdraw(self.origin)
            if self._block_server is not None:
                self._block_server.close()
            self._ring.close()
        for thread in self._threads:
            thread.join(self._settings.start_timeout)
