"""A set of namespaces with the first process that holds them open."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.testbed import init
from wheelmount.errors import HostError

CHECKOUT = Path(__file__).parents[2]

TIMEOUT = 20.0
"""Seconds that namespaces may take to come up, or to end."""

KINDS = "--mount", "--uts", "--ipc", "--net", "--pid"


class Space:
    """Namespaces for mounts, names, messages, network and processes, all of them new.

    Made at once; ``await_ready`` when their first process has arranged them.

    Args:
        plan: what that process is to arrange.
        within: namespaces to make these in; those end these when they end.
    """

    def __init__(self, plan: init.Plan, within: Space | None = None) -> None:
        self.name = plan.name
        self.pid = 0
        """Their first process, as the caller's own namespace numbers it."""
        # "slave": what is unmounted outside is not held here, and nothing ever goes the other way.
        command = ["unshare", *KINDS, "--fork", "--kill-child", "--propagation", "slave", "--"]
        # By itself and without site, which would be most of the time that it takes.
        command += [sys.executable, "-I", "-S", init.__file__, plan.encode()]
        self._process = subprocess.Popen(
            command if within is None else within.command(command, CHECKOUT),
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,  # never written to: its end is the sign to end
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a ^C is for the command that uses the lab
        )

    def await_ready(self) -> None:
        """Wait until they are arranged.

        Raises:
            HostError: they are not, and why.
        """
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        if not select.select([process.stdout], [], [], TIMEOUT)[0]:
            self.kill()
            raise HostError(f"{self.name} did not come up within {TIMEOUT:g} s")
        if process.stdout.readline() != b"ready\n":
            said = process.stderr.read().decode(errors="replace").strip().splitlines()
            self.kill()
            raise HostError(
                f"{self.name} did not come up: {said[-1] if said else 'it said nothing'}",
                hint="the lab needs root, and the rights to make namespaces and overlays",
            )
        # It has no children yet: it is the last of the chain nsenter, unshare, init.
        self.pid = psutil.Process(process.pid).children(recursive=True)[-1].pid

    @property
    def alive(self) -> bool:
        """Whether they still are there."""
        return self._process.poll() is None

    def check(self) -> None:
        """Check that they exist: otherwise their number may be that of another process by now.

        Raises:
            HostError: they have ended.
        """
        if not self.alive:
            raise HostError(f"{self.name} is not there any more")

    def command(self, argv: Sequence[str], cwd: Path) -> list[str]:
        """The command that runs another in these namespaces, and ends it when itself is ended.

        Raises:
            HostError: they have ended.
        """
        self.check()
        enter = ["nsenter", "--target", str(self.pid), *KINDS, "--", "env", f"--chdir={cwd}"]
        return [*enter, "setpriv", "--pdeathsig", "KILL", "--", *argv]

    def kill(self) -> None:
        """End them with all processes in them, as a crash would.

        Raises:
            HostError: a process in them does not end.
        """
        if self.pid and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise HostError(f"{self.name} does not end within {TIMEOUT:g} s") from None
