"""What a killed container leaves is told from one that runs, and can be cleared away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import NOBODY, Cli
from tests.containers.test_running import processes, wait_until
from wheelmount import shared
from wheelmount.containers import leftovers
from wheelmount.containers.instance import Instance
from wheelmount.containers.order import PROGRAM, Order
from wheelmount.errors import ContainerError

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
        assert (next(runtime.glob(f"{leftovers.PREFIX}*")) / shared.MACHINE).exists()
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not processes(mark))
    wait_until(lambda: not list(runtime.glob(f"{leftovers.PREFIX}*")))
    left = runtime / f"{leftovers.PREFIX}dead"  # as of one whose guard was killed as well
    (left / "scratch" / "closed").mkdir(parents=True, mode=0)
    assert cli("exec", "--instance", "one", "--image", sif, "--", "true").returncode == 0
    assert (Instance.all(runtime)[0].path / shared.MACHINE).exists()
    assert leftovers.find(runtime) == [left]
    os.utime(left, (0, time.time() - 3600))
    fixed = cli("doctor", "--fix")
    assert f"cleared: a container that is gone: {left}" in fixed.stdout
    assert leftovers.find(runtime) == []
    assert cli("instance", "stop", "one").returncode == 0


def test_containers_of_another_machine_are_left_alone(tmp_path: Path) -> None:
    """A network file system may lock directories for one machine alone."""
    container = tmp_path / f"{leftovers.PREFIX}one"
    instance = Instance(tmp_path, "one", "host0")
    for folder in (container, instance.path):
        folder.mkdir(parents=True)
    for folder in (tmp_path, instance.path.parent, instance.path.parents[1]):
        folder.chmod(0o700)
    with leftovers.claimed(container):
        assert not shared.elsewhere(container)
    assert leftovers.find(tmp_path) == [container, instance.path]
    for folder in (container, instance.path):
        (folder / shared.MACHINE).write_text("another\n")
    assert leftovers.find(tmp_path) == []
    with pytest.raises(ContainerError, match="was started on another machine"):
        instance.stop()
    assert instance.path.is_dir()


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
