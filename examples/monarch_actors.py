"""Actors of a Monarch program that import from a mounted directory, and see edits after a refresh.

Run as `python examples/monarch_actors.py`. Hosts are two processes of this machine, of Monarch's
own ProcessJob; any HostMesh will do.
"""

import importlib
import sys
import tempfile
from pathlib import Path

from monarch.actor import Actor, current_rank, endpoint
from monarch.job import ProcessJob

from wheelmount import remotemount


class Greeter(Actor):
    def __init__(self, mntpoint: str) -> None:
        directory = mntpoint.replace("{host}", f"host{current_rank()['hosts']}")
        sys.path.insert(0, directory)

    @endpoint
    def greet(self, name: str) -> str:
        import greeting

        importlib.reload(greeting)  # what was imported before a refresh stays what it was
        return greeting.text(name)


def main() -> None:
    job = ProcessJob({"hosts": 2})
    hosts = job.state(cached_path=None).hosts
    try:
        with tempfile.TemporaryDirectory() as place:
            source, mntpoint = Path(place, "source"), f"{place}/mount-{{host}}"
            source.mkdir()
            (source / "greeting.py").write_text("def text(name): return f'Hello {name}'\n")
            with remotemount(hosts, source, mntpoint) as mount:
                actors = hosts.spawn_procs({"gpus": 1}).spawn("greeter", Greeter, mntpoint)
                print(list(actors.greet.call("Ada").get().values()))
                (source / "greeting.py").write_text("def text(name): return f'Goodbye {name}'\n")
                mount.refresh()
                print(list(actors.greet.call("Ada").get().values()))
    finally:
        job.kill()


if __name__ == "__main__":
    main()
