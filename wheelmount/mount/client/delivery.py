"""The client's end of a delivery: the source offered to hosts, and what came of it on each."""

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
from wheelmount.mount.transfer.topology import SMALL, Route, routes
from wheelmount.progress import Progress, Task

log = logging.getLogger("wheelmount")


class Delivery:
    """One layout, offered until ``end``.

    Args:
        root: the directory.
        layout: its snapshot, and what of it is to travel.
        settings: of the mount.
        progress: told about bytes that arrive.
        before: what hosts have, and so need not be described; default nothing.

    Attributes:
        origin: what hosts fetch from.
        ended: whether it is offered no more.
    """

    def __init__(
        self,
        root: bytes,
        layout: Layout,
        settings: Settings,
        progress: Progress,
        before: Layout | None = None,
    ) -> None:
        from wheelmount.mount.transfer.rdma import offer

        self.layout = layout
        self.ended = False
        self._source = Source(root, layout)
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
            with runtime.quiet():  # Monarch looks for a GPU's library, and says that there is none
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
        """Files that are no longer what the snapshot says."""
        return self._source.changed

    def routes(self, agents: Mapping[str, Any], later: Collection[str] = ()) -> dict[str, Route]:
        """Whom each of these hosts asks for blocks; see ``Topology`` for ``later``."""
        return routes(agents, self.layout.size, self._settings.fanout, later)

    def arrived(self, _host: str, length: int) -> None:
        """So many bytes more are on a host."""
        if self._task is not None:
            self._task.advance(length)

    def fetch(self, calls: Mapping[str, Any], agents: Mapping[str, Any]) -> dict[str, Any]:
        """Wait until hosts have everything.

        Args:
            calls: to which they answer then, by name.
            agents: of all that the mount has, by name, to be told of those that are lost.

        Returns:
            See ``runtime.gather``.
        """
        # Every wait for a block is bounded; so is the whole by the sum.
        bound = self._settings.fetch_timeout * (self.layout.blocks + STUCK_AFTER)
        bound += self._settings.start_timeout
        with self._progress.task("send", unit="B") as task:
            task.total(self.layout.size * len(calls))
            self._task = task
            outcome = runtime.gather(
                calls, bound, lambda name, error: self._lose(name, error, agents)
            )
            if not any(isinstance(end, WheelmountError) for end in outcome.values()):
                task.note(f"{self.layout.size / 1e6:.1f} MB to {len(calls)} hosts")
        return outcome

    def _lose(self, name: str, error: WheelmountError, agents: Mapping[str, Any]) -> None:
        """Tell the hosts that one of them is gone, if it is."""
        if isinstance(error, HostError):
            log.warning("%s is lost: %s", name, error.message)
            self._asked_by_more = True  # those below it
            for other, agent in agents.items():
                if other != name:
                    with contextlib.suppress(Exception):
                        agent.mark_dead.broadcast(name)

    def begin(self, names: Iterable[str], agents: Mapping[str, Any]) -> None:
        """Have hosts fetch everything while this process goes on; see ``wait``.

        Args:
            names: of these hosts.
            agents: see ``fetch``.
        """
        wanted = set(names)
        self._wanted.append(wanted)
        thread = threading.Thread(target=self._deliver, args=(wanted, agents), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _deliver(self, names: Set[str], agents: Mapping[str, Any]) -> None:
        try:
            self.deliver(names, agents)
        except BaseException as error:  # whoever waits is to hear of it
            log.exception("a delivery fails")
            self._fault = error

    def repair(self, agents: Mapping[str, Any]) -> dict[str, WheelmountError]:
        """As ``failures``, after hosts have fetched again what did not arrive."""
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
        """Have hosts fetch everything; what comes of those counts that are among ``names`` then."""
        calls = {name: agents[name].deliver.call_one() for name in sorted(names)}
        found = self.fetch(calls, agents)
        self._outcome |= {name: end for name, end in found.items() if name in names}

    def advance(
        self, agents: Agents, gone: Callable[[Iterable[str]], Set[str]]
    ) -> dict[str, WheelmountError]:
        """Have all hosts fetch a later generation, and then all show it; ends.

        Args:
            agents: of the hosts.
            gone: tells which of some hosts are lost; the others go on without them.

        Returns:
            By host, why it does not show it, while others do.

        Raises:
            TransferError: a file was edited meanwhile; all show what they did.
            WheelmountError: a host that is not lost could not fetch it; all show what they did.
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
        """Do not tell of a host any more: another takes its place."""
        for names in self._wanted:
            names.discard(name)
        self._outcome.pop(name, None)

    def wait(self, timeout: float | None = None) -> None:
        """See ``RemoteMount.wait``."""
        runtime.raise_first(self.failures(timeout))

    def failures(self, timeout: float | None = None) -> dict[str, WheelmountError]:
        """Wait until hosts have everything; gives by host why one has not.

        Raises:
            WaitError: the time is over.
            BaseException: what the delivery itself failed with.
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
        """Offer it no more."""
        from wheelmount.mount.transfer.rdma import withdraw

        if not self.ended:
            self.ended = True
            withdraw(self.origin)
            if self._block_server is not None:
                self._block_server.close()
            self._ring.close()
        for thread in self._threads:
            thread.join(self._settings.start_timeout)
