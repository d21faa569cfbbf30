"""``local:N``: hosts on this machine, each a process of its own reached over a private socket."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from wheelmount import config, disk, lifeline, linux, shared, subordinate, variables
from wheelmount.child import last_words
from wheelmount.config import Settings
from wheelmount.errors import HostError, WaitError, WheelmountError
from wheelmount.hosts import runtime, worker
from wheelmount.hosts.address import LOCAL
from wheelmount.hosts.host import FIRST_PART, Hosts
from wheelmount.variables import CREDENTIALS

log = logging.getLogger("wheelmount")


class LocalHosts(Hosts):
    """``count`` hosts named ``host0``, ``host1``, …

    Args:
        count: number of hosts.
        settings: settings with the directory of sockets, and the time that hosts may take to start.
        namespaces: give each host a mount namespace, so that all can mount at one path. Commands on
            hosts see these mounts, the caller does not. If the machine does not allow this, hosts
            share the caller's namespace, and the attribute ``namespaces`` is False.
        guarded: end the hosts when this process ends; otherwise they stay until ``stop``.
        within: for each host's name, a process whose mount namespace the host is to use. Replaces
            ``count`` and ``namespaces``.
    """

    killed = True

    def __init__(
        self,
        count: int,
        settings: Settings | None = None,
        *,
        namespaces: bool = False,
        guarded: bool = True,
        within: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(list(within) if within else [f"host{n}" for n in range(count)])
        self._within = within or {}
        self._settings = settings or config.load()
        self.namespaces = namespaces and namespaces_allowed()
        self._guarded = guarded
        self._guard: IO[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self.directory = self._directory()
        """Directory of their sockets and logs."""

    def start(self) -> None:
        """Start the hosts, and wait until each answers.

        A host that listens and gives no answer is ended with the others, and all are started once
        more (seen with Monarch 0.7.0 in 1 of some 2,000 starts, with a cause that is not known).
        """
        timeout = self._settings.start_timeout
        try:
            self._start(timeout * FIRST_PART)
        except WaitError as error:
            log.warning("%s; started again", error.message)
            self.directory = self._directory()
            self._start(timeout * (1 - FIRST_PART))

    def _start(self, timeout: float) -> None:
        self.begun(self.record())
        self.directory.mkdir(mode=0o700)
        guard = None
        try:
            shared.mark(self.directory)
            if self._guarded:
                guard, kept = os.pipe()
                self._guard = os.fdopen(kept, "wb")
                lifeline.keep(self._guard)
            for name in self._names:
                self._processes.append(self._spawn(name, guard))
            runtime.start()  # while they start
            # Attach only then: Monarch may give up a host that does not listen yet.
            self._await_ready()
            self._hosts = self._await_answers(timeout)
        except BaseException:
            self.stop()
            raise
        finally:
            if guard is not None:
                os.close(guard)

    def _directory(self) -> Path:
        return self._settings.private_runtime() / f"hosts-{secrets.token_hex(4)}"

    @property
    def addresses(self) -> list[str]:
        """Return Monarch's address of each host."""
        return [f"{LOCAL}{self.directory}/{name}" for name in self._names]

    @property
    def pids(self) -> list[int]:
        """Their processes."""
        return [process.pid for process in self._processes]

    def _spawn(self, name: str, guard: int | None) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "wheelmount.hosts.worker",
            f"{LOCAL}{self.directory}/{name}",
        ]
        if name in self._within:
            command = [*_enter(self._within[name]), *command]
        elif self.namespaces:
            command = [*unshare(), *command]
        if guard is not None:
            command += ["--guard", str(guard)]
        log.debug("run: %s", shlex.join(command))
        environ = {**os.environ, worker.MARK: str(self.directory / name)}
        environ.pop(CREDENTIALS, None)
        with (self.directory / f"{name}.log").open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                cwd="/",
                start_new_session=True,
                pass_fds=() if guard is None else (guard,),
            )

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._settings.start_timeout
        for name, process in zip(self._names, self._processes, strict=True):
            while _refusal(self.directory / name) is not None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise self._failure(name, process)
                time.sleep(0.01)

    def _failure(self, name: str, process: subprocess.Popen[bytes]) -> WheelmountError:
        code = process.poll()
        if code is not None and disk.unwritable(self.directory):
            return disk.no_room(errno.ENOSPC, self.directory)
        said = last_words((self.directory / f"{name}.log").read_bytes(), "it said nothing")
        what = "does not come up" if code is None else f"ended with code {code}"
        return HostError(
            f"{name} {what}: {said}",
            hint="raise WHEELMOUNT_START_TIMEOUT, or run `wheelmount status`",
        )

    def check(self) -> None:
        """Check that each host listens."""
        for name in self._names:
            if refusal := _refusal(self.directory / name):
                raise HostError(f"{name} does not answer: {refusal}")

    def attach(self) -> None:
        """Connect to running hosts."""
        self.check()
        self.reach()

    def leave(self) -> dict[str, Any]:
        """Disconnect from the hosts without stopping them; they must not be guarded."""
        self._processes = []
        return self.record()

    def record(self) -> dict[str, Any]:
        """Return a record for ``resume``."""
        place = {"directory": str(self.directory), shared.MACHINE: socket.gethostname()}
        return {**place, "names": self._names}

    @classmethod
    def resume(cls, record: dict[str, Any], settings: Settings) -> LocalHosts:
        """Return hosts that another process left running."""
        hosts = cls(len(record["names"]), settings, namespaces=False, guarded=False)
        hosts._names, hosts.directory = record["names"], Path(record["directory"])
        return hosts

    def stop(self) -> None:
        """Stop the hosts and all their processes."""
        worker.end(*(self.directory / name for name in self._names))
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        self._processes = []
        self._hosts = []
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        shutil.rmtree(self.directory, ignore_errors=True)


