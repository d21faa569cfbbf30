"""What Slurm's controller says: nothing for a while, or of jobs that are not this command's."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import NOBODY
from tests.testbed import LOGIN, Lab
from tests.testbed.service import Service
from tests.testbed.slurm import CONTROLLER, CONTROLLER_PORT, start_slurm
from tests.testbed.traces import Traces

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

TIMEOUT = 60.0
"""Seconds that Slurm may take to know something."""

FAILS_AFTERWARDS = """#!/bin/sh
{program} "$@"
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
exit 1
"""
"""A program that does what it should, of which its caller does not learn."""

FAILS = """#!/bin/sh
echo 'scancel: error: Socket timed out on send/recv operation' >&2; exit 1
"""

TOKEN = "1" * 8

KNOWN_TOKEN = f"""
import secrets
from wheelmount.cli.main import main
secrets.token_hex = lambda _size: {TOKEN!r}
main()
"""
"""The tool, of which another user knows the name of its job."""

FAILS_ONCE = """#!/bin/sh
if mkdir {mark} 2>/dev/null; then
  echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1
fi
exec {program} "$@"
"""


@pytest.fixture(scope="module")
def lab(shared_source: Path) -> Iterator[Lab]:
    before = Traces()
    with Lab(1, shared=[shared_source.parent]) as made:
        start_slurm(made)
        traces = Traces(besides=before)
        yield made
    assert traces.left() == []


def _call(
    lab: Lab, *words: str | Path, script: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wheelmount.cli.main", *map(str, words)]
    env = {**os.environ, **environment}
    return lab.run(LOGIN, command, stdin=None, input=script, env=env, timeout=300)


def _wrap(lab: Lab, place: str, name: str, script: str) -> str:
    """Put a script in the place of one of Slurm's programs; return the ``PATH`` that finds it."""
    program = lab.run(LOGIN, ["sh", "-c", f"command -v {name}"], check=True).stdout.strip()
    write = f"mkdir -p {place}; cat > {place}/{name}; chmod 755 {place}/{name}"
    text = script.format(program=program, mark=f"{place}/failed")
    lab.run(LOGIN, ["sh", "-c", write], stdin=None, input=text, check=True)
    return f"{place}:{os.environ['PATH']}"


def _jobs(lab: Lab) -> list[str]:
    return lab.run(LOGIN, ["squeue", "--noheader", "--format=%A"], check=True).stdout.split()


def _assert_ends(lab: Lab) -> None:
    down = _call(lab, "down")
    assert down.returncode == 0, down.stderr
    _assert_no_jobs(lab)


def _assert_no_jobs(lab: Lab) -> None:
    deadline = time.monotonic() + TIMEOUT
    while jobs := _jobs(lab):
        assert time.monotonic() < deadline, jobs
        time.sleep(0.2)


def test_a_wait_in_the_queue_outlasts_a_question_without_an_answer(
    lab: Lab, tmp_path: Path
) -> None:
    place = f"/root/{tmp_path.name}"
    path = _wrap(lab, place, "squeue", FAILS_ONCE)
    up = _call(lab, "up", "--hosts", "slurm:1", PATH=path)
    assert (up.returncode, up.stdout) == (0, "session default is up: host0\n"), up.stderr
    assert "Socket timed out" in up.stderr
    assert lab.run(LOGIN, ["rmdir", f"{place}/failed"]).returncode == 0, "it was asked"
    _assert_ends(lab)


def test_a_job_of_which_sbatch_does_not_tell_is_cancelled(lab: Lab, tmp_path: Path) -> None:
    place = f"/root/{tmp_path.name}"
    path = _wrap(lab, place, "sbatch", FAILS_AFTERWARDS)
    up = _call(lab, "up", "--hosts", "slurm:1", PATH=path)
    assert up.returncode == 68, up.stderr
    assert "Socket timed out" in up.stderr
    assert _jobs(lab) == [], up.stderr
    assert "there is no session default" in _call(lab, "down").stderr
    _wrap(lab, place, "scancel", FAILS)
    up = _call(lab, "up", "--hosts", "slurm:1", PATH=path)
    assert up.returncode == 68, up.stderr
    assert "its job may still have its nodes: scancel: Socket timed out" in up.stderr
    assert len(_jobs(lab)) == 1
    _assert_ends(lab)


