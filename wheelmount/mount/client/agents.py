"""The client's references to the agents of a mount: one process on each host."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import asdict
from typing import Any

from wheelmount.config import Settings
from wheelmount.errors import HostError, WaitError, WheelmountError
from wheelmount.hosts import handshake, runtime
from wheelmount.hosts.host import Host, Roster
from wheelmount.hosts.names import fold

log = logging.getLogger("wheelmount")

EXPLANATION = 15.0
"""Seconds in which a host whose agent failed may say that it has another version."""


class Agents(Mapping[str, Any]):
    """Agents by host name, started by this process or by another one.

    Args:
        identity: name of the mount. On a host, the mount is named ``<identity>-<host>``.
        settings: the mount's settings.
    """

    def __init__(self, identity: str, settings: Settings) -> None:
        self._identity = identity
        self._settings = settings
        self._agents: dict[str, Any] = {}
        self._procs: dict[str, Any] = {}
        self._greetings: dict[str, tuple[Host, Any]] = {}
        self._roster = Roster()

    def spawn(self, hosts: Iterable[Host]) -> None:
        """Start an agent on each of the given hosts."""
        from wheelmount.mount.host.agent import Agent

        settings = asdict(self._settings)
        for host in hosts:
            self._roster.add(host)
            self._procs[host.name] = procs = _start(host)
            identity = f"{self._identity}-{host.name}"
            self._agents[host.name] = agent = procs.spawn(
                f"{runtime.NAME}agent", Agent, host.name, settings, identity
            )
            self._greetings[host.name] = host, agent.versions.call_one()
        runtime.expect(len(self._agents))

    def greet(self) -> None:
        """Check that hosts run the same versions as this process.

        Only the hosts on which ``spawn`` started agents since the last call are checked.

        Raises:
            HostError: a host has other versions, or is lost.
            WaitError: a host does not answer.
        """
        deadline = time.monotonic() + self._settings.start_timeout
        greetings, answers = self._answers(self._settings.start_timeout)
        late = [name for name, answer in answers.items() if isinstance(answer, WaitError)]
        left = deadline - time.monotonic()
        if late and left > 0:  # the files of Python are in the host's memory now
            log.warning("a process did not start on %s; starting another", fold(late))
            replaced = [self._procs[name] for name in late]
            self.spawn([greetings[name] for name in late])
            answers |= self._answers(left)[1]
            runtime.stop_meshes(*replaced)
        failed = runtime.errors(answers)
        if failed:
            # The agent of another version may fail, and its process with it. A handshake is the
            # same in all versions.
            procs = {
                name: _start(greetings[name]) for name in failed if name not in self._roster.dead
            }
            begun = {name: handshake.begin(each) for name, each in procs.items()}
            answers |= runtime.gather(begun, EXPLANATION, lost=self.lost)
            runtime.stop_meshes(*procs.values())
        for name, versions in answers.items():
            if not isinstance(versions, WheelmountError):
                handshake.compare(name, versions)
        runtime.raise_first(failed)

    def _answers(self, timeout: float) -> tuple[dict[str, Host], dict[str, Any]]:
        """Return the hosts whose agents are to be greeted, and their answers."""
        greetings, self._greetings = self._greetings, {}
        calls = {name: greeting for name, (_, greeting) in greetings.items()}
        hosts = {name: host for name, (host, _) in greetings.items()}
        return hosts, runtime.gather(calls, timeout, lost=self.lost)

    def take(self, agents: Mapping[str, Any], hosts: Iterable[Host]) -> None:
        """Use the agents that another process started on the given hosts."""
        self._agents = dict(agents)
        self._roster = Roster(hosts)

    def call(
        self,
        call: Callable[[Any], Any],
        names: Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Call all agents, or those of the named hosts that have one.

        Args:
            call: calls an endpoint of the agent that it is given.
            names: names of hosts; default all hosts.
            timeout: seconds to wait for answers; default the time that a mount may take to start.

        Returns:
            Results and errors by host, as ``runtime.gather`` returns them.
        """
        wanted = self._agents if names is None else [n for n in names if n in self._agents]
        calls = {name: call(self._agents[name]) for name in wanted}
        timeout = timeout or self._settings.start_timeout
        return runtime.gather(calls, timeout, lost=self.lost)

    def may_run(self, names: Collection[str]) -> set[str]:
        """Return those of the named hosts that are known by address and not known to have died."""
        hosts = self._roster.hosts
        found = {name for name in names if name in hosts and hosts[name].address}

        async def look() -> None:
            found.difference_update(await self.lost(found))

        if found:
            runtime.complete(look())
        return found

    async def lost(self, names: Iterable[str]) -> dict[str, HostError]:
        """Look at the named hosts, and return errors of those that have died."""
        return await self._roster.lost(names)

    @property
    def unreachable(self) -> Set[str]:
        """Names of the hosts that accepted no connection when ``lost`` last looked at them."""
        return self._roster.unreachable

    def only(self, names: Iterable[str]) -> Agents:
        """Return a mapping with only the agents of the named hosts."""
        found = Agents(self._identity, self._settings)
        agents = {name: self._agents[name] for name in names if name in self._agents}
        found.take(agents, self._roster.hosts.values())
        return found

    def dismiss(self, names: Iterable[str]) -> None:
        """Stop the agents of the named hosts."""
        quits, meshes = {}, []
        for name in names:
            agent, procs = self._agents.pop(name), self._procs.pop(name, None)
            if procs is not None:
                meshes.append(procs)
            else:  # another process started this agent
                quits[name] = agent
        runtime.stop_meshes(*meshes)
        runtime.end_processes(quits)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the agents of hosts that are lost or about to be killed; they end with them."""
        for name in names:
            del self._agents[name]
            self._procs.pop(name, None)

    def __getitem__(self, name: str) -> Any:
        return self._agents[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._agents))

    def __len__(self) -> int:
        return len(self._agents)


def _start(host: Host) -> Any:
    """Start a process on a host."""
    return host.mesh.spawn_procs({"procs": 1}, name=f"{runtime.NAME}mount")
