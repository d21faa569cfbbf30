"""``Lab``: hosts on this machine, each with a network, a name, files and processes of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.testbed import network
from tests.testbed.init import Plan
from tests.testbed.space import CHECKOUT, TIMEOUT, Space
from wheelmount.errors import InputError, UnavailableError

LOGIN = "login"
"""The host that is there besides the numbered ones, for what a user runs."""

MOST = 64
"""Hosts of a lab at most."""


class Lab:
    """Hosts ``login``, ``host0``, ``host1``, … on one network of their own. A context manager.

    Each sees the machine's files, and what it writes is kept in memory for itself; ``/tmp``,
    ``/run``, ``/var/tmp`` and ``/dev/shm`` are empty at first. Where the machine has other file
    systems mounted, those are shared. The network leads nowhere else. All of it lies in namespaces
    that nobody outside sees and that end with the process that made them.

    Args:
        hosts: how many there are besides ``login``.
        rate: of each host's link, for either direction by itself, as ``tc`` knows it (``1gbit``);
            None for what the machine can do.
        shared: paths that are one and the same on all hosts and outside, as on a network file
            system. The checkout always is.
    """

    def __init__(
        self, hosts: int, rate: str | None = None, shared: Sequence[str | Path] = ()
    ) -> None:
        if not 1 <= hosts <= MOST:
            raise InputError(f"a lab of {hosts} hosts", hint=f"give a number from 1 to {MOST}")
        self.hosts = [f"host{n}" for n in range(hosts)]
        self.rate = rate
        self._shared = tuple(str(path) for path in (CHECKOUT, *shared))
        self._outer: Space | None = None
        self._spaces: dict[str, Space] = {}
        self._commands: list[subprocess.Popen[bytes]] = []
        self._at_end: list[Callable[[], object]] = []

    @property
    def names(self) -> list[str]:
        """All hosts, ``login`` first."""
        return [LOGIN, *self.hosts]

    def address(self, name: str) -> str:
        """IP address of a host."""
        return network.address(self.names.index(name))

    def pid(self, name: str) -> int:
        """First process of a host, as numbered outside: ``/proc/PID/root`` are its files.

        Raises:
            HostError: the host was killed.
        """
        space = self._spaces[name]
        space.check()
        return space.pid

    def start(self) -> None:
        """Make it.

        Raises:
            UnavailableError: this machine or user cannot.
            HostError: a host does not come up. Nothing is left.
        """
        if os.geteuid() != 0:
            raise UnavailableError("a lab of several hosts needs root", hint="run it with sudo")
        require("ip", "tc", "unshare", "nsenter", "setpriv")
        try:
            self._outer = outer = Space(Plan("outside"))
            outer.await_ready()
            names = "".join(f"{self.address(name)} {name}\n" for name in self.names)
            hosts = f"127.0.0.1 localhost\n{names}"
            for name in self.names:
                self._spaces[name] = Space(Plan(name, hosts, self._shared), outer)
            network.order("ip", network.make_bridge(), outer.pid)
            for name, space in self._spaces.items():
                space.await_ready()
                network.order("ip", network.make_cable(name, space.pid), outer.pid)
                network.order("ip", network.make_card(self.address(name)), space.pid)
            if self.rate is not None:
                self.shape(self.rate)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it and all that runs in it. May be called twice.

        Raises:
            HostError: something in it does not end.
        """
        outer, self._outer = self._outer, None
        spaces, self._spaces = self._spaces, {}
        if outer is not None:
            outer.kill()
        for space in spaces.values():  # they are gone; what was opened for them is closed
            space.kill()
        for command in self._commands:  # likewise
            command.wait(TIMEOUT)
        self._commands.clear()
        while self._at_end:
            self._at_end.pop()()

    def at_end(self, clean: Callable[[], object]) -> None:
        """Have something called when all hosts have ended."""
        self._at_end.append(clean)

    def popen(
        self, name: str, argv: Sequence[str | Path], **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host; it ends with the host at the latest.

        Args:
            name: the host.
            argv: program and arguments.
            options: of ``subprocess.Popen``. Unless said otherwise the command gets no input and
                runs in the checkout.

        Raises:
            HostError: the host was killed.
        """
        process = subprocess.Popen(self._command(name, argv, options), **options)
        self._commands.append(process)
        return process

    def run(
        self, name: str, argv: Sequence[str | Path], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and wait for it.

        Args:
            name: the host.
            argv: program and arguments.
            options: of ``subprocess.run``. Unless said otherwise the output is captured as text,
                and 60 seconds are the most it may take.

        Raises:
            HostError: the host was killed.
            subprocess.TimeoutExpired: it took longer, and was ended.
            subprocess.CalledProcessError: it failed, if ``check`` is given.
        """
        if "stdout" not in options and "stderr" not in options:
            options.setdefault("capture_output", True)
        options = {"timeout": 60, "text": True, "check": False, **options}
        done: subprocess.CompletedProcess[str] = subprocess.run(
            self._command(name, argv, options), **options
        )
        return done

    def _command(self, name: str, argv: Sequence[str | Path], options: dict[str, Any]) -> list[str]:
        options.setdefault("stdin", subprocess.DEVNULL)
        cwd = options.pop("cwd", None) or CHECKOUT
        return self._spaces[name].command([str(word) for word in argv], Path(cwd))

    def shape(self, rate: str | None, *names: str) -> None:
        """Limit what hosts receive and send, each of the two to ``rate``; None for no limit.

        Args:
            rate: as ``tc`` knows it, such as ``1gbit``.
            names: of the hosts; default all that are there.
        """
        for name in names or [name for name, space in self._spaces.items() if space.alive]:
            network.order("tc", network.make_rate(network.CARD, rate), self.pid(name))
            network.order("tc", network.make_rate(name, rate), self.outer)
            network.order("ip", network.make_packets(rate), self.pid(name))

    def unplug(self, name: str) -> None:
        """Pull a host's cable: nothing reaches it or comes from it, and nobody is told."""
        network.order("ip", f"link set {name} down\n", self.outer)

    def plug(self, name: str) -> None:
        """Put it in again."""
        network.order("ip", f"link set {name} up\n", self.outer)

    def kill(self, name: str) -> None:
        """End a host with all its processes, as a crash would; it does not come back.

        Raises:
            HostError: it does not end.
        """
        self._spaces[name].kill()

    @property
    def outer(self) -> int:
        """First process of the namespaces that all hosts lie in, and the bridge between them."""
        assert self._outer is not None
        return self._outer.pid

    def __enter__(self) -> Lab:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()


def require(*programs: str) -> None:
    """Check that programs are installed.

    Raises:
        UnavailableError: some are not; the message names them.
    """
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise UnavailableError(
            f"not installed: {', '.join(missing)}", hint="run examples/setup.sh --dev as root"
        )
