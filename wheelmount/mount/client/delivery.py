"""The client's side of a delivery: offers the source to hosts, and collects each host's result."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any

from wheelmount.config import Settings
from wheelmount.errors import HostError, StoreError, TransferError, WaitError, WheelmountError
from wheelmount.hosts import runtime
from wheelmount.mount.client.agents import Agents
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.source import Source
from wheelmount.mount.transfer.ring import STUCK_AFTER, Ring
from wheelmount.mount.transfer.stream import block_server
from wheelmount.mount.transfer.topology import NO_RACKS, SMALL, Route, routes
from wheelmount.progress import Progress, Task

log = logging.getLogger("wheelmount")


class Delivery:
    """Offers one layout to hosts, until ``end``.

    Args:
        root: the source directory.
        layout: its snapshot, divided into the blocks that are to be sent.
        settings: the mount's settings.
        progress: where bytes that arrive are reported.
        before: the layout that hosts have already, so that only differences are described.
        read_before: see ``Source``.
        racks: racks of hosts, by name.

    Attributes:
        origin: where hosts fetch from.
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
    ) -> None:
        from wheelmount.mount.transfer.rdma import offer

        self.layout = layout
        self._racks = racks
        self.ended = False
        self._source = Source(root, layout, read_before=read_before)
        self._asked_by_more = layout.size <= SMALL  # than the first host of each tree
        self._ring = Ring(
            self._source,
            slots=settings.ring,
            lease=settings.fetch_timeout,
            readers=lambda _: 0 if self._asked_by_more else 1,
        )
        self._settings = settings
        self._progress = progress
        self._task: Task | None = None
        self._threads: list[threading.Thread] = []
        self._wanted: list[set[str]] = []
        self._outcome: dict[str, Any] = {}
        self._fault: BaseException | None = None
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
        """Numbers of files that differ from the snapshot by now."""
        return self._source.changed

    def routes(self, agents: Mapping[str, Any], later: Collection[str] = ()) -> dict[str, Route]:
        """Return which hosts each host asks for blocks; hosts in ``later`` are below all others."""
        return routes(agents, self.layout.size, self._settings.fanout, later, self._racks)

    def arrived(self, _host: str, length: int) -> None:
        """Report that ``length`` more bytes have arrived on a host."""
        if self._task is not None:
            self._task.advance(length)

    def fetch(self, calls: Mapping[str, Any], agents: Mapping[str, Any]) -> dict[str, Any]:
        """Wait until hosts have everything.

        Args:
            calls: pending calls by host name, answered when the host has everything.
            agents: all agents of the mount by host name; they are told of lost hosts.

        Returns:
            Results and errors by host, as ``runtime.gather`` returns them.
        """
        # Every wait for a block is bounded; so is the whole by the sum.
        bound = self._settings.fetch_timeout * (self.layout.blocks + STUCK_AFTER)
        bound += self._settings.start_timeout
        with self._progress.task("send", unit="B") as task:
            task.total(self.layout.size * len(calls))
            self._task = task
            outcome = runtime.gather(
                calls, bound, lambda name, error: self._mark_lost(name, error, agents)
            )
            if not any(isinstance(end, WheelmountError) for end in outcome.values()):
                task.note(f"{self.layout.size / 1e6:.1f} MB to {len(calls)} hosts")
        return outcome

    def _mark_lost(self, name: str, error: WheelmountError, agents: Mapping[str, Any]) -> None:
        """If the host is lost, tell the other hosts."""
        if isinstance(error, HostError):
            log.warning("%s is lost: %s", name, error.message)
            self._asked_by_more = True  # those below it
            for other, agent in agents.items():
                if other != name:
                    with contextlib.suppress(Exception):
                        agent.mark_dead.broadcast(name)

    def begin(self, names: Iterable[str], agents: Mapping[str, Any]) -> None:
        """Start fetching on hosts and return; ``wait`` waits for the end.

        Args:
            names: of the hosts.
            agents: all agents of the mount by host name.
        """
        wanted = set(names)
        self._wanted.append(wanted)
        thread = threading.Thread(target=self._deliver, args=(wanted, agents), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _deliver(self, names: Set[str], agents: Mapping[str, Any]) -> None:
        try:
            self.deliver(names, agents)
        except BaseException as error:  # raised by ``wait``
            log.exception("a delivery fails")
            self._fault = error

    def repair(self, agents: Mapping[str, Any]) -> dict[str, WheelmountError]:
        """Have hosts fetch missing blocks again, then return as ``failures``."""
        kinds = TransferError, StoreError
        with contextlib.suppress(Exception):
            self.failures()
        names = {name for wanted in self._wanted for name in wanted}
        names -= {n for n, end in self._outcome.items() if not isinstance(end, kinds)}
        if names and not self.ended:
            self._fault = None
            self.begin(names, agents)
        return self.failures()

    def deliver(self, names: Set[str], agents: Mapping[str, Any]) -> None:
        """Have hosts fetch everything; record results of those still in ``names`` at the end."""
        calls = {name: agents[name].deliver.call_one() for name in sorted(names)}
        found = self.fetch(calls, agents)
        self._outcome |= {name: end for name, end in found.items() if name in names}

    def advance(
        self, agents: Agents, gone: Callable[[Iterable[str]], Set[str]]
    ) -> dict[str, WheelmountError]:
        """Have all hosts fetch a later generation, then have all show it, and end.

        Args:
            agents: of the hosts.
            gone: returns which of the named hosts are lost; the others go on without them.

        Returns:
            Errors of hosts that do not show it while others do, by name.

        Raises:
            TransferError: a file was edited meanwhile; all hosts show what they showed before.
            WheelmountError: a host that is not lost could not fetch it; none changes over.
        """
        ways = self.routes(agents)
        try:
            origin = self.origin
            calls = {name: a.prepare.call_one(origin, ways[name]) for name, a in agents.items()}
            try:
                failed = runtime.errors(self.fetch(calls, agents))
                lost = gone(failed)
                if len(lost) < len(failed) or len(lost) == len(calls):
                    runtime.raise_first(failed)
                if edited := self._source.edited():
                    raise TransferError(
                        f"{os.fsdecode(edited[0])} changed while it was copied",
                        hint="refresh again",
                    )
            except BaseException:
                agents.call(lambda agent: agent.abandon.call_one())
                raise
            ready = calls.keys() - lost
            return failed | runtime.errors(
                agents.call(lambda agent: agent.advance.call_one(), ready)
            )
        finally:
            self.end()

    def forget(self, name: str) -> None:
        """Forget the result of a host that is replaced by another."""
        for names in self._wanted:
            names.discard(name)
        self._outcome.pop(name, None)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all hosts have everything, with the errors of ``RemoteMount.wait``."""
        runtime.raise_first(self.failures(timeout))

    def failures(self, timeout: float | None = None) -> dict[str, WheelmountError]:
        """Wait until hosts have everything; return the errors of those that have not, by host.

        Raises:
            WaitError: the time-out ran out.
            BaseException: the delivery itself failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise WaitError(f"not everything arrived within {timeout:g} s")
        if self._fault is not None:
            raise self._fault
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
