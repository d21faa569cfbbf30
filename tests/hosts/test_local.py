"""Local hosts and commands on them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import monarch.actor
import psutil
import pytest
from monarch.actor import Future

from tests.conftest import FORK_AND_DIE
from tests.hosts.lost import Lost
from wheelmount import entry
from wheelmount.config import Settings, private_directory
from wheelmount.errors import HostError, WaitError
from wheelmount.hosts import handshake, host, launcher, runtime
from wheelmount.hosts.address import Address
from wheelmount.hosts.command_actor import CHUNK, Command
from wheelmount.hosts.commands import Commands, Result, worst
from wheelmount.hosts.credentials import issue_for
from wheelmount.hosts.host import Host
from wheelmount.hosts.local import LocalHosts
from wheelmount.variables import CREDENTIALS

pytestmark = pytest.mark.hosts


def _script(text: str) -> Command:
    return Command(script=text.encode())


def test_hosts_are_processes_of_their_own(settings: Settings) -> None:
    with LocalHosts(3, settings) as hosts:
        assert [host.name for host in hosts] == ["host0", "host1", "host2"]
        assert len({os.getsid(pid) for pid in hosts.pids}) == 3
        assert (hosts.directory.stat().st_mode & 0o777) == 0o700
        directory, pids = hosts.directory, hosts.pids
    assert not directory.exists()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_they_end_with_their_client_though_a_child_of_it_goes_on(settings: Settings) -> None:
    command = [sys.executable, "-c", FORK_AND_DIE, "local:2"]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    place = settings.private_runtime()
    deadline = time.monotonic() + 30
    while (left := [*place.glob("hosts-*/host*")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(int(killed.stdout), signal.SIGTERM)
    assert left == []


def test_commands_run_on_each_and_tell_what_came_of_it(settings: Settings) -> None:
    script = 'echo "$WHEELMOUNT_HOST $1"; echo bad >&2; exit "$WHEELMOUNT_RANK"'
    with LocalHosts(2, settings) as hosts, Commands(list(hosts), 30) as commands:
        results = commands.run({h.name: Command(("an arg",), script.encode()) for h in hosts})
        first, second = results["host0"], results["host1"]
        assert isinstance(first, Result)
        assert isinstance(second, Result)
        assert (first.code, first.stdout, first.stderr) == (0, b"host0 an arg\n", b"bad\n")
        assert (second.code, second.stdout) == (1, b"host1 an arg\n")
        assert worst(results) == 1


def test_nothing_is_imported_from_where_anybody_may_write(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "this.py").write_text("print('a stranger')\n")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where hosts work, /tmp mostly
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        result = commands.run({"host0": Command(("python", "-m", "this"))})["host0"]
        assert isinstance(result, Result)
        assert b"Zen of Python" in result.stdout
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wheelmount.py").write_text("print('a stranger')\n")
    far = launcher.command(settings, "token", "name", 0, "no mode")
    done = subprocess.run(far, capture_output=True, text=True, check=False)
    assert "usage: launcher.py" in done.stderr
    assert "stranger" not in done.stdout


def test_large_output_comes_whole(settings: Settings) -> None:
    size = 2 * CHUNK + 12345
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        result = commands.run({"host0": _script(f"head -c {size} /dev/zero | tr '\\0' x")})["host0"]
        assert isinstance(result, Result)
        assert result.stdout == b"x" * size


def test_monarchs_variables_do_not_leak(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CREDENTIALS, "of a worker that this process is a child of")
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        result = commands.run({"host0": _script("env")})["host0"]
        assert isinstance(result, Result)
        names = {line.partition(b"=")[0] for line in result.stdout.splitlines()}
        own = (b"HYPERACTOR", b"BOOTSTRAP", *map(os.fsencode, runtime.SWITCHES))
        assert not {n for n in names if n.startswith((*own, os.fsencode(CREDENTIALS)))}


def test_a_signal_is_a_code_above_128(settings: Settings) -> None:
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        result = commands.run({"host0": _script("kill -9 $$")})["host0"]
        assert isinstance(result, Result)
        assert result.code == 128 + signal.SIGKILL


def test_a_missing_program_is_an_error(settings: Settings) -> None:
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        error = commands.run({"host0": Command(("no-such-program",))})["host0"]
        assert isinstance(error, HostError)
        assert "no-such-program" in error.message


def test_a_host_that_dies_while_it_works_is_an_error_and_others_finish(settings: Settings) -> None:
    script = 'if [ "$WHEELMOUNT_RANK" = 1 ]; then kill -9 "$PPID"; fi; sleep 2; echo done'
    started = time.monotonic()
    with LocalHosts(2, settings) as hosts, Commands(list(hosts), 30) as commands:
        results = commands.run({host.name: _script(script) for host in hosts})
        first = results["host0"]
        assert isinstance(first, Result)
        assert first.stdout == b"done\n"
        assert isinstance(results["host1"], HostError)
    assert time.monotonic() - started < 30


def test_a_command_goes_on_on_a_host_that_said_nothing_for_a_while(
    settings: Settings, workplace: Path
) -> None:
    """As where a machine swaps, is suspended, or waits for its file system."""
    started, goes_on = workplace / "started", workplace / "goes-on"
    script = _script(f"touch {started}; until [ -e {goes_on} ]; do sleep .1; done; echo done")
    results: dict[str, Any] = {}
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        running = threading.Thread(target=lambda: results.update(commands.run({"host0": script})))
        running.start()
        while not started.exists():
            assert running.is_alive()
            time.sleep(0.05)
        family = [psutil.Process(hosts.pids[0]), *psutil.Process(hosts.pids[0]).children()]
        for process in family:
            process.suspend()
        time.sleep(8)
        for process in family:
            process.resume()
        time.sleep(1)
        goes_on.touch()
        running.join()
    assert results["host0"].stdout == b"done\n", results


def test_a_host_that_dies_is_an_error_soon_though_monarch_waits_for_it(settings: Settings) -> None:
    runs = threading.Event()
    with LocalHosts(2, settings) as hosts, Commands(list(hosts), 3600) as commands:

        def kill_second(name: str, _stream: str, _piece: bytes) -> None:
            if name == "host1" and not runs.is_set():
                runs.set()
                psutil.Process(hosts.pids[1]).kill()

        script = _script("echo runs; sleep 1")
        results = commands.run({host.name: script for host in hosts}, kill_second)
        first, second = results["host0"], results["host1"]
    assert runs.is_set()
    assert isinstance(first, Result), first
    assert isinstance(second, HostError), second
    assert second.message.startswith("the host died: ipc://")


def test_a_command_starts_in_no_mount_that_is_just_being_replaced(settings: Settings) -> None:
    directory = private_directory(settings.private_runtime() / "mounts") / "mount-host0"
    directory.mkdir()
    entry.make(directory)
    command = replace(_script("pwd"), cwd="/", runtime_dir=settings.runtime_dir)
    results: dict[str, Any] = {}
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        commands.run({"host0": command})  # it has its process
        running = threading.Thread(target=lambda: results.update(commands.run({"host0": command})))
        with entry.replacing(directory):
            running.start()
            running.join(entry.PATIENCE / 2)
            assert running.is_alive()
        running.join()
    assert results["host0"].stdout == b"/\n", results
    shutil.rmtree(directory)


def test_a_launcher_that_is_ended_while_its_worker_starts_leaves_nothing(
    settings: Settings, workplace: Path
) -> None:
    """As where a job of Slurm is cancelled at that moment."""
    command = launcher.command(settings, "token", "name", 0, launcher.GUARDED)
    environment = {**os.environ, "SSH_CONNECTION": "127.0.0.1 1 127.0.0.1 22"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = launcher.hear("token", process.stdout.readline())
        assert said is not None
        address = Address.parse(said["listens"])
        process.stdin.write(issue_for(address, settings))
        process.stdin.flush()
        log = settings.private_runtime() / "hosts-token" / "name.log"
        while not log.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == 0
    assert not log.parent.exists()
    # the fixture sees that no process stays


def test_leaving_ends_what_still_runs(settings: Settings, workplace: Path) -> None:
    mark = workplace / "pid"
    code = f"""
