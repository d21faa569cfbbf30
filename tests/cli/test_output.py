"""Output of commands: live, in order, in files; and what they are given to read."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Cli, read_terminal

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]

SCRIPT = "echo $WHEELMOUNT_HOST one; echo bad >&2; sleep .3; printf 'no end'"


@pytest.fixture
def script(workplace: Path) -> Path:
    path = workplace / "script"
    path.write_text(SCRIPT)
    return path


def test_goes_where_it_is_wanted(cli: Cli, source: Path, workplace: Path, script: Path) -> None:
    cli("up", "--hosts", "local:2", "--quiet")
    live = cli("run", "--live", "--quiet", source, script)
    assert sorted(live.stdout.splitlines()) == [
        "host0: host0 one",
        "host0: no end",
        "host1: host1 one",
        "host1: no end",
    ]
    assert sorted(live.stderr.splitlines()) == ["host0: bad", "host1: bad"]
    files = cli("run", "-q", "--output-dir", workplace / "work" / "out", source, script)
    assert files.stdout.splitlines() == [
        f"host{n} 0 {workplace}/work/out/host{n}.out" for n in range(2)
    ]
    assert (workplace / "work" / "out" / "host1.out").read_text() == "host1 one\nno end"
    assert (workplace / "work" / "out" / "host1.err").read_text() == "bad\n"
    both = cli("run", "--json", "--live", source, script)
    assert (both.returncode, "exclude each other" in both.stderr) == (64, True)
    assert _on_terminal("run", source, script) == {b"host0 one", b"host1 one", b"bad", b"no end"}
    assert cli("down").returncode == 0


def test_files_hold_the_output_of_this_run_only(cli: Cli, source: Path, workplace: Path) -> None:
    folder = workplace / "work" / "out"
    into = ("run", "-q", "--hosts", "local:2", "--output-dir", folder, source, "-")
    assert cli(*into, stdin=None, input="echo earlier; echo earlier >&2").returncode == 0
    done = cli(*into, stdin=None, input="[ $WHEELMOUNT_HOST = host0 ] || echo later")
    assert done.stdout.splitlines() == [f"host{n} 0 {folder}/host{n}.out" for n in range(2)]
    shown = {each.name: each.read_text() for each in folder.iterdir()}
    assert shown == {"host0.out": "", "host0.err": "", "host1.out": "later\n", "host1.err": ""}


@pytest.mark.parametrize(
    "words",
    [["status"], ["status", "--json"], ["config"], ["doctor"], ["--help"], ["mount", "--help"]],
    ids=" ".join,
)
def test_ends_quietly_where_it_is_not_read(words: list[str], workplace: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "wheelmount.cli.main", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=90, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("how", ["--live", "--in-order"])
def test_a_run_that_is_not_read_ends(how: str, cli: Cli, source: Path, workplace: Path) -> None:
    (workplace / "script").write_text("for i in $(seq 40); do echo again; sleep .05; done\n")
    run = f"{sys.executable} -m wheelmount.cli.main run -q {how} --hosts local:1"
    line = f"{run} {source} {workplace}/script | head -n 1; echo ${{PIPESTATUS[0]}}"
    command = ["bash", "-c", line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout.splitlines()[1:] == ["141"], done.stderr
    assert "unexpected" not in done.stderr


def _on_terminal(*arguments: str | Path) -> set[bytes]:
    """What follows the names of hosts in what a terminal is shown."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "wheelmount.cli.main", *map(str, arguments)]
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower) as done:
        os.close(follower)
        shown = read_terminal(leader)
    assert done.returncode == 0, shown
    lines = shown.replace(b"\r\n", b"\n").split(b"\n")
    return {line.rpartition(b"\x1b[0m: ")[2] for line in lines if b"\x1b[0m: " in line}


def test_one_host_reads_what_the_command_is_given(cli: Cli, source: Path, workplace: Path) -> None:
    script = workplace / "script"
    script.write_text("wc -c; cat .hidden")
    given = "x" * 300_000
    one = cli("run", source, "--quiet", script, input=given, stdin=None)
    assert one.stdout == "300000\nhidden\n"
    two = cli("run", source, "--quiet", "--hosts", "local:2", script, input=given, stdin=None)
    assert two.stdout == "".join(f"== host{n} ==\n0\nhidden\n" for n in range(2))


@pytest.mark.parametrize("words", [["status"], ["config"], ["status", "--json"]], ids=" ".join)
@pytest.mark.parametrize(
    ("redirection", "why"), [(">&-", "Bad file descriptor"), (">/dev/full", "No space left")]
)
def test_an_output_that_takes_nothing_is_an_error(
    words: list[str], redirection: str, why: str, workplace: Path
) -> None:
    command = [sys.executable, "-m", "wheelmount.cli.main", *words]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "bash", *command],
        stderr=subprocess.PIPE, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 74, done.stderr
    assert f"cannot write the output: {why}" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("order", [(), ("--grouped",)], ids=["in order", "grouped"])
def test_output_that_has_no_room_to_wait_is_an_error(
    source: Path, workplace: Path, order: tuple[str, ...]
) -> None:
    small = workplace / "small"
    small.mkdir()
    script = workplace / "much"
    script.write_text(f"head -c {8 << 20} /dev/zero\nsleep 1\n")
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", *order]
    command += ["-q", "--hosts", "local:2", str(source), str(script)]
    limited = f'mount -t tmpfs -o size=1M none {small} && TMPDIR={small} exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", limited, "sh", *command],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 74, done.stderr
    assert f"waits to be printed, in {small}: No space left" in done.stderr
    assert "hint: set TMPDIR" in done.stderr


@pytest.mark.costly
def test_closed_streams_do_no_harm(cli: Cli, source: Path, workplace: Path, script: Path) -> None:
    """No file of the command's own may get the number of a stream."""
    kept = source / "kept"
    kept.write_text("as it was")
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", "-q", source, script]
    for redirection, code in (("<&-", 0), ("2>&-", 0), ("<&- 2>&-", 0), ("<&- >&- 2>&-", 74)):
        done = subprocess.run(
            ["bash", "-c", f'"$@" {redirection}', "bash", *map(str, command)],
            stdout=subprocess.PIPE, timeout=90, check=False,
        )  # fmt: skip
        assert done.returncode == code, redirection
        assert done.stdout == (b"" if code else b"host0 one\nno end"), redirection
    assert kept.read_text() == "as it was"
