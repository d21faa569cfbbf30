"""Servers on hosts of the lab."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.testbed.lab import Lab
from wheelmount.errors import HostError
from wheelmount.hosts.address import OPEN

TIMEOUT = 30.0
"""Seconds a server may take until it listens."""

WORKER_PORT = 26600

_LISTENS = "0A"


class Service:
    """A server on a host, started at once; it ends with the host at the latest.

    Args:
        lab: of the host.
        host: its name.
        argv: the server and its arguments.
        port: of TCP, at which it will listen.
        options: of ``Lab.popen``.
    """

    def __init__(
        self, lab: Lab, host: str, argv: Sequence[str | Path], port: int, **options: Any
    ) -> None:
        self.host = host
        self.port = port
        process = Path(f"/proc/{lab.pid(host)}")
        log = f"/var/log/service-{port}"
        self._log = process / "root" / log.lstrip("/")
        self._tables = [process / "net" / name for name in ("tcp", "tcp6")]
        quiet = ["sh", "-c", f'exec "$@" >{log} 2>&1', "sh"]  # on the host, and gone with it
        self.process = lab.popen(host, [*quiet, *argv], **options)

    def await_port(self) -> None:
        """Wait until it listens.

        Raises:
            HostError: it does not.
        """
        deadline = time.monotonic() + TIMEOUT
        while not self._listens():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise HostError(f"{self.host} does not listen at {self.port}: {self.output()}")
            time.sleep(0.02)

    def output(self) -> str:
        """What it printed until now; nothing where its host is gone."""
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")
        return ""

    def _listens(self) -> bool:
        for table in self._tables:
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == self.port:
                    return True
        return False


def start_workers(lab: Lab, scheme: str = OPEN, **options: Any) -> list[Service]:
    """Have all hosts but ``login`` wait for clients of wheelmount.

    Args:
        lab: of the hosts.
        scheme: of their addresses.
        options: of ``Lab.popen``.

    Raises:
        HostError: one does not.
    """
    worker = [sys.executable, "-m", "wheelmount.hosts.worker"]
    addresses = {host: f"{scheme}://{lab.address(host)}:{WORKER_PORT}" for host in lab.hosts}
    workers = [
        Service(lab, host, [*worker, address], WORKER_PORT, **options)
        for host, address in addresses.items()
    ]
    for each in workers:
        each.await_port()
    return workers


def workers_spec(lab: Lab, scheme: str = OPEN) -> str:
    """The workers of a lab, as ``--hosts`` takes them."""
    return f"{scheme}://" + ",".join(f"{host}:{WORKER_PORT}" for host in lab.hosts)
