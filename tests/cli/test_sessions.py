"""``wheelmount up | down``, and commands on what stays."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import CHECKOUT, UP_AND_DIE, Cli, mounts_shown
from tests.mount.conformance import assert_same, await_last
from wheelmount.config import Settings
from wheelmount.errors import HostError
from wheelmount.hosts.session import Record, Session
from wheelmount.operations import apart
from wheelmount.operations.records import hosts_of, mounts_of
from wheelmount.progress import SILENT, Progress

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]


def _sessions(cli: Cli) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cli("status", "--json").stdout)["sessions"]
    return found


def _run_and_kill(source: Path, workplace: Path) -> None:
    """Run a script on the session, and kill the client while it runs."""
    script = workplace / "script"
    script.write_text(f"touch {workplace}/work/runs; sleep 3601")
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as client:
        while not (workplace / "work" / "runs").exists():
            assert client.poll() is None
            time.sleep(0.05)
        client.kill()


@pytest.mark.costly
def test_commands_come_back_to_hosts_and_mounts(cli: Cli, source: Path, workplace: Path) -> None:
    assert cli("up", "--hosts", "local:2").stdout == "session default is up: host0, host1\n"
    assert cli("up", "--hosts", "local:2").stdout == "session default is up\n"
    first = cli("run", source, "-", input="cat .hidden; pwd", stdin=None)
    assert first.stdout == f"== host0 ==\nhidden\n{source}\n== host1 ==\nhidden\n{source}\n"
    assert "connected to session default: 2 hosts" in first.stderr
    mounts = mounts_shown(cli)
    (source / ".hidden").write_text("edited\n")
    second = cli("run", source, "--hosts", "session:default", "-", input="cat .hidden", stdin=None)
    assert second.stdout == "== host0 ==\nedited\n== host1 ==\nedited\n"
    assert [m["pid"] for m in mounts_shown(cli)] == [m["pid"] for m in mounts], "the same mount"
    stores = {tree.parent for tree in (workplace / "store").rglob("*.tree")}
    assert len(stores) == 2
    await_last(stores)
    for mount in mounts:
        assert_same(source, Path(f"/proc/{mount['pid']}/root{source}"))
    status = cli("status", "--each").stdout
    assert re.search(r"^session default: local:2  up \d+ s  host\[0-1\]$", status, re.MULTILINE)
    assert status.count("generation 2") == 2
    done = cli("down")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert cli("status").stdout == "nothing is mounted\n"
    done = cli("down")
    assert (done.returncode, "there is no session default" in done.stderr) == (68, True)


@pytest.mark.costly
def test_a_session_has_a_name_and_is_not_taken_for_another(cli: Cli, source: Path) -> None:
    made = cli("up", "-v", "--name", "a", "--hosts", "local:1")
    assert made.returncode == 0
    assert re.search("^run: .* -m wheelmount.hosts.worker ipc://", made.stderr, re.MULTILINE)
    assert re.search("^setting: store = .* [(]WHEELMOUNT_STORE[)]", made.stderr, re.MULTILINE)
    done = cli("up", "--name", "a", "--hosts", "local:2")
    assert (done.returncode, "session a is up with local:1" in done.stderr) == (64, True)
    alone = cli("run", source, "-", input="echo $WHEELMOUNT_HOST", stdin=None)
    assert "connected" not in alone.stderr, "only the session `default` is taken unasked"
    named = cli("run", source, "--hosts", "session:a", "-", input="pwd", stdin=None)
    assert "connected to session a: 1 host" in named.stderr
    missing = cli("run", source, "--hosts", "session:b", "-")
    assert missing.returncode == 68
    assert "hint: run `wheelmount up --name b`" in missing.stderr
    assert cli("down", "--all").returncode == 0


@pytest.mark.costly
@pytest.mark.timeout(300)
def test_a_command_of_a_session_may_take_longer_than_monarch_waits_for_its_first_client(
    cli: Cli, source: Path
) -> None:
    """Monarch fails calls after 2 minutes in which an actor's first client says nothing."""
    assert cli("up", "--hosts", "local:1").returncode == 0
    script = "sleep 135; echo done"
    done = cli("run", source, "-", input=script, stdin=None, timeout=240)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert cli("down").returncode == 0


