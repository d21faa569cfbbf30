"""What is pasted into a container's terminal arrives, however much it is."""

from __future__ import annotations

import math
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import Cli, read_terminal
from tests.containers.test_running import processes
from wheelmount.config import Settings
from wheelmount.containers.order import PROGRAM, Order
from wheelmount.containers.terminal import Terminal

pytestmark = [pytest.mark.containers, pytest.mark.timeout(200)]

COMMAND = [sys.executable, "-m", "wheelmount.cli.main"]
PASTED = "".join(f"{number:>98}!\n" for number in range(1000)).encode()
COUNT = "echo re''ady; cat >/tmp/pasted; echo; wc -c </tmp/pasted"


def test_much_is_pasted_into_a_shell(sif: Path, workplace: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(workplace / "work")
        words = ["shell", "-q", "--image", str(sif), "--hosts", "local:1", "sh", "-c", COUNT]
        os.execv(COMMAND[0], [*COMMAND, *words])  # noqa: S606
    said = bytearray()
    while b"ready" not in said:
        said += os.read(terminal, 4096)

    def paste() -> None:
        rest = memoryview(PASTED + b"\x04")
        while rest:
            rest = rest[os.write(terminal, rest[:4096]) :]

    threading.Thread(target=paste, daemon=True).start()
    shown = read_terminal(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"100000" in shown.split()  # the terminal may show what was typed later than that


def test_much_is_pasted_from_afar(sif: Path, workplace: Path, settings: Settings) -> None:
    """As on another machine: the terminal is there, what is typed comes by a pipe."""
    runtime = settings.runtime_dir
    order = Order("n1", str(sif), "mine", settings.state_dir, runtime, terminal=(24, 80))
    (workplace / "note").write_bytes(order.encode(["sh", "-c", COUNT]))
    done = subprocess.run(
        [sys.executable, *PROGRAM[1:], str(workplace / "note")],
        input=PASTED,
        capture_output=True,
        check=True,
        timeout=100,
    )
    assert b"100000" in done.stdout.split()


def test_a_command_on_a_terminal_ends_in_time(sif: Path, workplace: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(workplace / "work")
        words = ["shell", "-q", "--image", str(sif), "--hosts", "local:1", "--timeout", "1"]
        os.execv(COMMAND[0], [*COMMAND, *words, "sleep", "17.3206"])  # noqa: S606
    shown = read_terminal(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 124
    assert b"it took longer than 1 s" in shown
    assert not processes("17.3206")


def test_a_command_on_a_terminal_elsewhere_ends_in_time(
    sif: Path, workplace: Path, settings: Settings
) -> None:
    order = Order(
        *("n1", str(sif), "mine", settings.state_dir, settings.runtime_dir),
        terminal=(24, 80),
        timeout=1.0,
    )
    (workplace / "note").write_bytes(order.encode(["sleep", "17.3207"]))
    command = [sys.executable, *PROGRAM[1:], str(workplace / "note")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.wait(100) == 124
    assert not processes("17.3207")


def test_a_terminal_closes_no_file_of_others() -> None:
    with Terminal(size=(24, 80)) as terminal:
        number = terminal.inner
        with subprocess.Popen(["true"], stdin=number) as process:
            terminal.relay(process, math.inf)
        reading, writing = os.pipe()
        os.dup2(reading, number)
    os.fstat(number)
    for descriptor in {reading, writing, number}:
        os.close(descriptor)


def test_a_command_knows_its_place(cli: Cli, sif: Path) -> None:
    ranks = "echo $WHEELMOUNT_HOST $WHEELMOUNT_RANK/$WHEELMOUNT_LOCAL_RANK/$WHEELMOUNT_SIZE"
    hosts = ["-q", "--hosts", "local:2", "--on", "host1", "--image", sif]
    for command in (["exec", *hosts], ["exec", "-i", *hosts], ["shell", *hosts]):
        done = cli(*command, "--", "sh", "-c", ranks)
        assert done.stdout == "host1 0/0/1\n", done.stderr