@pytest.mark.parametrize("name", [os.fsdecode(b"\xff"), f"wheelmount-{TOKEN}"])
def test_another_user_s_job_is_left_alone(lab: Lab, source: Path, name: str) -> None:
    """Which may have any name, also the one of this user's job."""
    as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    sleep = [*as_nobody, "srun", "--mem=100", f"--job-name={name}", "sleep", "100"]
    with lab.popen(LOGIN, sleep, stderr=subprocess.DEVNULL) as other:
        deadline = time.monotonic() + TIMEOUT
        while not lab.run(LOGIN, ["squeue", "--steps", "--noheader", "--format=%A"]).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        tool = [sys.executable, "-c", KNOWN_TOKEN]
        words = [*tool, "run", str(source), "--hosts", "slurm:1", "--mntpoint", "/mnt/tree", "-"]
        done = lab.run(LOGIN, words, stdin=None, input="echo ran", timeout=120)
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
        both = shlex.join([*tool, "up", "--hosts", "slurm:1"]), shlex.join([*tool, "down"])
        inside = ["salloc", "--quiet", "--nodes=1", "bash", "-ec", "\n".join(both)]
        done = lab.run(LOGIN, inside, timeout=120)
        assert done.returncode == 0, done.stderr
        assert len(_jobs(lab)) == 1
        assert other.poll() is None
        lab.run(LOGIN, ["scancel", f"--user={NOBODY}"], check=True)
    _assert_no_jobs(lab)


def test_what_a_user_hides_of_jobs_is_not_hidden_from_the_tool(lab: Lab) -> None:
    hide = {"SQUEUE_STATES": "COMPLETED", "SQUEUE_USERS": "nobody", "SCANCEL_STATE": "PENDING"}
    up = _call(lab, "up", "--hosts", "slurm:1", **hide)
    assert up.returncode == 0, up.stderr
    assert _call(lab, "down", **hide).returncode == 0
    _assert_no_jobs(lab)


def test_variables_that_change_what_slurm_prints_are_not_for_wheelmount(
    lab: Lab, source: Path
) -> None:
    changed = {"SLURM_LABELIO": "1", "SBATCH_WAIT": "1", "SBATCH_ARRAY_INX": "1-2"}
    lab.run("host0", ["sh", "-c", "mkdir -p /tmp/wheelmount-0; chmod 755 /tmp/wheelmount-0"])
    words = "run", "--hosts", "slurm:1", "--mntpoint", "/mnt/tree", source, "-"
    done = _call(lab, *words, script="true", **changed)
    assert "host0: /tmp/wheelmount-0 is not a private directory" in done.stderr
    lab.run("host0", ["chmod", "700", "/tmp/wheelmount-0"], check=True)
    up = _call(lab, "up", "--hosts", "slurm:1", **changed)
    assert (up.returncode, len(_jobs(lab))) == (0, 1), up.stderr
    _assert_ends(lab)


@pytest.mark.costly
def test_a_session_outlasts_a_controller_that_does_not_answer(lab: Lab, source: Path) -> None:
    up = _call(lab, "up", "--hosts", "slurm:1")
    assert up.returncode == 0, up.stderr
    (job,) = _jobs(lab)
    lab.run(LOGIN, ["pkill", "-TERM", "-x", "slurmctld"], check=True)  # it keeps its state
    deadline = time.monotonic() + TIMEOUT
    while lab.run(LOGIN, ["pgrep", "-x", "slurmctld"]).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    again = _call(lab, "up", "--hosts", "slurm:1")
    assert again.returncode == 0, again.stderr
    assert "made anew" not in again.stderr
    done = _call(lab, "run", source, "--mntpoint", "/mnt/tree", "-", script="hostname")
    assert (done.returncode, done.stdout) == (0, "host0\n"), done.stderr
    down = _call(lab, "down")
    assert down.returncode == 68, down.stderr
    assert f"job {job} may still have its nodes: scancel: " in down.stderr
    assert f"hint: run `scancel {job}`" in down.stderr
    Service(lab, LOGIN, CONTROLLER, CONTROLLER_PORT).await_port()
    while lab.run(LOGIN, ["sinfo"]).returncode != 0:
        assert time.monotonic() < deadline + TIMEOUT
        time.sleep(0.1)
    assert _jobs(lab) == [job], "the job goes on, as it was not cancelled"
    lab.run(LOGIN, ["scancel", job], check=True)
    _assert_ends(lab)
