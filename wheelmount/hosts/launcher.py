"""Start a worker on this machine for a client on another machine.

Run by ssh or Slurm as ``python -m wheelmount.hosts.launcher TOKEN NAME PORT MODE``. It prints
lines of JSON, each after the token and a blank, because login shells may print other lines:
``{"listens": …}`` with the address that it needs credentials for, which it then reads
(``credentials.decode``) from the beginning of its input; ``{"address": …}`` shortly before the
worker listens; ``{"error": …, "hint": …}``. ``bundle`` first sends wheelmount where it is missing.
MODE is

``guarded``    end the worker and all its processes at the end of the input, or at a signal;
``attended``   go on after the end of the input, until a signal;
``detached``   leave the worker running, and end;
``ended``      end the worker that ``detached`` left, and all its processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, cast

from wheelmount import config, shared, variables
from wheelmount.child import last_words
from wheelmount.config import Settings
from wheelmount.errors import HostError, WheelmountError
from wheelmount.hosts import local, worker
from wheelmount.hosts.address import SECURE, Address

GUARDED, ATTENDED, DETACHED, ENDED = "guarded", "attended", "detached", "ended"

APART = "WHEELMOUNT_APART"
"""Variable with the ``view`` of a client whose mount namespace a worker must not share."""

END = b"-----END PRIVATE KEY-----"
"""Last line of credentials."""

GRACE = 0.3
"""Seconds in which a worker that cannot start has ended."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("token")
    parser.add_argument("name")
    parser.add_argument("port", type=int)
    parser.add_argument("mode", choices=[GUARDED, ATTENDED, DETACHED, ENDED])
    arguments = parser.parse_args()
    try:
        settings = config.load()
        launcher = Launcher(settings, arguments.token, arguments.name or own_name())
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        if arguments.mode == ENDED:
            launcher.end()
            return 0
        address = own_address(arguments.port)
        say(arguments.token, listens=str(address))
        process = launcher.start(address, read_credentials(), guarded=arguments.mode != DETACHED)
    except WheelmountError as error:
        say(arguments.token, error=error.message, hint=error.hint)
        return error.exit_code
    except SystemExit:  # a signal, maybe while the worker starts
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        launcher.end()
        raise
    say(arguments.token, address=str(address))
    if arguments.mode == DETACHED:
        return 0
    try:
        if arguments.mode == GUARDED:
            threading.Thread(target=_await_end_of_input, daemon=True).start()
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        launcher.end()


class Launcher:
    """A worker on this machine, and its directory.

    Args:
        settings: the settings in force.
        token: token of all workers that are started together.
        name: name of the host.
    """

    def __init__(self, settings: Settings, token: str, name: str) -> None:
        if not all(re.fullmatch(r"[\w.-]+", word, re.ASCII) for word in (token, name)):
            raise HostError(f"{token} {name} is no name of a host")
        self.directory = settings.private_runtime() / f"hosts-{token}"
        self.mark = self.directory / name

    def start(
        self, address: Address, credentials: str, *, guarded: bool
    ) -> subprocess.Popen[bytes]:
        """Start it.

        Raises:
            HostError: it cannot be started; the message has its output.
        """
        self.directory.mkdir(mode=0o700, exist_ok=True)
        shared.mark(self.directory)
        log = worker.log_of(self.mark)
        apart = _namespace()
        environment = {**variables.without_secrets(), worker.MARK: str(self.mark)}
        command = [sys.executable, "-m", "wheelmount.hosts.worker", str(address), "--credentials"]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*apart, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        # Not in the environment, which would show them in /proc as long as the worker runs.
        with contextlib.suppress(BrokenPipeError), cast(IO[bytes], process.stdin) as given:
            given.write(credentials.encode())
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(GRACE)
            said = last_words(log.read_bytes(), "it said nothing")
            self.end()
            raise HostError(f"the worker ended with code {code}: {said}")
        if not guarded:
            process.returncode = 0  # it goes on, and this process does not wait for it
        return process

    def end(self) -> None:
        """End the worker and all its processes."""
        worker.end(self.mark)
        worker.forget(self.mark)
        if not list(self.directory.glob("*.log")):  # of others on this machine
            shutil.rmtree(self.directory, ignore_errors=True)


