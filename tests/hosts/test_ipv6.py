"""Hosts that are reached by IPv6, over a network and by ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import LOGIN, Lab
from tests.testbed.service import WORKER_PORT, Service
from tests.testbed.sshd import start_sshd
from tests.testbed.traces import Traces

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

PATH = "/mnt/tree"

SHOWN = "hostname; cat .hidden; sha256sum <blocks"


def _own(lab: Lab, name: str) -> str:
    return f"fd00::{lab.names.index(name) + 1}"


@pytest.fixture(scope="module")
def lab(shared_source: Path) -> Iterator[Lab]:
    before = Traces()
    with Lab(2, shared=[shared_source.parent]) as made:
        for name in made.names:
            add = ["ip", "-6", "address", "add", f"{_own(made, name)}/64", "dev", "eth0", "nodad"]
            made.run(name, add, check=True)
        start_sshd(made)
        for name in made.hosts:
            trust = f"sed 's/^{name} /{_own(made, name)} /;t;d' ~/.ssh/known_hosts"
            known = f"{trust} >~/.ssh/new; cat ~/.ssh/new >>~/.ssh/known_hosts; rm ~/.ssh/new"
            made.run(LOGIN, ["sh", "-c", known], check=True)
        traces = Traces(besides=before)
        yield made
    assert traces.left() == []


def _run(lab: Lab, source: Path, spec: str) -> subprocess.CompletedProcess[str]:
    words = ["run", "--hosts", spec, "--mntpoint", PATH, str(source), "-"]
    command = [sys.executable, "-m", "wheelmount.cli.main", *words]
    environment = {**os.environ, "WHEELMOUNT_STATE_DIR": str(source.parent / "state")}
    return lab.run(LOGIN, command, stdin=None, input=SHOWN, env=environment, timeout=120)


def _shown(lab: Lab, source: Path) -> str:
    digest = subprocess.run(
        ["sha256sum"], input=(source / "blocks").read_bytes(), capture_output=True, check=True
    )
    return "".join(
        f"== {_own(lab, host).replace(':', '-')} ==\n{host}\nhidden\n{digest.stdout.decode()}"
        for host in lab.hosts
    )


def test_ssh_goes_to_addresses_in_brackets(lab: Lab, source: Path) -> None:
    first, second = (_own(lab, host) for host in lab.hosts)
    done = _run(lab, source, f"ssh:[{first}],root@[{second}]:22")
    assert (done.returncode, done.stdout) == (0, _shown(lab, source)), done.stderr


def test_workers_listen_at_addresses_in_brackets(lab: Lab, source: Path) -> None:
    state = {**os.environ, "WHEELMOUNT_STATE_DIR": str(source.parent / "state")}
    addresses = [f"tls://[{_own(lab, host)}]:{WORKER_PORT}" for host in lab.hosts]
    worker = [sys.executable, "-m", "wheelmount.cli.main", "worker"]
    services = [
        Service(lab, host, [*worker, address], WORKER_PORT, env=state)
        for host, address in zip(lab.hosts, addresses, strict=True)
    ]
    for service in services:
        service.await_port()
    done = _run(lab, source, ",".join(addresses))
    assert (done.returncode, done.stdout) == (0, _shown(lab, source)), done.stderr
    assert "10.77" not in done.stderr
