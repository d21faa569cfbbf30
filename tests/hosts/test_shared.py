"""Machines that share the directories of sessions and of temporary files, as by NFS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import LOGIN, Lab

pytestmark = [pytest.mark.lab, pytest.mark.hosts]


@pytest.fixture
def place() -> Iterator[Path]:
    # Short, as paths of sockets are limited.
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def lab(place: Path) -> Iterator[Lab]:
    with Lab(1, shared=[place]) as made:
        yield made


def _call(
    lab: Lab, host: str, place: Path, *words: str, script: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wheelmount.cli.main", *words]
    env = {**os.environ, "WHEELMOUNT_RUNTIME_DIR": str(place), "XDG_CONFIG_HOME": str(place)}
    return lab.run(host, command, stdin=None, input=script, env=env)


def test_a_session_of_local_hosts_is_left_to_its_machine(lab: Lab, place: Path) -> None:
    up = _call(lab, LOGIN, place, "up", "--hosts", "local:2")
    assert up.returncode == 0, up.stderr
    source = place / "source"
    source.mkdir()
    run = ["run", str(source), "--mntpoint", "/mnt/tree", "-"]
    named = ["run", "--hosts", "session:default", *run[1:]]
    for words in (["up", "--hosts", "local:2"], ["down"], named):
        done = _call(lab, "host0", place, *words)
        assert done.returncode == 68, done.stderr
        assert f"error: session default is on {LOGIN}\n" in done.stderr
    status = json.loads(_call(lab, "host0", place, "status", "--json").stdout)
    assert [each["lost"] for each in status["sessions"]] == [f"session default is on {LOGIN}"]
    done = _call(lab, "host0", place, *run, script="hostname")
    assert (done.returncode, done.stdout) == (0, "host0\n"), done.stderr
    done = _call(lab, LOGIN, place, *run, script="hostname")
    assert done.stdout == f"== host0 ==\n{LOGIN}\n== host1 ==\n{LOGIN}\n", done.stderr
    down = _call(lab, LOGIN, place, "down")
    assert down.returncode == 0, down.stderr
