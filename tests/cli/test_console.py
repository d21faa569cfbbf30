"""Progress on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from tests.conftest import read_terminal
from wheelmount.cli.console import ConsoleProgress
from wheelmount.progress import number_of

CODE = """
from wheelmount.cli.console import ConsoleProgress
progress = ConsoleProgress()
assert progress.console.is_terminal
with progress.task("send", unit="B") as first, progress.task("run", unit="host") as second:
    first.total(2_000_000)
    first.advance(1_000_000)
    second.advance(2)
with progress.task("later") as third:
    third.note("a note")
"""


def test_steps_that_run_at_the_same_time_share_the_terminal() -> None:
    leader, follower = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=follower, stderr=follower) as done:
        os.close(follower)
        shown = read_terminal(leader)
    assert done.returncode == 0, shown.decode()
    for words in (b"send: 1.0 of 2.0 MB, ", b"run: 2 hosts in", b"later: a note in"):
        assert words in shown


@pytest.mark.parametrize(
    ("count", "name", "said"),
    [(0, "file", "0 files"), (1, "file", "1 file"), (2, "set of hosts", "2 sets of hosts")],
)
def test_a_number_has_its_noun(count: int, name: str, said: str) -> None:
    assert number_of(count, name) == said


def test_a_step_says_its_only_host_in_the_singular(capfd: pytest.CaptureFixture[str]) -> None:
    progress = ConsoleProgress()
    with progress.console.file:
        with progress.task("run", unit="host") as task:
            task.advance(1)
        with progress.task("check", unit="request") as task:
            task.total(1)
    run, check = capfd.readouterr().err.splitlines()
    assert run.startswith("run: 1 host in ")
    assert check.startswith("check: 0 of 1 request in ")
