"""A client of real hosts in a process of its own, told by lines of JSON what to do.

Each line is ``[name, *arguments]`` of a function here; each answer is ``{"value": …}``, or
``{"error": kind, "message": …}``.
"""

from __future__ import annotations

import json
import sys
import traceback
from contextlib import ExitStack
from dataclasses import replace

from wheelmount import config, remotemount
from wheelmount.errors import WheelmountError
from wheelmount.hosts import runtime
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task
from wheelmount.progress import SILENT


class Client:
    """One mount, and the hosts that this client started for it."""

    def __init__(self) -> None:
        self._settings = config.load()
        self._started = ExitStack()
        self._pids: dict[str, int] = {}
        self._mount: RemoteMount | None = None

    @property
    def mount(self) -> RemoteMount:
        assert self._mount is not None
        return self._mount

    def open(self, source: str, where: str, count: int, adapter: str) -> dict[str, str]:
        """Mount a directory on new hosts."""
        settings = replace(self._settings, adapter=adapter)
        hosts = LocalHosts(count, settings)
        self._started.enter_context(hosts)
        self._pids = dict(zip((host.name for host in hosts), hosts.pids, strict=True))
        self._mount = remotemount(hosts, source, where, settings=settings)
        self._mount.open(keep=True)
        return self._mount.mntpoints

    def adopt(self, source: str, where: str, adapter: str) -> dict[str, str]:
        """Take charge of the mount of a directory."""
        settings = replace(self._settings, adapter=adapter)
        directories = processes.find(settings, source)
        tasks = [Task.read(directory) for directory in directories]
        within = {
            task.host: processes.status(directory)["pid"]
            for task, directory in zip(tasks, directories, strict=True)
        }
        hosts = LocalHosts(len(within), settings, within=within)
        self._started.enter_context(hosts)
        self._pids = dict(zip((host.name for host in hosts), hosts.pids, strict=True))
        identity = processes.identity(directories[0])
        made = RemoteMount(hosts, source, where, settings, SILENT, identity=identity)
        made.adopt()
        self._mount = made
        return made.mntpoints

    def add(self, name: str) -> dict[str, str]:
        """Mount it on one more host."""
        hosts = LocalHosts(1, self._settings)
        self._started.enter_context(hosts)
        (host,) = hosts
        self.mount.add(replace(host, name=name))
        (self._pids[name],) = hosts.pids
        return self.mount.mntpoints

    def wait(self) -> list[str]:
        """Wait for all bytes; gives the files that hosts cannot read."""
        self.mount.wait(120, warn=False)
        return self.mount.unreadable

    def refresh(self) -> bool:
        """Have it follow."""
        return self.mount.refresh()

    def verify(self, repair: bool) -> dict[str, list[str]]:
        """Have the hosts verify it; gives the files that were damaged, or have no hashes."""
        found = self.mount.verify(repair=repair)
        return {name: each.paths + each.unknown for name, each in found.items()}

    def pids(self) -> dict[str, int]:
        """Processes of the hosts."""
        return self._pids

    def close(self, force: bool) -> None:
        """Take it down."""
        self.mount.close(force=force)
        self._mount = None

    def quit(self) -> None:
        """Let go of a mount that stays."""
        if self._mount is not None:
            self._mount.release()
        self._started.close()
        runtime.stop()


def main() -> None:
    """Do as told, until the input ends."""
    client = Client()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(client, name)(*arguments)}
        except WheelmountError as error:
            traceback.print_exc()
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)
        if name == "quit":
            return


if __name__ == "__main__":
    main()