def _namespace() -> list[str]:
    """Return the first words of a command, which run a worker in a mount namespace if wanted."""
    # Not for what runs there: srun would pass them on.
    client, own_mounts = (os.environ.pop(name, None) for name in (APART, worker.OWN_MOUNTS))
    if client == view() and local.namespaces_allowed():
        return local.unshare()
    return local.for_binds() if own_mounts else []


def say(token: str, **what: str | None) -> None:
    """Print a message for the client."""
    print(token, json.dumps(what), flush=True)


def hear(token: str, line: bytes | bytearray) -> dict[str, Any] | None:
    """Decode a launcher's line; None if another program printed it."""
    mark, _, text = line.partition(b" ")
    if mark != token.encode():
        return None
    with contextlib.suppress(ValueError):
        said = json.loads(text)
        if isinstance(said, dict):
            return said
    return None


def read_credentials() -> str:
    """Read credentials from the beginning of the input.

    Raises:
        HostError: the input ends before.
    """
    lines = []
    for line in sys.stdin.buffer:
        lines.append(line)
        if line.strip() == END:
            return b"".join(lines).decode()
    raise HostError("no credentials came")


def own_address(port: int) -> Address:
    """Return the address of this machine for the client: that of ssh's connection, or its name.

    Args:
        port: port to listen at; 0, which ssh's hosts are told, for any free one.

    Raises:
        HostError: the name has no address.
    """
    # Slurm passes on the client's variables, of which this one names the client's machine.
    connection = os.environ.get("SSH_CONNECTION", "").split() if port == 0 else []
    host = connection[2] if len(connection) == 4 else own_name()
    if port == 0:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
    address = Address(SECURE, host, port)
    try:
        address.check_own()
    except WheelmountError as error:
        raise HostError(error.message, hint=error.hint) from None
    return address


_RUN = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    'runpy.run_module("wheelmount.hosts.launcher", run_name="__main__", alter_sys=True)'
)
"""Like ``-m``, but never imports from the working directory, to which others may write."""


def view() -> str:
    """Return machine and mount namespace: equal for processes that see the same mounts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/mnt').stat().st_ino}"


def command(
    settings: Settings,
    token: str,
    name: str,
    port: int,
    mode: str,
    *,
    apart: bool = False,
    own_mounts: bool = False,
    how: str = "take",
    bundle_name: str | None = None,
) -> list[str]:
    """Return the command that runs this module on another machine.

    Args:
        settings: settings of the client.
        token: token of all workers that are started together.
        name: name of the host; empty for the name of that machine.
        port: port to listen at; 0 for any free one.
        mode: one of the four modes.
        apart: give a worker on this machine a new mount namespace.
        own_mounts: give a worker that may not bind otherwise a new mount namespace.
        how: what is done if the machine lacks wheelmount, as of ``bundle.command``.
        bundle_name: as of ``bundle.command``.
    """
    from wheelmount.hosts import bundle  # not needed on hosts

    argv = ["-c", _RUN, token, name, str(port), mode]
    if settings.python:
        argv = [settings.python, *argv]
    else:
        argv = bundle.command(token, argv, settings, how, bundle_name)
    assigned = []
    if settings.runtime_dir != Settings().runtime_dir:
        assigned.append(f"WHEELMOUNT_RUNTIME_DIR={settings.runtime_dir}")
    if apart:
        assigned.append(f"{APART}={view()}")
    if own_mounts:
        assigned.append(f"{worker.OWN_MOUNTS}=1")
    return ["env", *assigned, *argv] if assigned else argv


def own_name() -> str:
    """Return the name of this machine, as Slurm knows it within a job."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _await_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(worker.KILL_TIMEOUT * worker.ROUNDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
