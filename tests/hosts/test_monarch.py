"""Workers and a client that a Monarch program starts by itself, over a network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import LOGIN, Lab
from tests.testbed.service import WORKER_PORT, Service

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""

CLIENT = """
import json, os, sys
from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint

class Reader(Actor):
    @endpoint
    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

enable_transport(sys.argv[1])
hosts = attach_to_workers(ca="trust_all_connections", workers=sys.argv[2].split(","))
from wheelmount import remotemount
with remotemount(hosts, sys.argv[3], "/mnt/own") as mount:
    mount.wait(120)
    readers = hosts.spawn_procs({"gpus": 1}).spawn("reader", Reader)
    read = readers.read.call("/mnt/own/.hidden").get(timeout=60)
    deliveries = [each["delivery"] for each in mount.status().values()]
    print(json.dumps([sorted(map(bytes.decode, read.values())), deliveries]), flush=True)
os._exit(0)
"""


@pytest.fixture
def lab(shared_source: Path) -> Iterator[Lab]:
    with Lab(3, shared=[shared_source.parent]) as made:
        addresses = [f"tcp://{made.address(host)}:{WORKER_PORT}" for host in made.hosts]
        for host, address in zip(made.hosts, addresses, strict=True):
            worker = Service(made, host, [sys.executable, "-c", WORKER, address], WORKER_PORT)
            worker.await_port()
        yield made


def test_bytes_come_by_streams_at_the_addresses_of_the_program_s_own_mesh(
    lab: Lab, source: Path
) -> None:
    (source / "much").write_bytes(bytes(range(256)) * (64 << 10))
    try:
        workers = ",".join(f"tcp://{lab.address(host)}:{WORKER_PORT}" for host in lab.hosts)
        where = [f"tcp://{lab.address(LOGIN)}:0", workers, str(source)]
        command = [sys.executable, "-c", CLIENT, *where]
        done = lab.run(LOGIN, command, timeout=180)
    except subprocess.TimeoutExpired as error:
        pytest.fail(str(error.stderr))
    finally:
        (source / "much").unlink()
    read, deliveries = json.loads(done.stdout)
    assert read == ["hidden\n"] * 3, done.stderr
    for each in deliveries:
        assert set(each["ways"]) == {"tcp"}, "not in messages of Monarch"
    assert any(set(each["received"]) - {"client"} for each in deliveries), "hosts reach each other"
