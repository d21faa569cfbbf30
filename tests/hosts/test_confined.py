"""Jobs of a Slurm that confines each by cgroups to its processors and its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import LOGIN, Lab
from tests.testbed.slurm import may_confine, start_slurm
from tests.testbed.traces import Traces

pytestmark = [
    pytest.mark.lab,
    pytest.mark.hosts,
    pytest.mark.fuse,
    pytest.mark.skipif(not may_confine(), reason="this kernel has cgroups of version 2 alone"),
]

PATH = "/mnt/tree"

SEEN = "nproc; sed -n 's/.*:memory://p' /proc/self/cgroup | cut -d/ -f1-4"


@pytest.fixture(scope="module")
def lab(shared_source: Path) -> Iterator[Lab]:
    before = Traces()
    with Lab(2, shared=[shared_source.parent]) as made:
        start_slurm(made, confined=True)
        traces = Traces(besides=before)
        yield made
    assert traces.left() == []
    assert list(Path("/sys/fs/cgroup").glob("*/testbed-*")) == []


def _command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "wheelmount.cli.main", *map(str, words)]


def _run(lab: Lab, *before: str, spec: str, source: Path) -> subprocess.CompletedProcess[str]:
    command = _command("run", "-q", "--hosts", spec, "--mntpoint", PATH, source, "-")
    return lab.run(LOGIN, [*before, *command], stdin=None, input=SEEN, timeout=120)


def _assert_no_job(lab: Lab) -> None:
    """Slurm removes a job's cgroups when no process of it is left."""
    look = ["find", "/sys/fs/cgroup/freezer", "-name", "job_*"]
    wait = 'until [ -z "$("$@")" ]; do sleep 0.1; done'
    for host in lab.hosts:
        lab.run(host, ["sh", "-c", wait, "sh", *look], check=True)


def test_a_job_has_the_processors_that_it_asked_for(lab: Lab, source: Path) -> None:
    done = _run(lab, spec="slurm:2,cpus-per-task=1,mem=1000", source=source)
    assert done.returncode == 0, done.stderr
    for number, host in enumerate(lab.hosts):
        name, processors, group = done.stdout.splitlines()[3 * number : 3 * number + 3]
        assert (name, processors) == (f"== {host} ==", "1")
        assert group.startswith(f"/slurm_{host}/uid_0/job_"), group
    _assert_no_job(lab)


@pytest.mark.parametrize("given", [["--exclusive"], ["--ntasks-per-node=1", "--cpus-per-task=2"]])
def test_a_step_has_all_processors_of_its_allocation(
    lab: Lab, source: Path, given: list[str]
) -> None:
    done = _run(lab, "salloc", "--quiet", "--nodes=2", *given, spec="slurm:2", source=source)
    assert done.returncode == 0, done.stderr
    processors = done.stdout.splitlines()[1::3]
    assert processors == [str(min(2, os.cpu_count() or 1))] * 2
    _assert_no_job(lab)


def test_a_new_job_that_has_whole_nodes_uses_all_of_them(lab: Lab, source: Path) -> None:
    done = _run(lab, spec="slurm:2,exclusive", source=source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1::3] == [str(os.cpu_count())] * 2
    _assert_no_job(lab)


def test_a_session_has_whole_nodes_too_and_ends_with_its_job(lab: Lab, source: Path) -> None:
    up = lab.run(LOGIN, _command("up", "--hosts", "slurm:2,exclusive"), timeout=120)
    assert up.returncode == 0, up.stderr
    done = _run(lab, spec="session:default", source=source)
    assert done.stdout.splitlines()[1::3] == [str(os.cpu_count())] * 2, done.stderr
    lab.run(LOGIN, ["scancel", "--user=root"], check=True)
    _assert_no_job(lab)
    assert lab.run(LOGIN, _command("down")).returncode == 0


def test_a_tree_that_the_job_s_memory_does_not_hold_is_refused(lab: Lab, source: Path) -> None:
    large = source.parent / "large"
    large.mkdir()
    (large / "file").write_bytes(os.urandom(1 << 20) * 400)
    done = _run(lab, spec="slurm:2,mem=300", source=large)
    assert done.returncode != 0
    assert "do not fit" in done.stderr
    _assert_no_job(lab)
