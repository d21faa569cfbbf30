"""Progress on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from tests.conftest import read_terminal

CODE = """
from wheelmount.cli.console import ConsoleProgress
progress = ConsoleProgress()
assert progress.console.is_terminal
with progress.task("send", unit="B") as first, progress.task("run", unit="hosts") as second:
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
