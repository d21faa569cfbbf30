"""A host's own process: it waits for clients and starts what they ask for, through Monarch.

Run as ``python -m wheelmount.hosts.worker ADDRESS [--guard FD]``. With ``--guard`` the process
ends, with everything it started, when the other end of that pipe is closed: that is, when the
client that started it is gone, however it went.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
from pathlib import Path

import psutil

from wheelmount.hosts import engine

SERVER = "wheelmount.mount.server"
"""Module that marks, in a command line, a process that may outlive its host."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--guard", type=int)
    arguments = parser.parse_args()
    if arguments.guard is not None:
        os.set_inheritable(arguments.guard, False)
        guarded = (arguments.guard, Path(arguments.address.removeprefix("ipc://")))
        threading.Thread(target=_guard, args=guarded, daemon=True).start()
    os.environ.update(engine.environment())
    from monarch.actor import run_worker_loop_forever

    run_worker_loop_forever(address=arguments.address, ca="trust_all_connections")


def _guard(pipe: int, socket: Path) -> None:
    while os.read(pipe, 1):
        pass
    for path in (socket, socket.with_suffix(".log")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the last of the hosts removes the directory
        socket.parent.rmdir()
    end(os.getpid())


def end(pid: int) -> None:
    """Kill a host's process and what it started.

    Servers of mounts are spared: each sees its host go, and unmounts or stays as it was told.
    """
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if SERVER not in member.cmdline():
                member.kill()


if __name__ == "__main__":
    main()
