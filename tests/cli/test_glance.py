"""Many hosts at a glance: ``status``, ``doctor``, ``logs``, ``--grouped``, and ``--json``."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from tests.conftest import Cli
from wheelmount.cli.doctor import _together
from wheelmount.cli.main import cli as cli_group
from wheelmount.cli.status import _lines
from wheelmount.config import Settings
from wheelmount.doctor import GOOD, Finding, Report
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]

COMMAND = [sys.executable, "-m", "wheelmount.cli.main"]


def test_status_calls_a_mount_dead_only_where_that_is_known() -> None:
    late = {"identity": "1", "host": "a", "source": "/s", "mntpoint": "/m", "error": "no answer"}

    def line(**more: bool) -> str:
        (only,) = _lines({"sessions": [], "mounts": [late | more]}, True)
        return only

    assert "umount --force" in line(dead=True)
    assert "does not answer yet" in line(dead=False)
    assert "no answer" in line()
    assert "dead" not in line()


def test_status_has_one_line_for_hosts_that_say_the_same(
    cli: Cli, source: Path, workplace: Path
) -> None:
    assert cli("mount", source, f"{workplace}/w-{{host}}", "--hosts", "local:4").returncode == 0
    (line,) = cli("status").stdout.splitlines()
    assert f"  host[0-3]  {source} at {workplace}/w-{{host}}  " in line
    assert "  complete  " in line.replace(", complete", "  complete")
    lines = cli("status", "--each").stdout.splitlines()
    assert [line.split()[1] for line in lines] == [f"host{n}" for n in range(4)]
    assert cli("umount", "--all", "--force").returncode == 0


def test_status_is_shown_again_and_again(cli: Cli, source: Path, workplace: Path) -> None:
    assert cli("mount", source, f"{workplace}/w", "--hosts", "local:1").returncode == 0
    with subprocess.Popen([*COMMAND, "status", "--watch", "--json"], stdout=-1) as watch:
        assert watch.stdout is not None
        shown = [json.loads(watch.stdout.readline()) for _ in range(2)]
        watch.send_signal(signal.SIGINT)
        assert watch.wait(60) == 130
    assert [found["mounts"][0]["rate"] for found in shown] == [0.0, 0.0]
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "status", "--watch"], stdout=follower, stderr=follower
    ) as watch:
        os.close(follower)
        text = b""
        deadline = time.monotonic() + 60
        while text.count(b"\x1b[H") < 2 and time.monotonic() < deadline:
            if select.select([leader], [], [], 1)[0]:
                text += os.read(leader, 1 << 16)
        watch.send_signal(signal.SIGINT)
        assert watch.wait(60) == 130
    os.close(leader)
    assert text.count(b"\x1b[H") >= 2, "drawn in the same place"
    assert b"\x1b[K" in text
    assert cli("umount", "--all", "--force").returncode == 0


def test_a_mount_that_is_being_made_is_not_called_dead(cli: Cli, settings: Settings) -> None:
    directory = processes.directory(settings) / "host0-0123456789abcdef"
    with processes.making(directory):
        Task("host0", "/s", "/m", settings.store, "devfuse", 1.0, made=True).write(directory)
        assert cli("status").stdout.endswith("  /s at /m  does not answer yet\n")
    assert cli("status").stdout.endswith("  dead: `wheelmount umount --force` clears it away\n")
    shutil.rmtree(directory)


def test_a_mount_that_goes_meanwhile_is_not_shown(settings: Settings) -> None:
    first, second = (processes.directory(settings) / f"{name}-host0" for name in "ab")
    with processes.making(first), processes.making(second):
        for each in first, second:
            Task("host0", "/s", "/m", settings.store, "devfuse", 1.0, made=True).write(each)
        with socket.socket(socket.AF_UNIX) as slow:
            slow.bind(str(first / "control"))
            slow.listen()
            status = subprocess.Popen([*COMMAND, "status", "--json"], stdout=-1)
            asked, _ = slow.accept()
            shutil.rmtree(second)
            asked.close()
        out, _ = status.communicate(timeout=60)
    assert [mount["identity"] for mount in json.loads(out)["mounts"]] == ["a"]
    shutil.rmtree(first)


def test_hosts_at_which_bytes_arrive_share_a_line() -> None:
    def mount(host: int, held: int) -> dict[str, Any]:
        return {
            "identity": "m", "host": f"host{host}", "source": "/s", "mntpoint": f"/m/host{host}",
            "held": held, "size": 9_000_000, "files": 1, "rate": 1e6 * host, "waiting": 0,
            "delivery": None, "generation": 1, "kept": {"generations": 0}, "adapter": "devfuse",
            "visible": True, "changed": [],
        }  # fmt: skip

    mounts = [mount(0, 9_000_000), mount(1, 4_000_000), mount(2, 5_000_000)]
    assert list(_lines({"sessions": [], "mounts": mounts}, False)) == [
        "m  host0  /s at /m/{host}  1 file, 9.0 MB, complete  generation 1  devfuse",
        "m  host[1-2]  /s at /m/{host}  1 file, 9.0 MB, at least 4.0 MB of it, 3.0 MB/s together"
        "  generation 1  devfuse",
    ]


@pytest.mark.costly
def test_output_is_shown_once_for_hosts_that_wrote_the_same(cli: Cli, workplace: Path) -> None:
    script = "[ $WHEELMOUNT_RANK = 2 ] && echo other && exit 3; echo same; printf end >&2"
    (workplace / "work" / "script").write_text(script)
    run = ["run", "-q", "--grouped", "--hosts", "local:4"]
    done = cli(*run, ".", "script")
    assert done.returncode == 3
    assert done.stdout == "== host[0-1,3] ==\nsame\n== host2 == (exit code 3)\nother\n"
    assert done.stderr == "== host[0-1,3] stderr ==\nend\n"
    done = cli(
        *run, "--on", "host[0-1]", "--timeout", "1", ".", "-", input="exec sleep 60", stdin=None
    )
    assert done.stdout == "== host[0-1] == (exit code 124)\n"
    assert cli(*run, "--json", ".", "script").returncode == 64


def test_doctor_says_once_what_all_hosts_say() -> None:
    def report(number: int) -> Report:
        texts = {"python": "3.11", "kernel": str(6 + number // 2)}
        findings = [Finding(what, GOOD, text) for what, text in texts.items()]
        return Report(findings, [], cleared=False, free=0, time=0.0)

    reports = {f"n{number}": report(number) for number in range(4)}
    assert list(_together(reports)) == [
        "== n[0-3] ==",
        "ok  python: 3.11",
        "ok  n[0-1]: kernel: 6",
        "ok  n[2-3]: kernel: 7",
    ]


def test_doctor_of_hosts(cli: Cli) -> None:
    done = cli("doctor", "--hosts", "local:2")
    assert done.stdout.startswith("== host[0-1] ==\nok  python: "), done.stderr
    assert len(re.findall(r"^ok  kernel: ", done.stdout, re.MULTILINE)) == 1


def test_logs_are_shown_and_followed(cli: Cli, source: Path, workplace: Path) -> None:
    assert cli("mount", source, f"{workplace}/w", "--hosts", "local:1").returncode == 0
    (log,) = (workplace / "runtime").glob("*/mounts/*/log")
    identity = cli("status").stdout.split()[0]

    def write(text: str) -> None:
        with log.open("a") as file:
            file.write(text)

    write("first\n")
    for target in ([], [f"{workplace}/w"], [source], [identity]):
        assert f"mount {identity} host0: first\n" in cli("logs", *target).stdout
    command = [*COMMAND, "logs", "--follow", "--json", str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        while json.loads(following.stdout.readline())["line"] != "first":
            pass
        write("sec")
        write("ond\n")
        assert json.loads(following.stdout.readline())["line"] == "second"
        assert cli("umount", "--all", "--force").returncode == 0
        following.stdout.read()
        assert following.wait(60) == 0, "it ends with the mount"
    assert cli("logs", "nothing").returncode == 64


BAD = {
    "download": (["-d", "wheels"], 64),
    "check": (["nothing", "idna"], 66),
    "mount": (["nothing"], 66),
    "refresh": (["nothing"], 73),
    "verify": (["nothing"], 73),
    "umount": (["nothing"], 73),
    "status": (["--wrong"], 2),
    "logs": (["nothing"], 64),
    "run": (["nothing", "script"], 66),
    "install": ([], 64),
    "exec": (["true"], 64),
    "image build": (["nothing"], 64),
    "image init": (["nothing"], 64),
    "image pull": (["nothing"], 64),
    "image ls": (["--wrong"], 2),
    "image inspect": (["nothing.sif"], 66),
    "overlay ls": (["--hosts", "nothing"], 64),
    "overlay prune": (["--unused", "-1"], 2),
    "overlay rm": (["nothing"], 71),
    "instance ls": (["--hosts", "nothing"], 64),
    "instance logs": (["nothing"], 71),
    "instance stop": ([], 64),
    "env ls": (["--wrong"], 2),
    "env rm": (["nothing"], 64),
    "cache size": (["--wrong"], 2),
    "cache prune": ([], 2),
    "cache clean": (["--wrong"], 2),
    "up": (["--hosts", "nothing"], 64),
    "down": (["nothing"], 68),
    "config": (["--wrong"], 2),
    "config trust": (["nothing"], 66),
    "setup": (["--apptainer", "nothing"], 2),
    "doctor": (["--hosts", "nothing"], 64),
}
"""For each command that prints JSON: arguments that it refuses, and the exit code."""


def _with_json(group: click.Group, *names: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if any("--json" in parameter.opts for parameter in command.params):
            yield " ".join([*names, name])
        if isinstance(command, click.Group):
            yield from _with_json(command, *names, name)


def _check_error(done: subprocess.CompletedProcess[str], code: int) -> None:
    error = json.loads(done.stderr.splitlines()[-1])
    assert (done.returncode, error["code"]) == (code, code), done.stderr
    assert sorted(error) == ["code", "hint", "message"]


def test_all_commands_with_json_are_tried() -> None:
    assert set(_with_json(cli_group)) == set(BAD)


@pytest.mark.costly
@pytest.mark.parametrize("command", BAD)
def test_programs_read_errors(command: str, cli: Cli) -> None:
    words, code = BAD[command]
    done = cli(*command.split(), "--json", *words)
    _check_error(done, code)
    assert done.stdout == ""


def test_an_option_of_the_user_s_command_asks_for_no_json(cli: Cli) -> None:
    done = cli("exec", "--nonsense", "--", "command", "--json")
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: "), done.stderr


@pytest.mark.costly
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["overlay", "rm", "nothing"], 71),
        (["instance", "logs", "nothing"], 71),
        (["instance", "stop", "nothing"], 71),
        (["logs", "nothing"], 64),
        (["run", "--cwd", "/nothing", "--mntpoint", "{workplace}/w-{{host}}", ".", "script"], 68),
        (["install", "idna", "--venv", "/dev/null/venv"], 69),
        (["install", "idna", "--venv", "/dev/null/venv", "--tool", "wheelmount"], 69),
    ],
    ids=str,
)
def test_programs_read_errors_of_hosts(
    words: list[str], code: int, cli: Cli, workplace: Path
) -> None:
    (workplace / "work" / "script").touch()
    command, *arguments = (word.format(workplace=workplace) for word in words)
    if f"{command} {arguments[0]}" in BAD:
        command = f"{command} {arguments.pop(0)}"
    done = cli(*command.split(), "--json", "--hosts", "local:2", *arguments)
    _check_error(done, code)
    records = json.loads(done.stdout)
    assert [(each["host"], each["code"]) for each in records] == [("host0", code), ("host1", code)]
    said = {each["error"] for each in records}
    where = "host[0-1]" if len(said) == 1 else "host1"
    error = json.loads(done.stderr.splitlines()[-1])
    assert error["message"] == f"{where}: {records[1]['error']}"


@pytest.mark.costly
def test_programs_read_what_commands_did(cli: Cli, source: Path, workplace: Path) -> None:
    def said(*words: str | Path) -> Any:
        done = cli(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    point = f"{workplace}/w"
    assert said("mount", source, point, "--hosts", "local:1") == [
        {"host": "host0", "mntpoint": point}
    ]
    assert said("refresh", point) == [{"host": "host0", "mntpoint": point, "changed": False}]
    (identity,) = {record["identity"] for record in said("status")["mounts"]}
    assert said("umount", "--force", point) == [identity]
    assert said("up", "--hosts", "local:1") == {
        "session": "default",
        "hosts": ["host0"],
        "made": True,
    }
    assert said("down") == ["default"]