@pytest.mark.costly
def test_mounts_of_a_session_can_be_made_refreshed_and_taken_down(cli: Cli, source: Path) -> None:
    cli("up", "--hosts", "local:1")
    assert cli("mount", source).stdout == f"host0 {source}\n"
    assert cli("refresh", source).stdout == f"host0 {source} unchanged\n"
    (source / "new").touch()
    assert cli("refresh", source).stdout == f"host0 {source} refreshed\n"
    (mount,) = mounts_shown(cli)
    assert Path(f"/proc/{mount['pid']}/root{source}/new").exists()
    assert cli("umount", mount["identity"]).returncode == 0
    assert mounts_shown(cli) == []
    assert cli("run", source, "-", input="ls new", stdin=None).stdout.endswith("new\n")
    assert cli("down").returncode == 0


@pytest.mark.costly
def test_a_mount_of_a_session_is_not_taken_for_one_with_other_options(
    cli: Cli, source: Path
) -> None:
    cli("up", "--hosts", "local:1")
    assert cli("mount", source).returncode == 0
    (mount,) = mounts_shown(cli)
    shown = Path(f"/proc/{mount['pid']}/root{source}")
    for options, setting in {("--private",): "access", ("--adapter", "devfuse"): "adapter"}.items():
        done = cli("mount", *options, source)
        assert (done.returncode, f"already, with another {setting}" in done.stderr) == (73, True)
        assert f"run `wheelmount umount {mount['identity']}` first" in done.stderr
    assert cli("mount", "--public", source).returncode == 0
    assert shown.stat().st_mode & 0o777 == 0o755
    assert cli("umount", source).returncode == 0
    assert cli("mount", "--private", source).returncode == 0
    for again in [], ["--private"]:
        assert cli("mount", *again, source).returncode == 0
    (mount,) = mounts_shown(cli)
    assert Path(f"/proc/{mount['pid']}/root{source}").stat().st_mode & 0o777 == 0o700
    assert cli("mount", "--public", source).returncode == 73
    assert cli("down").returncode == 0


@pytest.mark.costly
def test_one_command_reaches_several_sessions(cli: Cli, source: Path) -> None:
    for name in ("a", "b"):
        assert cli("up", "--name", name, "--hosts", "local:1").returncode == 0
        assert cli("mount", source, "--hosts", f"session:{name}").returncode == 0
    (source / "new").touch()
    done = cli("refresh", source)
    assert done.stdout == 2 * f"host0 {source} refreshed\n", done.stderr
    assert cli("umount", "--all").returncode == 0
    assert mounts_shown(cli) == []
    done = cli("down", "--all")
    assert (done.returncode, "stop: 2 sets of hosts" in done.stderr) == (0, True)
    assert cli("status").stdout == "nothing is mounted\n"


