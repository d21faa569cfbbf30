"""What a program of the user's finds of itself and of Monarch beside wheelmount."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT

pytestmark = pytest.mark.hosts

BEGIN = """
import os, sys, time
os.environ["HYPERACTOR_TLS_CA"] = "the user's own"
before = dict(os.environ)
if "early" in sys.argv:
    import monarch.actor
import wheelmount
assert "early" in sys.argv or "monarch" not in sys.modules

import psutil
from monarch.actor import Actor, endpoint, this_host
import monarch.actor
from wheelmount import config, remotemount
from wheelmount.errors import HostError, WaitError
from wheelmount.hosts import runtime
from wheelmount.hosts.local import LocalHosts
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Commands

class Theirs(Actor):
    @endpoint
    async def fail(self) -> None:
        raise ValueError("of the user's own")

def same():
    now = dict(os.environ)
    now.pop("HYPERACTOR_EXECUTION_ID", None)  # Monarch's own, which it sets when it is imported
    assert now == {**before}, {k: v for k, v in now.items() if before.get(k) != v}

same()
"""


def _run(
    body: str, source: Path, workplace: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    program = workplace / "program.py"
    program.write_text(BEGIN + textwrap.dedent(body))
    switches = "HYPERACTOR_", "MONARCH_"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(switches)}
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env={
            **environment,
            "SOURCE": str(source),
            "MNT": str(workplace / "mnt-{host}"),
            "CHECKOUT": str(CHECKOUT),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    print(done.returncode, done.stdout, done.stderr)
    return done


@pytest.mark.fuse
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_program_has_its_environment_and_its_hook_back(
    source: Path, workplace: Path, when: str
) -> None:
    body = """
    hook = monarch.actor.unhandled_fault_hook
    with (
        LocalHosts(1, namespaces=False) as hosts,
        remotemount(hosts, os.environ["SOURCE"], os.environ["MNT"]) as mount,
    ):
        same()
        mount.wait(60)
        same()
    same()
    from wheelmount.hosts.address import Address
    from wheelmount.hosts.credentials import Authority
    runtime.identify(Authority.make().issue(Address("tls", "127.0.0.1", 0).names()))
    same()
    runtime.stop()
    assert monarch.actor.unhandled_fault_hook is hook
    """
    assert _run(body, source, workplace, when).returncode == 0


@pytest.mark.fuse
def test_a_failure_of_the_user_s_own_ends_the_program_as_ever(
    source: Path, workplace: Path
) -> None:
    fail = """
    {}
    actor = this_host().spawn_procs({{"procs": 1}}).spawn("theirs", Theirs)
    actor.fail.broadcast()
    for _ in range(600):  # not in one: Monarch's interrupt does not end a sleep
        time.sleep(0.1)
    """
    mount = 'm = remotemount(this_host(), os.environ["SOURCE"], os.environ["MNT"]); m.open()'
    hosts = "hosts = LocalHosts(1, namespaces=False); hosts.start()"
    alone = _run(fail.format("pass"), source, workplace)
    assert alone.returncode != 0
    assert "of the user's own" in alone.stderr
    for beside in (mount, hosts):
        done = _run(fail.format(beside), source, workplace)
        assert done.returncode == alone.returncode
        assert "of the user's own" in done.stderr


def test_a_host_without_an_agent_ends_the_program_only_if_it_is_the_user_s(
    source: Path, workplace: Path
) -> None:
    """The failure is a recorded one: a worker listens for some milliseconds before it has an agent,
    and nothing outside it can make that time longer."""
    body = """
    sys.path.append(os.environ["CHECKOUT"])
    from tests.hosts.lost import Lost

    faults = []
    monarch.actor.unhandled_fault_hook = faults.append
    with LocalHosts(1, namespaces=False) as hosts:
        (address,) = hosts.addresses
        monarch.actor.unhandled_fault_hook(Lost(address))
        assert not faults
        monarch.actor.unhandled_fault_hook(Lost(address + "0"))
        assert len(faults) == 1
    """
    assert _run(body, source, workplace).returncode == 0


@pytest.mark.fuse
def test_a_loss_of_wheelmount_s_own_does_not_end_the_program(source: Path, workplace: Path) -> None:
    body = """
    faults = []
    monarch.actor.unhandled_fault_hook = faults.append
    with (
        LocalHosts(2, namespaces=False) as hosts,
        Commands(list(hosts), 30) as commands,
        remotemount(hosts, os.environ["SOURCE"], os.environ["MNT"]) as mount,
    ):
        mount.wait(60)
        theirs = this_host().spawn_procs({"procs": 1}).spawn("theirs", Theirs)
        for process in psutil.Process(hosts.pids[0]).children():
            if "wheelmount.mount.serve.server" not in process.cmdline():
                process.kill()
        results = commands.run({host.name: Command(("sleep", "0.1")) for host in hosts})
        # Monarch does not always tell that the answer to a call cannot come any more.
        assert isinstance(results["host0"], (HostError, WaitError)), results
        assert results["host1"].code == 0, results
        time.sleep(2)  # for what else Monarch has to say
        assert not faults
        theirs.fail.broadcast()
        deadline = time.monotonic() + 60
        while not faults and time.monotonic() < deadline:
            time.sleep(0.05)
        (fault,) = faults
        assert fault.mesh_name.startswith("theirs")
    """
    assert _run(body, source, workplace).returncode == 0


def test_many_hosts_are_asked_less_often_whether_they_run(source: Path, workplace: Path) -> None:
    body = """
    from monarch.config import get_global_config

    def patience():
        return get_global_config()["get_proc_state_max_idle"]

    monarch.actor.context()
    runtime.start()
    usual = patience()
    runtime.expect(runtime.AT_ONCE)
    assert patience() == usual == "30s"
    runtime.expect(4 * runtime.AT_ONCE)
    assert patience() == "31s"
    runtime.expect(1)
    assert patience() == "31s", "the others may still be there"
    same()
    os.environ[runtime.SILENCE] = "7s"
    runtime.expect(8 * runtime.AT_ONCE)
    assert patience() == "7s", "as the user has set it"
    runtime.stop()
    """
    assert _run(body, source, workplace, "early").returncode == 0
