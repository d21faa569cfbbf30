"""Jobs of which only Slurm's accounts know any more: a real slurmdbd with its database."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import LOGIN, Lab
from tests.testbed.service import Service
from tests.testbed.slurm import CONTROLLER, CONTROLLER_PORT, start_slurm
from tests.testbed.traces import Traces

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

TIMEOUT = 60.0
"""Seconds that Slurm may take to know something."""


@pytest.fixture
def lab(shared_source: Path) -> Iterator[Lab]:
    before = Traces()
    with Lab(1, shared=[shared_source.parent]) as made:
        start_slurm(made, accounts=True)
        traces = Traces(besides=before)
        yield made
    assert traces.left() == []


def _call(lab: Lab, *words: str | Path, script: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wheelmount.cli.main", *map(str, words)]
    return lab.run(LOGIN, command, stdin=None, input=script, timeout=120)


def _await_account(lab: Lab, job: str, state: str) -> None:
    look = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}"]
    deadline = time.monotonic() + TIMEOUT
    while not (said := lab.run(LOGIN, [*look, "--format=State"]).stdout).startswith(state):
        assert time.monotonic() < deadline, said
        time.sleep(0.2)


def _forget_jobs(lab: Lab) -> None:
    """Have a controller that remembers none, as after some minutes (MinJobAge)."""
    lab.run(LOGIN, ["pkill", "-KILL", "-x", "slurmctld"], check=True)
    deadline = time.monotonic() + TIMEOUT
    while lab.run(LOGIN, ["pgrep", "-x", "slurmctld"]).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    Service(lab, LOGIN, [*CONTROLLER, "-c"], CONTROLLER_PORT).await_port()
    while lab.run(LOGIN, ["sinfo"]).returncode != 0:
        assert time.monotonic() < deadline + TIMEOUT
        time.sleep(0.1)


def test_accounts_say_how_a_job_ended_that_the_controller_forgot(lab: Lab, source: Path) -> None:
    up = _call(lab, "up", "--hosts", "slurm:1")
    assert up.returncode == 0, up.stderr
    (job,) = lab.run(LOGIN, ["squeue", "--noheader", "--format=%A"]).stdout.split()
    _await_account(lab, job, "RUNNING")
    shown = lab.run(LOGIN, ["sacct", "--noheader", "--parsable2", "--format=JobID,JobName,State"])
    assert re.search(rf"^{job}\|wheelmount-\w+\|RUNNING$", shown.stdout, re.MULTILINE)
    lab.run(LOGIN, ["scancel", job], check=True)
    _await_account(lab, job, "CANCELLED")
    _forget_jobs(lab)
    assert lab.run(LOGIN, ["squeue", "--states=all", f"--jobs={job}"]).returncode != 0
    done = _call(lab, "run", source, "--mntpoint", "/mnt/tree", "-", script="pwd")
    assert done.returncode == 68
    assert f"job {job} has ended: cancelled" in done.stderr
    assert _call(lab, "down").returncode == 0