@pytest.mark.costly
def test_a_mount_follows_what_changes(cli: Cli, source: Path) -> None:
    cli("up", "--hosts", "local:1")
    cli("mount", source)
    (mount,) = mounts_shown(cli)
    shown = Path(f"/proc/{mount['pid']}/root{source}")
    command = [sys.executable, "-m", "wheelmount.cli.main", "refresh", "--watch", str(source)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as watching:  # type: ignore[call-overload]
        assert watching.stdout.readline() == f"host0 {source} unchanged\n"
        for number in range(2):
            (source / f"new{number}").touch()
            assert any("refreshed" in line for line in iter(watching.stdout.readline, ""))
            assert (shown / f"new{number}").exists()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 130
    assert cli("down").returncode == 0


@pytest.mark.costly
@pytest.mark.parametrize("stays", [True, False], ids=["of a session", "of no session"])
def test_a_mount_follows_though_a_file_is_edited_while_it_is_copied(
    cli: Cli, source: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    if stays:
        cli("up", "--hosts", "local:1")
    assert (
        cli("mount", source, "--hosts", "session:default" if stays else "local:2").returncode == 0
    )
    _make_delivery_slow(source, 8 << 20, monkeypatch)
    command = [sys.executable, "-m", "wheelmount.cli.main", "refresh", "--watch", str(source)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as watching:  # type: ignore[call-overload]
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(watching.stderr))
        reader.start()
        while not any("large changed while it was copied" in line for line in said):
            assert watching.poll() is None
            with (source / "large").open("r+b") as file:
                file.write(os.urandom(16))
            time.sleep(0.05)
        assert any("refreshed" in line for line in iter(watching.stdout.readline, ""))
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 130
        reader.join()
    expected = (source / "large").read_bytes()
    for mount in mounts_shown(cli):
        assert Path(f"/proc/{mount['pid']}/root{source}/large").read_bytes() == expected
    assert cli("down" if stays else "umount", *([] if stays else [source])).returncode == 0


def test_two_clients_at_once(cli: Cli, source: Path, workplace: Path) -> None:
    cli("up", "--hosts", "local:1")
    script = workplace / "script"
    script.write_text("sleep .5; cat .hidden")
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), str(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    clients = [subprocess.Popen(command, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for client in clients:
        out, errors = client.communicate(timeout=60)
        assert (client.returncode, out) == (0, "hidden\n"), errors
    assert len({mount["identity"] for mount in mounts_shown(cli)}) == 1
    assert cli("down").returncode == 0


def test_a_client_that_is_killed_takes_nothing_with_it(
    cli: Cli, source: Path, workplace: Path
) -> None:
    cli("up", "--hosts", "local:1")
    _run_and_kill(source, workplace)  # before it could say that the mount is whole
    done = cli("run", source, "-", input="cat .hidden", stdin=None)
    assert done.stdout == "hidden\n", done.stderr
    assert cli("down").returncode == 0
    running = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "3601"] not in running  # no other test runs this


def test_it_ends_while_a_command_uses_it(cli: Cli, source: Path, workplace: Path) -> None:
    cli("up", "--hosts", "local:1")
    script = workplace / "script"
    script.write_text(f"touch {workplace}/work/runs; exec sleep 30")
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as client:
        while not (workplace / "work" / "runs").exists():
            assert client.poll() is None
            time.sleep(0.05)
        assert cli("down").returncode == 0
        _, said = client.communicate(timeout=60)
    assert client.returncode not in (0, 1), said
    assert "error: " in said
    assert "Traceback" not in said
    assert _sessions(cli) == []


@pytest.mark.costly
def test_a_command_ends_with_its_session_whatever_its_hosts_do(
    cli: Cli, source: Path, workplace: Path, settings: Settings
) -> None:
    cli("up", "--hosts", "local:1")
    script = workplace / "script"
    script.write_text(f"touch {workplace}/work/runs; exec sleep 300")
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), str(script)]
    session = Session("default", settings)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as client:
        while not (workplace / "work" / "runs").exists():
            assert client.poll() is None
            time.sleep(0.05)
        while any(note.client for note in mounts_of(session.read()).values()):
            time.sleep(0.05)
        with session.lock():
            record, handles = session.read(), session.handles()
            session.forget()
        _, said = client.communicate(timeout=60)
    assert client.returncode == HostError.exit_code, said
    assert "error: session default was ended" in said
    with session.lock():
        session.write(record)
        session.keep(handles)
    assert cli("down").returncode == 0


def _make_delivery_slow(source: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the delivery of a directory take several seconds, with a file of some bytes."""
    for name, value in {"BLOCK_SIZE": "4096", "IN_FLIGHT": "1", "RING": "1"}.items():
        monkeypatch.setenv(f"WHEELMOUNT_{name}", value)
    (source / "large").write_bytes(os.urandom(size))


@pytest.mark.costly
def test_what_a_killed_client_had_not_delivered_is_delivered_by_the_next(
    cli: Cli, source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_delivery_slow(source, 16 << 20, monkeypatch)
    cli("up", "--hosts", "local:1")
    _run_and_kill(source, workplace)
    (left,) = mounts_shown(cli)
    assert left["held"] < left["size"], "it must be on the way"
    (source / ".hidden").write_text("edited\n")
    done = cli("run", source, "-", input="cat .hidden; sha256sum <large", stdin=None)
    digest = hashlib.sha256((source / "large").read_bytes()).hexdigest()
    assert done.stdout == f"edited\n{digest}  -\n", done.stderr
    (found,) = mounts_shown(cli)
    assert found["identity"] == left["identity"], "the same mount"
    assert found["held"] == found["size"]
    assert cli("down").returncode == 0


@pytest.mark.costly
def test_a_delivery_that_fails_leaves_a_later_mount_to_its_session(
    cli: Cli, source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_delivery_slow(source, 32 << 20, monkeypatch)
    cli("up", "--hosts", "local:1")
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), "-"]
    script = f"until [ -e {workplace}/work/end ]; do sleep 0.1; done"
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE) as client:
        assert client.stdin is not None
        client.stdin.write(script)
        client.stdin.close()
        while not any(mount.get("held") for mount in mounts_shown(cli)):
            assert client.poll() is None
        assert cli("umount", "--force", source).returncode == 0
        (source / "large").unlink()
        assert cli("mount", source).returncode == 0
        (workplace / "work" / "end").touch()
        assert client.wait(60) != 0, "its mount was taken away"
    (mount,) = mounts_shown(cli)
    assert mount["held"] == mount["size"]
    assert cli("umount", source).returncode == 0
    assert mounts_shown(cli) == []
    assert cli("down").returncode == 0


@pytest.mark.costly
def test_up_does_not_call_a_session_up_whose_process_for_commands_died(
    cli: Cli, source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("up", "--hosts", "local:1").returncode == 0
    assert cli("up", "--hosts", "local:1").returncode == 0
    monkeypatch.setenv("WHEELMOUNT_START_TIMEOUT", "10")
    for process in psutil.process_iter(["cmdline", "environ"]):
        mark = (process.info["environ"] or {}).get("WHEELMOUNT_LOCAL_HOST", "")
        if f"{workplace}/" in mark and "wheelmount.hosts.process" in process.info["cmdline"]:
            process.kill()
    done = cli("up", "--hosts", "local:1")
    assert done.returncode == 75
    assert "hint: if no command of the session works: `wheelmount down default`" in done.stderr
    assert cli("down").returncode == 0
    assert cli("up", "--hosts", "local:1").returncode == 0
    assert cli("run", source, "-", input="echo ran", stdin=None).stdout == "ran\n"
    assert cli("down").returncode == 0


@pytest.mark.parametrize("step", ["keep", "write"])
def test_hosts_whose_session_cannot_be_recorded_are_stopped(
    step: str, settings: Settings, workplace: Path
) -> None:
    script = f"""
from unittest import mock
from wheelmount import config
from wheelmount.hosts.session import Session
from wheelmount.hosts.spec import parse
from wheelmount.operations import sessions
from wheelmount.progress import SILENT
with mock.patch.object(Session, "{step}", side_effect=OSError("no space")):
    sessions.up(parse("local:1"), Session("one", config.load()), SILENT)
"""
    program = [sys.executable, "-c", script]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.endswith("OSError: no space\n")
    assert not Session("one", settings).exists
    assert not list(workplace.glob("runtime/*/hosts-*"))


@pytest.mark.parametrize("command", ["up", "down"])
def test_hosts_of_an_up_that_was_killed_are_ended_by_the_next_command(
    cli: Cli, settings: Settings, workplace: Path, command: str
) -> None:
    program = [sys.executable, "-c", UP_AND_DIE, "up", "--hosts", "local:1"]
    killed = subprocess.run(program, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not Session("default", settings).exists
    (left,) = workplace.glob("runtime/*/hosts-*")
    done = cli(command, *(["--hosts", "local:1"] if command == "up" else []))
    assert done.returncode == 0
    assert "ending what a killed `up` had started" in done.stderr
    assert not left.exists()
    assert cli("down").returncode == (0 if command == "up" else HostError.exit_code)


def test_processes_for_several_sets_of_hosts_end_with_their_command() -> None:
    program = [sys.executable, "-c", "from tests.cli.test_sessions import wait; wait()"]
    with subprocess.Popen(program, cwd=CHECKOUT, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        for _ in range(2):
            assert client.stdout.readline() == b"began\n"
        children = psutil.Process(client.pid).children()
        assert len(children) >= 2
        client.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def wait() -> None:
    """Work on two sets of hosts, of which one takes a moment and the other a minute."""
    apart.each([partial(_work, 0.0), partial(_work, 60.0)], SILENT, "wait")


def _work(seconds: float, _progress: Progress) -> None:
    print("began", flush=True)
    time.sleep(seconds)


@pytest.mark.costly
def test_a_verification_waits_for_the_command_that_delivers(
    cli: Cli, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_delivery_slow(source, 32 << 20, monkeypatch)
    cli("up", "--hosts", "local:1")
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), "-"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as client:  # type: ignore[call-overload]
        client.stdin.write("sha256sum <large")
        client.stdin.close()
        while not any(mount.get("held") for mount in mounts_shown(cli)):
            assert client.poll() is None
        done = cli("verify")
        said = client.stderr.read()
        assert client.wait(60) == 0, said
        digest = hashlib.sha256((source / "large").read_bytes()).hexdigest()
        assert client.stdout.read() == f"{digest}  -\n"
        assert done.returncode == 0, done.stderr
    assert len(mounts_shown(cli)) == 1, "it stays"
    assert cli("down").returncode == 0


@pytest.mark.costly
def test_a_session_whose_host_died_is_said_and_made_anew(cli: Cli, source: Path) -> None:
    cli("up", "--hosts", "local:2")
    cli("mount", source)
    runtime = os.environ["WHEELMOUNT_RUNTIME_DIR"]
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "wheelmount.hosts.worker" in line and runtime in line and line.endswith("host1"):
            process.send_signal(signal.SIGKILL)
            process.wait(10)
    assert "host1 does not answer" in str(_sessions(cli)[0]["lost"])
    done = cli("run", source, "-", input="pwd", stdin=None)
    assert done.returncode == 68
    assert "session default: host1 does not answer" in done.stderr
    assert "`wheelmount up --name default` makes it anew" in done.stderr
    again = cli("up", "--hosts", "local:2")
    assert again.stdout == "session default is up: host0, host1\n", again.stderr
    assert mounts_shown(cli) == []
    assert cli("run", source, "-", input="pwd", stdin=None).returncode == 0
    assert cli("down").returncode == 0


def test_a_command_does_not_wait_for_another_that_runs_where_all_bytes_are(
    cli: Cli, source: Path, workplace: Path
) -> None:
    cli("up", "--hosts", "local:1")
    runs, goes_on = workplace / "work" / "runs", workplace / "work" / "goes-on"
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdin is not None
        waits = f"until [ -e {goes_on} ]; do sleep .05; done"
        first.stdin.write(f"touch {runs}; {waits}; cat $WHEELMOUNT_MOUNT/.hidden")
        first.stdin.close()
        while not runs.exists():
            assert first.poll() is None
            time.sleep(0.05)
        (source / ".hidden").write_text("edited\n")
        done = cli("run", source, "-", input="cat .hidden", stdin=None)
        goes_on.touch()
        assert (done.returncode, done.stdout) == (0, "edited\n"), done.stderr
        assert first.stdout is not None
        assert first.stdout.read() == "edited\n", "it follows the refresh"
        assert first.wait(60) == 0
    assert cli("down").returncode == 0


@pytest.mark.costly
def test_a_client_that_was_killed_and_is_a_zombie_delivers_nothing(
    cli: Cli, source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_delivery_slow(source, 32 << 20, monkeypatch)
    cli("up", "--hosts", "local:1")
    command = [sys.executable, "-m", "wheelmount.cli.main", "mount", str(source)]
    with subprocess.Popen(command) as client:
        while not any(mount.get("held") for mount in mounts_shown(cli)):
            assert client.poll() is None
        client.kill()
        os.waitid(os.P_PID, client.pid, os.WEXITED | os.WNOWAIT)
        (source / "large").unlink()
        done = cli("run", source, "-", input="ls large || cat .hidden", stdin=None)
        assert (done.returncode, done.stdout) == (0, "hidden\n"), done.stderr
    assert cli("down").returncode == 0


@pytest.mark.costly
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"#!/nowhere/interpreter", "cannot run /nowhere/interpreter: No such file"),
        (b"#!/etc/passwd", "cannot run /etc/passwd: Permission denied"),
        (b"#!/bin/sh\0", "embedded null byte"),
        (b"#!/" + b"long" * 50_000, "File name too long"),
    ],
    ids=["missing", "no program", "null", "long"],
)
def test_a_script_that_does_not_start_is_removed(
    line: bytes, said: str, cli: Cli, source: Path, workplace: Path
) -> None:
    assert cli("up", "--hosts", "local:1").returncode == 0
    try:
        (workplace / "script").write_bytes(line + b"\n")
        done = cli("run", source, workplace / "script")
        assert done.returncode == 68, done.stderr
        assert said in done.stderr
        assert len(done.stderr) < 4096
        assert list(workplace.glob("runtime/*/*/run-*"))
        assert not list(workplace.glob("runtime/*/*/run-*/*"))
        assert cli("run", source, "-", input="cat .hidden", stdin=None).stdout == "hidden\n"
    finally:
        assert cli("down").returncode == 0


@pytest.mark.parametrize(
    ("kind", "hosts"),
    [("none", {}), ("local", {}), ("tls", {"identity": 1}), ("slurm", {}), ("kubernetes", {})],
)
def test_hosts_that_a_record_does_not_describe_are_named(
    settings: Settings, kind: str, hosts: dict[str, Any]
) -> None:
    record = Record("local:1", kind, ["host0"], hosts, notes={"mounts": {"key": {"source": 1}}})
    with pytest.raises(HostError, match="session bad is damaged"):
        hosts_of(Session("bad", settings), record)
    with pytest.raises(HostError, match="mounts is damaged"):
        mounts_of(record)


def test_one_whose_handles_cannot_be_read_is_ended(
    cli: Cli, source: Path, settings: Settings
) -> None:
    """As after an upgrade of Monarch, or where the power failed while they were written."""
    cli("up", "--hosts", "local:1")
    cli("mount", source)
    (Session("default", settings).directory / "handles").write_bytes(b"")
    again = cli("up", "--hosts", "local:1")
    assert again.returncode == HostError.exit_code, again.stderr
    assert "`wheelmount down default`" in again.stderr
    assert cli("down").returncode == 0
    assert _sessions(cli) == []
    assert mounts_shown(cli) == []


@pytest.mark.costly
@pytest.mark.parametrize("command", ["umount", "run"])
def test_a_mount_that_was_busy_on_one_host_is_unmounted_or_mounted_again(
    command: str, cli: Cli, source: Path, workplace: Path
) -> None:
    """The other host has it no more, and is not asked again."""
    assert cli("up", "--hosts", "local:2").returncode == 0
    run = "run", "-q", source, "-"
    assert cli(*run, input="true", stdin=None).returncode == 0
    busy = workplace / "busy"
    busy.touch()
    script = f"echo here; while [ -e {busy} ]; do sleep 0.1; done"
    argv = [sys.executable, "-m", "wheelmount.cli.main", "run", "-q", "--live", "--on", "host1"]
    with subprocess.Popen(
        [*argv, source, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as working:
        assert working.stdin is not None
        assert working.stdout is not None
        working.stdin.write(script)
        working.stdin.close()
        assert "here" in working.stdout.readline()
        done = cli("umount", source)
        assert (done.returncode, f"host1: {source} is busy" in done.stderr) == (73, True)
        busy.unlink()
    again = ("umount", source) if command == "umount" else run
    done = cli(*again, input="wc -c <page", stdin=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == (4 if command == "run" else 0)
    assert "lost" not in done.stderr
    assert cli("down").returncode == 0
