"""``ssh:a,b``: hosts to which the user has access by ssh, which starts workers there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import selectors
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from wheelmount import variables
from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError
from wheelmount.hosts import launcher
from wheelmount.hosts.address import Address, bare, bracketed, called
from wheelmount.hosts.network import INSTALL, NetworkHosts
from wheelmount.progress import SILENT, Progress

log = logging.getLogger("wheelmount")

MOST_HEARD = 64 << 10
"""Bytes of a line that a host may say."""

POLL_INTERVAL = 0.5
"""Seconds between looks at whether hosts still take what they are sent."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where ssh goes to.

    Attributes:
        host: name or alias of ssh's own configuration.
        user: there; None for what ssh takes.
        port: of sshd; None likewise.
    """

    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``[USER@]HOST[:PORT]``; an address of IPv6 stands in brackets.

        Raises:
            InputError: it is something else.
        """
        host = r"\w[\w.-]*|\[[0-9A-Fa-f:.]+\]"
        match = re.fullmatch(rf"(?:(\w[\w.-]*)@)?({host})(?::(\d{{1,5}}))?", text, re.ASCII)
        if match is None:
            raise InputError(f"{text!r} is no host for ssh", hint="give ssh:[USER@]HOST[:PORT],…")
        return cls(bare(match[2]), match[1], int(match[3]) if match[3] else None)

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"{user}{bracketed(self.host)}" + (f":{self.port}" if self.port else "")

    def command(self, argv: Sequence[str], timeout: float) -> list[str]:
        """The command that runs another there, with no questions asked."""
        command = [
            "ssh",
            "-T",
            "-o",
            "BatchMode=yes",
            "-o",
            f"ConnectTimeout={max(1, int(timeout))}",
        ]
        command += ["-o", "ServerAliveInterval=15"]  # a host that is cut off ends it in 45 s
        if self.port:
            command += ["-p", str(self.port)]
        if self.user:
            command += ["-l", self.user]
        return [*command, "--", self.host, shlex.join(argv)]


