"""The agents of a mount, as its client has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from wheelmount.config import Settings
from wheelmount.errors import WheelmountError
from wheelmount.hosts import engine
from wheelmount.hosts.host import Host


class Agents(Mapping[str, Any]):
    """Agents by host: such as this process started, and such as another did.

    Args:
        identity: of the mount; its name on a host is this and the host's name.
        settings: of the mount.
    """

    def __init__(self, identity: str, settings: Settings) -> None:
        self._identity = identity
        self._settings = settings
        self._agents: dict[str, Any] = {}
        self._procs: dict[str, Any] = {}

    def spawn(self, hosts: Iterable[Host]) -> None:
        """Start one on each of some hosts."""
        from wheelmount.mount.agent import Agent

        for host in hosts:
            procs = host.mesh.spawn_procs({"procs": 1}, name="wheelmount")
            self._procs[host.name] = procs
            identity = f"{self._identity}-{host.name}"
            self._agents[host.name] = procs.spawn(
                "agent", Agent, host.name, self._settings, identity
            )

    def take(self, agents: Mapping[str, Any]) -> None:
        """Go on with those of another process."""
        self._agents = dict(agents)

    def call(
        self,
        call: Callable[[Any], Any],
        names: Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Call all of them, or those of some hosts in so far as there are any.

        Args:
            call: given an agent, calls it.
            names: of the hosts.
            timeout: seconds; default those that a mount may take to come up.

        Returns:
            See ``engine.gather``.
        """
        wanted = self._agents if names is None else [n for n in names if n in self._agents]
        calls = {name: call(self._agents[name]) for name in wanted}
        return engine.gather(calls, timeout or self._settings.start_timeout)

    def dismiss(self, name: str, *, lost: bool = False) -> None:
        """End one; that of a host that is lost is ended already."""
        agent, procs = self._agents.pop(name), self._procs.pop(name, None)
        if lost:
            return
        if procs is not None:
            engine.stop_mesh(procs)
        else:  # another process started it
            with contextlib.suppress(WheelmountError):
                engine.one(agent.quit.call_one(), self._settings.start_timeout)

    def __getitem__(self, name: str) -> Any:
        return self._agents[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._agents))

    def __len__(self) -> int:
        return len(self._agents)