def _refusal(path: Path) -> str | None:
    """Return why no process listens at a socket; None if one does."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
    except OSError as error:
        return error.strerror or str(error)
    return None


def unshare() -> list[str]:
    """Return the first words of a command that runs in a new mount namespace."""
    # "slave": what is mounted outside later is still seen inside, never the other way round.
    command = ["unshare", "--mount", "--propagation", "slave"]
    if os.geteuid() != 0:
        # Keeps the user's own id; the kept capabilities let FUSE be mounted in the namespace.
        command += ["--user", *_same_ids(), "--keep-caps"]
    return [*command, "--"]


def for_binds() -> list[str]:
    """Return the first words of a command whose processes may bind mounts; empty if none help.

    None help who may mount already, such as root, nor on a kernel or machine that allows no more.
    """
    if os.geteuid() == 0 or linux.may_mount() or linux.version() < linux.BENEATH:
        return []
    return unshare() if namespaces_allowed() else []


@functools.cache
def _same_ids() -> tuple[str, ...]:
    """Return options of unshare(1) that keep this user's ids in a namespace.

    They also map the user's subordinate ids, which containers need, if that is possible.
    """
    ranges = subordinate.ids()
    if ranges is not None:
        options = (
            f"--map-user={os.geteuid()}", f"--map-users={ranges.user},{ranges.user},{ranges.count}",
            f"--map-group={os.getegid()}",
            f"--map-groups={ranges.group},{ranges.group},{ranges.count}",
        )  # fmt: skip
        attempt = ["unshare", "--user", *options, "true"]
        environ = variables.for_programs()
        if subprocess.run(attempt, env=environ, capture_output=True, check=False).returncode == 0:
            return options
    return ("--map-current-user",)


def _enter(pid: int) -> list[str]:
    """Return the first words of a command that runs in the mount namespace of a process."""
    theirs, ours = (Path(f"/proc/{each}/ns/mnt") for each in (pid, "self"))
    if theirs.samefile(ours):
        return []
    command = ["nsenter", "--target", str(pid), "--mount"]
    if os.geteuid() != 0:
        command += ["--user", "--preserve-credentials"]
    return [*command, "--"]


@functools.cache
def namespaces_allowed() -> bool:
    """Return whether this user may make mount namespaces on this machine."""
    if shutil.which("unshare") is None:
        return False
    environ = variables.for_programs()
    done = subprocess.run([*unshare(), "true"], env=environ, capture_output=True, check=False)
    return done.returncode == 0