class SshHosts(NetworkHosts):
    """Hosts on which ssh starts a worker each, and brings wheelmount where there is none.

    Args:
        targets: where.
        settings: in force; ``python`` is the Python there.
        guarded: end them when this process ends. Else they stay until ``stop``.
        apart: give those on this machine a mount namespace each.
        progress: told about what is brought.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        settings: Settings,
        *,
        guarded: bool,
        apart: bool = False,
        progress: Progress = SILENT,
    ) -> None:
        from wheelmount.hosts.bundle import Delivery  # here, as it takes long to load

        super().__init__((), settings)
        self._apart = apart
        self._delivery = Delivery(settings, progress)
        self._targets = list(targets)
        self._names = _names(targets)
        self._guarded = guarded
        self._token = secrets.token_hex(4)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start workers, all at once, and wait until each answers."""
        self._start_authority()
        mode = launcher.GUARDED if self._guarded else launcher.DETACHED
        try:
            for name, target in zip(self._names, self._targets, strict=True):
                self._processes.append(self._spawn(target, name, mode))
            self._addresses = self._await_addresses()
            self.check(self._settings.start_timeout)  # they were about to listen
            self.attach()
        except BaseException:
            self.stop()
            raise

    def _spawn(self, target: Target, name: str, mode: str) -> subprocess.Popen[bytes]:
        argv = launcher.command(self._settings, self._token, name, 0, mode, apart=self._apart)
        command = target.command(argv, self._settings.start_timeout)
        log.debug("run: %s", shlex.join(command))
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables.for_programs(),
            start_new_session=True,  # a ^C is for the client, which ends it in order
        )

    def _await_addresses(self) -> list[Address]:
        timeout = self._settings.start_timeout
        deadline = time.monotonic() + timeout
        found: dict[str, Address] = {}
        heard = {name: bytearray() for name in self._names}
        with selectors.DefaultSelector() as selector, self._delivery:
            for name, process in zip(self._names, self._processes, strict=True):
                stdout = cast(IO[bytes], process.stdout)
                selector.register(stdout, selectors.EVENT_READ, (name, process))
            while selector.get_map():
                ready = selector.select(min(POLL_INTERVAL, max(0, deadline - time.monotonic())))
                deadline = max(deadline, self._delivery.since + timeout)
                if not ready and time.monotonic() > deadline:
                    missing = [name for name in self._names if name not in found]
                    raise HostError(
                        f"{', '.join(missing)}: no worker within {timeout:g} s",
                        hint="raise WHEELMOUNT_START_TIMEOUT, or try `ssh` by hand",
                    )
                for key, _ in ready:
                    name, process = key.data
                    address = self._hear(name, process, heard[name])
                    if address is not None:
                        selector.unregister(key.fileobj)
                        found[name] = address
        return [found[name] for name in self._names]

    def _hear(
        self, name: str, process: subprocess.Popen[bytes], heard: bytearray
    ) -> Address | None:
        """Take what a host says next; gives its address when its worker is about to listen.

        Args:
            name: of the host.
            process: ssh.
            heard: of a line that is not whole yet.

        Raises:
            HostError: the host says that it cannot, or nothing that can be understood.
        """
        piece = os.read(cast(IO[bytes], process.stdout).fileno(), MOST_HEARD)
        heard += piece
        *lines, rest = heard.split(b"\n")
        heard[:] = rest
        if not piece or len(rest) > MOST_HEARD:
            raise HostError(f"{name}: {_last_words(process)}", hint=_hint(process))
        for line in lines:
            said = launcher.hear(self._token, line)
            if said is None:  # a greeting, or what a shell reads as it starts
                log.debug("%s says: %s", name, line[:200].decode(errors="replace"))
            elif "error" in said:
                raise HostError(f"{name}: {said['error']}", hint=said.get("hint"))
            elif "lacks" in said:
                self._delivery.send(cast(IO[bytes], process.stdin).fileno())
            elif "listens" in said:
                self._give_credentials(process, _address(name, said["listens"]))
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
        """End them and all that runs on them."""
        if self._guarded:
            for process in self._processes:  # all at once: the end of its input ends each
                for stream in (process.stdin, process.stdout, process.stderr):
                    _close(stream)
        else:
            for process in self._processes:
                process.kill()
            self._processes = [
                self._spawn(target, name, launcher.ENDED)
                for name, target in zip(self._names, self._targets, strict=True)
            ]
            for process in self._processes:
                _close(process.stdin)
        for process in self._processes:
            try:
                process.wait(self._settings.start_timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdout, process.stderr):
                _close(stream)
        self._processes, self._hosts = [], []

    def leave(self) -> dict[str, Any]:
        """Let go of them without stopping them; they must not be guarded."""
        own = {"targets": list(map(str, self._targets)), "token": self._token}
        return super().leave() | own

    @classmethod
    def resume(cls, record: dict[str, Any], settings: Settings) -> SshHosts:
        """Hosts that another process left."""
        hosts = cls(list(map(Target.parse, record["targets"])), settings, guarded=False)
        hosts._token = record["token"]
        hosts.recall(record)
        return hosts

    def __len__(self) -> int:
        return len(self._targets)


def _names(targets: Sequence[Target]) -> list[str]:
    """What to call hosts: as ssh does, with a number where several have one name."""
    times = Counter(target.host for target in targets)
    return [
        called(target.host) if times[target.host] == 1 else f"{called(target.host)}-{number}"
        for number, target in enumerate(targets)
    ]


def _address(name: str, text: object) -> Address:
    try:
        return Address.parse(str(text))
    except InputError as error:
        raise HostError(f"{name}: {error.message}", hint=INSTALL) from None


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()


def _last_words(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    if process.poll() is None:
        return "it says too much, and not where it listens"
    # What the pipe holds, and no more: others may have it too, as ssh's own master process.
    stderr, said = cast(IO[bytes], process.stderr).fileno(), b""
    os.set_blocking(stderr, False)
    with contextlib.suppress(BlockingIOError):
        said = os.read(stderr, MOST_HEARD)
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ssh ended with code {process.returncode}"


def _hint(process: subprocess.Popen[bytes]) -> str:
    if process.returncode == 255:
        return "`ssh HOST true` must work without a question"
    return INSTALL
