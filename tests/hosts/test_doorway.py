"""Callers that show no certificate take neither descriptors nor disks."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import LOGIN, Lab
from tests.testbed.service import WORKER_PORT, Service
from wheelmount.hosts import doorway
from wheelmount.hosts.address import SECURE

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

CALLERS = 1200

CALL = """
import socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
calls = []
for _ in range(count):
    try:
        calls.append(socket.create_connection((host, port), 10))
    except OSError:
        pass
print(len(calls), flush=True)
sys.stdin.read()
"""

LIMIT = 1024


@pytest.fixture(scope="module")
def lab(shared_source: Path) -> Iterator[Lab]:
    with Lab(1, shared=[shared_source.parent]) as made, pytest.MonkeyPatch.context() as environment:
        environment.setenv("WHEELMOUNT_STATE_DIR", str(shared_source.parent / "state"))
        yield made


def test_silent_callers_keep_nobody_out(lab: Lab, source: Path) -> None:
    address = f"{SECURE}://{lab.address('host0')}:{WORKER_PORT}"
    command = ["prlimit", f"--nofile={LIMIT}:{LIMIT}", sys.executable, "-m"]
    worker = Service(lab, "host0", [*command, "wheelmount.hosts.worker", address], WORKER_PORT)
    worker.await_port()
    call = [sys.executable, "-c", CALL, lab.address("host0"), str(WORKER_PORT), str(CALLERS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with lab.popen(LOGIN, call, **pipes) as callers:
        assert callers.stdout is not None
        assert int(callers.stdout.readline()) > LIMIT
        run = [sys.executable, "-m", "wheelmount.cli.main", "run", "--hosts", address]
        run += ["--mntpoint", "/mnt/tree", str(source), "-"]
        done = lab.run(LOGIN, run, stdin=None, input="echo ran")
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ran"]), done.stderr
        callers.communicate(b"")
    assert len(worker.output()) < 64 << 10


def test_who_says_nothing_is_hung_up_on_in_time() -> None:
    door = doorway.Doorway()
    with socket.create_server(("127.0.0.1", 0)) as server:
        pairs = []
        for _ in range(doorway.MOST + 2):
            caller = socket.create_connection(server.getsockname()[:2])
            accepted = server.accept()[0]
            pairs.append((caller, accepted))
            door.take(accepted.fileno(), "here")
            if len(pairs) == 2:
                caller.sendall(bytes(doorway.SHOWN))  # as much as a certificate takes
                accepted.recv(doorway.SHOWN)
        first, shown, second, *others = (caller for caller, _ in pairs)
        assert first.recv(1) == b""  # the oldest of too many
        for caller in (shown, second, others[-1]):
            caller.settimeout(0)
            with pytest.raises(BlockingIOError):
                caller.recv(1)
        time.sleep(0.05)
        door.sweep(0.01)
        assert others[-1].recv(1) == b""
        with pytest.raises(BlockingIOError):
            shown.recv(1)
        for pair in pairs:
            for end in pair:
                end.close()
