"""Progress on a terminal, and text that neither controls a terminal nor fails to be written."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Cli, read_terminal
from wheelmount.cli.console import ConsoleProgress
from wheelmount.errors import SourceError
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


ODD = os.fsdecode(b"odd\xff\x1b[31m[red]\\[blue]") + "€"
"""Name of a file that is no text and would change a terminal's colour."""

SHOWN = rb"odd\xff\x1b[31m[red]\[blue]" + "€".encode()


def test_an_error_names_any_path(cli: Cli, workplace: Path) -> None:
    done = cli("mount", workplace / ODD)
    assert done.returncode == SourceError.exit_code
    assert done.stderr.startswith(f"error: there is no directory {workplace}/{SHOWN.decode()}\n")
    done = cli("mount", "--json", workplace / ODD)
    assert json.loads(done.stderr)["message"].endswith(ODD)


def on_terminal(*arguments: str | Path) -> bytes:
    """What a command writes to a terminal."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "wheelmount.cli.main", *map(str, arguments)]
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower):
        os.close(follower)
        return read_terminal(leader)


def test_an_error_may_look_like_a_markup_s_end(workplace: Path) -> None:
    shown = on_terminal("mount", workplace / "a\\[")
    assert b"there is no directory" in shown
    shown = on_terminal("run", workplace, r"\[/x]")
    assert rb"\[/x]" in shown
    assert b"Traceback" not in shown


def test_an_error_does_not_control_a_terminal(workplace: Path) -> None:
    shown = on_terminal("mount", workplace / ODD)
    assert f"there is no directory {workplace}/".encode() + SHOWN in shown


@pytest.mark.fuse
@pytest.mark.hosts
def test_paths_are_printed_as_they_are_except_to_a_terminal(cli: Cli, workplace: Path) -> None:
    source, mntpoint = workplace / "source", workplace / ODD
    source.mkdir()
    assert cli("mount", source, mntpoint).stdout == f"host0 {mntpoint}\n"
    assert f"{source} at {mntpoint} " in cli("status").stdout
    lacking = cli("status", env={**os.environ, "PYTHONIOENCODING": "ascii"}).stdout
    assert f"{source} at {mntpoint} ".replace("€", "\\u20ac") in lacking
    assert f"{source} at {workplace}/".encode() + SHOWN in on_terminal("status")
    assert cli("umount", mntpoint).returncode == 0
