"""What a killed container leaves is told from one that runs, and can be cleared away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.containers.test_running import processes, wait_until
from wheelmount.containers import leftovers
from wheelmount.containers.order import PROGRAM, Order

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]


def test_killed_containers_are_cleared_away(cli: Cli, sif: Path, workplace: Path) -> None:
    runtime = workplace / "runtime" / f"wheelmount-{os.getuid()}"
    state, mark = str(workplace / "state"), "17.3205"
    order = Order("n1", str(sif), "mine", state, str(runtime))
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