import os, signal, threading, time
from pathlib import Path
from wheelmount.hosts import handshake, host, launcher, runtime
from wheelmount.hosts.address import Address
from wheelmount.hosts.local import LocalHosts
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Commands
def interrupt():
    while not Path({str(mark)!r}).exists():
        time.sleep(.05)
    time.sleep(.2)
    os.kill(os.getpid(), signal.SIGINT)
with LocalHosts(1) as hosts, Commands(list(hosts), 30) as commands:
    threading.Thread(target=interrupt, daemon=True).start()
    commands.run({{"host0": Command(script=b"echo $$ > {mark}; sleep 100 & wait")}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert b"KeyboardInterrupt" in done.stderr
    pid = int(mark.read_text())
    assert not psutil.pid_exists(pid)


def test_a_host_that_cannot_start_says_why(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    hosts = LocalHosts(2, settings, namespaces=False)
    with pytest.raises(HostError, match="host0 ended with code 1"):
        hosts.start()
    assert not hosts.directory.exists()


def test_a_host_that_does_not_come_up_is_given_up(
    settings: Settings, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = workplace / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    with pytest.raises(HostError, match="host0 does not come up"):
        LocalHosts(1, replace(settings, start_timeout=0.5), namespaces=False).start()


class _Early(LocalHosts):
    """Hosts of which the first call is answered as one that comes before they have agents."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(2, settings)
        self.reached = 0

    def _reached(self, answered: Collection[str] = ()) -> list[Host]:
        self.reached += 1
        hosts = super()._reached(answered)
        if self.reached > 1:
            return hosts
        return [hosts[0], Host("host1", _Refusing())]


def test_a_host_that_lost_a_message_is_called_again(settings: Settings) -> None:
    with _Unheard(settings) as hosts, Commands(list(hosts), 60) as commands:
        assert hosts.reached == 2
        results = commands.run({host.name: Command(("true",)) for host in hosts})
    assert [result.code for result in results.values() if isinstance(result, Result)] == [0, 0]


class _Unheard(_Early):
    """Hosts of which the first call is lost: Monarch says so (recorded), and never answers."""

    def _reached(self, answered: Collection[str] = ()) -> list[Host]:
        hosts = super()._reached(answered)
        if self.reached == 1:
            hosts[1] = Host("host1", _Silent())
            failure = Lost(self.addresses[1])
            threading.Timer(0.2, lambda: monarch.actor.unhandled_fault_hook(failure)).start()
        return hosts


@pytest.mark.parametrize("lost", [1, 2])
def test_a_host_that_says_nothing_is_called_again(
    lost: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "FIRST_WAIT", 0.5)
    with _Deaf(settings, lost) as hosts, Commands(list(hosts), 60) as commands:
        assert hosts.called == [["host0", "host1"], *[["host1"]] * lost]
        results = commands.run({host.name: Command(("true",)) for host in hosts})
    assert [result.code for result in results.values() if isinstance(result, Result)] == [0, 0]


def test_a_host_that_never_answers_is_given_up_in_time(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "FIRST_WAIT", 0.2)
    hosts = _Deaf(replace(settings, start_timeout=3), lost=1000)
    with pytest.raises(WaitError, match=r"^host1: no answer within 2\.25 s$"):
        hosts.start()
    assert not hosts.directory.exists()


def test_hosts_that_give_no_answer_are_started_again(settings: Settings) -> None:
    with (
        _Stuck(replace(settings, start_timeout=16)) as hosts,
        Commands(list(hosts), 60) as commands,
    ):
        assert hosts.started == 2
        results = commands.run({host.name: Command(("true",)) for host in hosts})
    assert [result.code for result in results.values() if isinstance(result, Result)] == [0]
    assert not list(hosts.directory.parent.glob("hosts-*"))


def test_a_process_for_commands_that_gives_no_answer_is_started_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = handshake.begin, []

    def begin_later(procs: Any) -> Any:
        begun.append(procs)
        return _Silent() if len(begun) == 1 else begin(procs)

    monkeypatch.setattr(handshake, "begin", begin_later)
    with LocalHosts(2, settings) as hosts, Commands(list(hosts), 16) as commands:
        rank = Command(script=b"echo $WHEELMOUNT_RANK")
        results = commands.run({host.name: rank for host in hosts})
        assert len(begun) == 3
    outputs = [result.stdout for result in results.values() if isinstance(result, Result)]
    assert outputs == [b"0\n", b"1\n"]


class _Stuck(LocalHosts):
    """A host whose process is stopped by a signal when it first listens."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(1, settings)
        self.started = 0

    def _await_ready(self) -> None:
        super()._await_ready()
        self.started += 1
        if self.started == 1:
            os.kill(self.pids[0], signal.SIGSTOP)


class _Deaf(LocalHosts):
    """Hosts of which the second hears nothing at first, and Monarch reports no lost message."""

    def __init__(self, settings: Settings, lost: int) -> None:
        super().__init__(2, settings)
        self._lost = lost
        self.called: list[list[str]] = []

    def _reached(self, answered: Collection[str] = ()) -> list[Host]:
        hosts = super()._reached(answered)
        self.called.append([host.name for host in hosts])
        if len(self.called) <= self._lost:
            hosts[-1] = Host("host1", _Silent())
        return hosts


class _Silent:
    @property
    def initialized(self) -> Any:
        return self

    def as_asyncio(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


class _Refusing:
    @property
    def initialized(self) -> Any:
        async def fail() -> None:
            raise RuntimeError("ttl expired for host_agent")

        return Future._from_coro(fail())


def test_a_host_that_is_called_before_it_has_an_agent_is_called_again(settings: Settings) -> None:
    with _Early(settings) as hosts, Commands(list(hosts), 60) as commands:
        assert hosts.reached == 2
        results = commands.run({host.name: Command(("true",)) for host in hosts})
    assert [result.code for result in results.values() if isinstance(result, Result)] == [0, 0]


SLOW = """
import os, sys, time
if "wheelmount.hosts.process" in sys.orig_argv:
    time.sleep(4 * int(os.environ["WHEELMOUNT_LOCAL_HOST"][-1]))
"""


def test_a_slow_process_is_awaited_while_those_of_other_hosts_answer(
    workplace: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a machine with many hosts, whose processes start one after the other."""
    (workplace / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(workplace))
    with (
        LocalHosts(3, settings) as hosts,
        Commands(list(hosts), 24) as commands,  # the third answers after more than a quarter
    ):
        results = commands.run({host.name: Command(("echo", host.name)) for host in hosts})
    assert results.texts == {f"host{n}": f"host{n}\n" for n in range(3)}
    assert "starting another" not in caplog.text
