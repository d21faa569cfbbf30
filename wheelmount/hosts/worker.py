"""The process of a host: it listens for clients and starts their processes, through Monarch.

Run as ``python -m wheelmount.hosts.worker ADDRESS [--guard FD] [--credentials]``. The address is a
socket, ``ipc://PATH``, or one at which clients and other hosts reach this machine,
``tls://HOST:PORT``. With ``--guard``, the process and all that it started end when the other end of
that pipe is closed, as when the client that started it was killed. With ``--credentials``, it reads
its certificate from standard input (``credentials.decode``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil

from wheelmount import config, logs
from wheelmount.config import Settings
from wheelmount.errors import HostError, WheelmountError
from wheelmount.hosts import keeper, process, runtime, socketguard
from wheelmount.hosts.address import DANGER, LOCAL, OPEN, Address
from wheelmount.variables import CREDENTIALS

MARK = "WHEELMOUNT_LOCAL_HOST"
"""Variable that marks all processes that a host started; its value is the host's socket."""

OWN_MOUNTS = "WHEELMOUNT_OWN_MOUNTS"
"""Variable that is set if only what runs on a host has to see the mounts there: then a worker that
may not bind otherwise gets a mount namespace."""

KILL_TIMEOUT = 3.0
"""Seconds in which killed processes must end."""

ROUNDS = 10
"""Number of searches for processes to kill, of a program that keeps starting new ones."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--guard", type=int)
    parser.add_argument("--credentials", action="store_true")
    arguments = parser.parse_args()
    if os.environ.pop(OWN_MOUNTS, None):
        enter_namespace([sys.executable, "-m", "wheelmount.hosts.worker", *sys.argv[1:]])
    given = _read_credentials() if arguments.credentials else None
    mark = os.environ.get(MARK)
    try:
        settings = config.load()
        if mark is None:  # no client started this worker, so none would start it again
            directory = process.make_directory(settings.private_runtime(), process.OF_WORKER)
            keeper.keep()
        else:
            directory = temporary(Path(mark))
        runtime.own_process()
        if arguments.guard is not None:
            os.set_inheritable(arguments.guard, False)
            guarded = (arguments.guard, Path(arguments.address.removeprefix(LOCAL)))
            threading.Thread(target=_guard, args=guarded, daemon=True).start()
        if not arguments.address.startswith(LOCAL):
            listen_at(Address.parse(arguments.address), settings, given)
        process.prepare(directory)
        if mark is not None:
            logs.bound(2)
        serve(arguments.address)
    except WheelmountError as error:
        parser.error(f"{error.message}; {error.hint}")


def enter_namespace(command: Sequence[str]) -> None:
    """Run this process's own command in a new mount namespace if only there its user may bind."""
    from wheelmount.hosts import local  # which imports this module

    if words := local.for_binds():
        os.execvp(words[0], [*words, *command])  # noqa: S606


def _read_credentials() -> bytes:
    """Read standard input, and replace it, so that no started process reads it."""
    given = sys.stdin.buffer.read()
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return given


def log_of(mark: Path) -> Path:
    """Return the log file of a host's processes."""
    return mark.with_name(f"{mark.name}.log")


def temporary(mark: Path) -> Path:
    """Return a host's directory for temporary files."""
    return mark.with_name(f"{mark.name}.tmp")


def forget(mark: Path) -> None:
    """Remove the files of a host that has ended."""
    for path in (mark, log_of(mark)):
        path.unlink(missing_ok=True)
    shutil.rmtree(temporary(mark), ignore_errors=True)


def serve(address: str) -> NoReturn:
    """Serve clients for ever.

    Raises:
        HostError: it cannot listen there.
    """
    socketguard.close()
    from monarch.actor import run_worker_loop_forever

    keeper.serves()
    try:
        run_worker_loop_forever(address=address, ca="trust_all_connections")
    except Exception as error:
        raise HostError(
            f"nothing can be served at {address}: {runtime.last_line(error)}",
            hint="another worker may have this port; give another one",
        ) from None
    raise AssertionError("it does not return")


def listen_at(address: Address, settings: Settings, given: bytes | None = None) -> None:
    """Set the address at which this process, and those that it starts, listen.

    Args:
        address: of this machine.
        settings: in force.
        given: credentials; default those of the environment, or of the user's own authority.

    Raises:
        InputError: other machines cannot reach this machine there.
        ConfigError: the user's credentials cannot be used.
    """
    from wheelmount.hosts.credentials import Authority, decode

    address.check_own()
    os.environ[runtime.ADDRESS] = str(replace(address, port=0))
    if given is None and (text := os.environ.pop(CREDENTIALS, None)) is not None:
        given = text.encode()
    if address.scheme == OPEN:
        print(f"security: {address}: {DANGER}", file=sys.stderr, flush=True)
        return
    names = address.names()
    identity = Authority.of_user(settings).issue(names) if given is None else decode(given, names)
    runtime.identify(identity, others=True)


def _guard(pipe: int, socket: Path) -> None:
    while os.read(pipe, 1):
        pass
    end(socket)
    forget(socket)
    if not list(socket.parent.glob("host*")):  # the last of the hosts removes the directory
        shutil.rmtree(socket.parent, ignore_errors=True)
    os._exit(0)


def end(*sockets: Path) -> None:
    """Kill hosts' processes and all their descendants, including orphans.

    Servers of mounts are spared: each notices that its host ended, and unmounts or stays.
    """
    marks = set(map(str, sockets))
    for _ in range(ROUNDS):  # more than one, for those that are starting others meanwhile
        family = [each for each in psutil.process_iter() if _belongs(each, marks)]
        if not family:
            return
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        deadline = time.monotonic() + KILL_TIMEOUT
        while any(map(_runs, family)) and time.monotonic() < deadline:
            time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def host_of(process: psutil.Process) -> str | None:
    """Return the socket of the local host that started a process; None if none is known."""
    try:
        environment: dict[str, str] = process.environ()
    except psutil.Error:  # gone, or another user's
        return None
    return environment.get(MARK)


def running() -> set[Path]:
    """Return the directories of local hosts of which processes run on this machine."""
    sockets = map(host_of, psutil.process_iter())
    return {Path(socket).parent for socket in sockets if socket}


def _belongs(one: psutil.Process, marks: set[str]) -> bool:
    try:
        return (
            host_of(one) in marks
            and one.pid != os.getpid()
            and one.status() != psutil.STATUS_ZOMBIE
            and process.SERVER not in one.cmdline()
        )
    except psutil.Error:  # gone, or another user's
        return False


if __name__ == "__main__":
    main()
