"""Real servers on the lab's hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.testbed import LOGIN, Lab
from tests.testbed.service import Service
from tests.testbed.slurm import start_slurm
from tests.testbed.sshd import start_sshd
from wheelmount.errors import HostError

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(4) as made:
        yield made


def test_ssh_goes_from_any_host_to_any_other(lab: Lab) -> None:
    start_sshd(lab)
    hop = ["ssh", "-o", "BatchMode=yes"]
    done = lab.run(LOGIN, [*hop, "host0", "hostname; ssh -o BatchMode=yes host3 hostname"])
    assert (done.stdout.split(), done.returncode) == (["host0", "host3"], 0), done.stderr
    done = lab.run(LOGIN, [*hop, lab.address("host2"), "exit 3"])
    assert done.returncode == 3, done.stderr


def test_slurm_runs_on_all_nodes(lab: Lab) -> None:
    start_slurm(lab)
    done = lab.run(LOGIN, ["srun", "--nodes", "4", "hostname"])
    assert sorted(done.stdout.split()) == lab.hosts, done.stderr
    batch = ["sbatch", "--wait", "--nodes", "2", "--output", "/dev/null"]
    done = lab.run(LOGIN, [*batch, "--wrap", "exit 4"])
    assert done.returncode == 4, done.stderr


def test_a_server_that_does_not_listen_says_why(lab: Lab) -> None:
    service = Service(lab, "host0", ["sh", "-c", "echo no such thing >&2; exit 1"], 7001)
    with pytest.raises(HostError, match="host0 does not listen at 7001: no such thing"):
        service.await_port()
