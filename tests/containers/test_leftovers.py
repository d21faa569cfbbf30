"""What a killed container leaves is told from one that runs, and can be cleared away."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import NOBODY, Cli
from tests.containers.test_running import processes, wait_until
from wheelmount.containers import leftovers
from wheelmount.containers.order import PROGRAM, Order

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]


def test_killed_containers_are_cleared_away(cli: Cli, sif: Path, workplace: Path) -> None:
    runtime = workplace / "runtime" / f"wheelmount-{os.getuid()}"
    state, mark = str(workplace / "state"), "17.3205"
    order = Order("n1", str(sif), "mine", state, str(runtime.parent))
    (workplace / "note").write_bytes(order.encode(["sleep", mark]))
    command = [sys.executable, *PROGRAM[1:], str(workplace / "note")]
    with subprocess.Popen(command) as owner:
        wait_until(lambda: any("/sleep" in line for line in processes(mark)))
        assert leftovers.find(runtime) == [], "it is in use"
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not processes(mark))
    wait_until(lambda: not list(runtime.glob(f"{leftovers.PREFIX}*")))
    left = runtime / f"{leftovers.PREFIX}dead"  # as of one whose guard was killed as well
    (left / "scratch" / "closed").mkdir(parents=True, mode=0)
    assert cli("exec", "--instance", "one", "--image", sif, "--", "true").returncode == 0
    assert leftovers.find(runtime) == [left]
    os.utime(left, (0, time.time() - 3600))
    fixed = cli("doctor", "--fix")
    assert f"cleared: a container that is gone: {left}" in fixed.stdout
    assert leftovers.find(runtime) == []
    assert cli("instance", "stop", "one").returncode == 0


def test_nothing_is_left_for_sure_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{leftovers.PREFIX}one").mkdir()
    assert leftovers.find(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with leftovers.claimed(tmp_path):
        assert leftovers.find(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
@pytest.mark.parametrize("instance", [None, "one"])
def test_a_host_chooses_its_own_private_directory(
    instance: str | None, cli: Cli, sif: Path, workplace: Path
) -> None:
    """Where another user has made, on a host, one of the name that the client's has."""
    runtime = workplace / "host"
    squatted = runtime / f"wheelmount-{os.getuid()}"
    squatted.mkdir(parents=True, mode=0o700)
    os.chown(squatted, NOBODY, NOBODY)
    state = str(workplace / "state")
    order = Order("n1", str(sif), "mine", state, str(runtime), instance=instance)
    (workplace / "note").write_bytes(order.encode(["echo", "ran"]))
    command = [sys.executable, *PROGRAM[1:], str(workplace / "note")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if instance is not None:
        environment = {**os.environ, "WHEELMOUNT_RUNTIME_DIR": str(runtime)}
        assert cli("instance", "stop", instance, env=environment).returncode == 0
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert not list(squatted.iterdir())
