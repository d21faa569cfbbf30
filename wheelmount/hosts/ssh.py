"""``ssh:a,b``: hosts that the user can reach by ssh, which starts a worker on each."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, cast

from wheelmount import lifeline, variables
from wheelmount.child import last_words
from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError, UnavailableError
from wheelmount.hosts import launcher
from wheelmount.hosts.address import Address, bare, bracketed, called
from wheelmount.hosts.names import distinct
from wheelmount.hosts.network import INSTALL, NetworkHosts
from wheelmount.progress import SILENT, Progress

log = logging.getLogger("wheelmount")

MAX_LINE = 64 << 10
"""Maximum bytes of a line of a host's output."""

OF_WORKERS = "python", "cache_dir"
"""Settings by which workers were started, and are ended."""

POLL_INTERVAL = 0.5
"""Seconds between checks that hosts still receive the bundle that is sent to them."""


@dataclass(frozen=True, slots=True)
class Target:
    """A host for ssh.

    Attributes:
        host: host name, address, or alias of ssh's configuration.
        user: the user on the host; None for ssh's default.
        port: the port of sshd; None for ssh's default.
    """

    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``[USER@]HOST[:PORT]``; an IPv6 address is in brackets.

        Raises:
            InputError: the text is invalid.
        """
        host = r"\w[\w.-]*|\[[0-9A-Fa-f:.]+\]"
        match = re.fullmatch(rf"(?:(\w[\w.-]*)@)?({host})(?::(\d{{1,5}}))?", text, re.ASCII)
        if match is None:
            raise InputError(
                f"{text!r} is not a host for ssh", hint="give ssh:[USER@]HOST[:PORT],…"
            )
        return cls(bare(match[2]), match[1], int(match[3]) if match[3] else None)

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"{user}{bracketed(self.host)}" + (f":{self.port}" if self.port else "")

    def command(self, argv: Sequence[str], timeout: float) -> list[str]:
        """Return the ssh command that runs ``argv`` on the host without prompts.

        Args:
            argv: program and arguments.
            timeout: seconds in which ssh must connect.
        """
        command = [
            "ssh",
            "-T",
            "-o",
            "BatchMode=yes",
            "-o",
            f"ConnectTimeout={max(1, int(timeout))}",
        ]
        command += ["-o", "ServerAliveInterval=15"]  # ssh ends 45 s after it lost the host
        if self.port:
            command += ["-p", str(self.port)]
        if self.user:
            command += ["-l", self.user]
        return [*command, "--", self.host, shlex.join(argv)]


class SshHosts(NetworkHosts):
    """Hosts on which ssh starts a worker each; wheelmount is sent to hosts without it.

    Args:
        targets: the hosts.
        settings: the settings in force; ``python`` is the Python on the hosts.
        guarded: end the workers when this process ends; otherwise they stay until ``stop``.
        apart: give each host on this machine a mount namespace.
        own_mounts: give each host where this user may not bind otherwise a mount namespace.
        progress: informed of what is sent.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        settings: Settings,
        *,
        guarded: bool,
        apart: bool = False,
        own_mounts: bool = False,
        progress: Progress = SILENT,
    ) -> None:
        from wheelmount.hosts.bundle import Delivery  # imported here because it takes long to load

        super().__init__((), settings)
        self._apart, self._own_mounts = apart, own_mounts
        self._bundle: str | None = None  # of a session of another version of wheelmount
        self._of_before = False  # whether a version started them that did not record this
        self._delivery = Delivery(settings, progress)
        self._targets = list(targets)
        self._names = _names(targets)
        self._guarded = guarded
        self._token = secrets.token_hex(4)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._begun: set[str] = set()  # names of hosts that may have a worker

    def start(self) -> None:
        """Start all workers at once, and wait until each answers.

        Raises:
            HostError: a worker cannot be started, or does not answer in time.
        """
        self._start_authority(guarded=self._guarded)
        self.begun(self.record())
        mode = launcher.GUARDED if self._guarded else launcher.DETACHED
        try:
            for name, target in zip(self._names, self._targets, strict=True):
                self._processes.append(self._spawn(target, name, mode))
            self._addresses = self._await_addresses()
            self.check(self._settings.start_timeout)  # the workers are about to listen
            self.attach()
        except BaseException:
            self.give_up()
            raise

    def _spawn(self, target: Target, name: str, mode: str) -> subprocess.Popen[bytes]:
        where = self._settings, self._token, name, 0, mode
        argv = launcher.command(
            *where, apart=self._apart, own_mounts=self._own_mounts, bundle_name=self._bundle
        )
        command = target.command(argv, self._settings.start_timeout)
        log.debug("run: %s", shlex.join(command))
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=variables.for_programs(),
                start_new_session=True,  # on ^C the client ends the process in order
            )
        except FileNotFoundError:
            raise UnavailableError(
                "there is no ssh here", hint="install OpenSSH's client, or give other --hosts"
            ) from None
        lifeline.keep(process.stdin)
        return process

    def _await_addresses(self) -> list[Address]:
        timeout = self._settings.start_timeout
        deadline = time.monotonic() + timeout
        found: dict[str, Address] = {}
        received = {name: bytearray() for name in self._names}
        with selectors.DefaultSelector() as selector, self._delivery:
            for name, process in zip(self._names, self._processes, strict=True):
                stdout = cast(IO[bytes], process.stdout)
                selector.register(stdout, selectors.EVENT_READ, (name, process))
            while selector.get_map():
                ready = selector.select(min(POLL_INTERVAL, max(0, deadline - time.monotonic())))
                deadline = max(deadline, self._delivery.since + timeout)
                for key, _ in ready:
                    name, process = key.data
                    address = self._receive(name, process, received[name])
                    if address is not None:
                        selector.unregister(key.fileobj)
                        found[name] = address
                # Also where something is ready each time: a shell may print for ever.
                if selector.get_map() and time.monotonic() > deadline:
                    missing = [name for name in self._names if name not in found]
                    raise HostError(
                        f"{', '.join(missing)}: no worker within {timeout:g} s",
                        hint="raise WHEELMOUNT_START_TIMEOUT, or check that `ssh HOST true` works",
                    )
        return [found[name] for name in self._names]

    def _receive(
        self, name: str, process: subprocess.Popen[bytes], received: bytearray
    ) -> Address | None:
        """Receive a host's next output; return its address once its worker is about to listen.

        Args:
            name: name of the host.
            process: the ssh process.
            received: the received part of an unfinished line; updated.

        Raises:
            HostError: the host reports an error, or its output ends or is invalid.
        """
        piece = os.read(cast(IO[bytes], process.stdout).fileno(), MAX_LINE)
        received += piece
        *lines, rest = received.split(b"\n")
        received[:] = rest
        if not piece or len(rest) > MAX_LINE:
            raise HostError(f"{name}: {_last_words(process)}", hint=_hint(process))
        for line in lines:
            said = launcher.hear(self._token, line)
            if said is None:  # a greeting, or output of the shell's start-up files
                log.debug("%s printed: %s", name, line[:200].decode(errors="replace"))
            elif "error" in said:
                raise HostError(f"{name}: {said['error']}", hint=said.get("hint"))
            elif "lacks" in said:
                self._delivery.send(cast(IO[bytes], process.stdin).fileno())
            elif "listens" in said:
                address = _address(name, said["listens"])
                self._begun.add(name)
                self._give_credentials(process, address)
            elif "address" in said:
                return _address(name, said["address"])
        return None

    def _give_credentials(self, process: subprocess.Popen[bytes], address: Address) -> None:
        identity = self._certify(address.names())
        with contextlib.suppress(BrokenPipeError):
            stdin = cast(IO[bytes], process.stdin)
            stdin.write(identity)
            stdin.flush()

    def stop(self) -> None:
        """End the workers and all that runs on them.

        Raises:
            HostError: workers of a session may go on, because their hosts cannot be reached; all
                others have ended.
        """
        if self._guarded:
            for process in self._processes:  # the end of its input ends each, so all end at once
                _close(process.stdin, process.stdout, process.stderr)
        else:
            for process in self._processes:
                process.kill()
                process.wait()
                _close(process.stdin, process.stdout, process.stderr)
            self._processes = [
                self._spawn(target, name, launcher.ENDED)
                for name, target in zip(self._names, self._targets, strict=True)
            ]
            for process in self._processes:
                _close(process.stdin)
        left: dict[str, str] = {}
        hint = INSTALL
        deadline = time.monotonic() + self._settings.start_timeout
        for name, process in zip(self._names, self._processes, strict=False):
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            # Guarded workers end with their connection, as soon as their hosts notice.
            unsure = process.returncode and not self._guarded and name in self._begun
            if unsure and (reason := self._failure(process)) is not None:
                left[name] = reason
                hint = _hint(process)
            _close(process.stdout, process.stderr)
        self._processes, self._hosts = [], []
        if left:
            reasons = "; ".join(dict.fromkeys(left.values()))
            raise HostError(f"workers may be left on {', '.join(left)}: {reasons}", hint=hint)

    def _failure(self, process: subprocess.Popen[bytes]) -> str | None:
        """Return why a process of ssh did not end a worker; None if no worker was started."""
        if process.returncode < 0:
            return f"no answer within {self._settings.start_timeout:g} s"
        for line in _read(process.stdout).splitlines():
            said = launcher.hear(self._token, line) or {}
            if "error" in said:
                return str(said["error"])
            if "lacks" in said:
                # Without an address, `up` was killed, maybe before it had sent wheelmount.
                gone = f"the copy of wheelmount that started them is gone from {said['lacks']}"
                if self._of_before:  # no later attempt could do better
                    log.warning("workers may be left: %s, or has another name", gone)
                    return None
                return gone if self._addresses else None
        return _last_words(process)

    def record(self) -> dict[str, Any]:
        """Return a record for ``resume``."""
        from wheelmount.hosts import bundle

        return {
            "targets": list(map(str, self._targets)),
            "token": self._token,
            "bundle": None if self._settings.python else self._bundle or bundle.key(),
            "settings": self._settings.changed(*OF_WORKERS),  # default paths are not those of hosts
            **super().record(),
        }

    @classmethod
    def resume(cls, record: dict[str, Any], settings: Settings) -> SshHosts:
        """Return hosts that another process left running."""
        if "settings" in record:
            usual = {name: getattr(Settings(), name) for name in OF_WORKERS}
            settings = replace(settings, **{**usual, **record["settings"]})
        hosts = cls(list(map(Target.parse, record["targets"])), settings, guarded=False)
        hosts._token = record["token"]
        hosts._bundle = record.get("bundle")
        hosts._of_before = "bundle" not in record
        hosts.recall(record)
        hosts._begun = set(hosts._names)
        return hosts


def _names(targets: Sequence[Target]) -> list[str]:
    """Return names for hosts: ssh's names, with a number if several hosts have the same name."""
    return distinct([called(target.host) for target in targets], range(len(targets)))


def _address(name: str, text: object) -> Address:
    try:
        return Address.parse(str(text))
    except InputError as error:
        raise HostError(f"{name}: {error.message}", hint=INSTALL) from None


def _close(*streams: IO[bytes] | None) -> None:
    for stream in streams:
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _read(stream: IO[bytes] | None) -> bytes:
    """Read what has come, not until the pipe's end: ssh's master, for one, may hold it open."""
    pipe, said = cast(IO[bytes], stream).fileno(), b""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        said = os.read(pipe, MAX_LINE)
    return said


def _last_words(process: subprocess.Popen[bytes]) -> str:
    """Return the last line of ssh's standard error, which usually tells why ssh failed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    if process.poll() is None:
        return "its output is too long and names no address of a worker"
    return last_words(_read(process.stderr), f"ssh ended with code {process.returncode}")


def _hint(process: subprocess.Popen[bytes]) -> str:
    if process.returncode in (255, -signal.SIGKILL):
        return "`ssh HOST true` must work without a question"
    return INSTALL
