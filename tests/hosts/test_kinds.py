"""The same on every kind of hosts that engines of others start: a real sshd, a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from tests.conftest import FORK_AND_DIE, UP_AND_DIE
from tests.hosts.told import assert_only_monarch_is_told, environments
from tests.testbed import LOGIN, Lab
from tests.testbed.service import WORKER_PORT, Service, start_workers
from tests.testbed.slurm import start_slurm
from tests.testbed.sshd import start_sshd
from tests.testbed.traces import Traces
from tests.wheels.support import make_wheel
from wheelmount.errors import InputError
from wheelmount.hosts.address import SECURE
from wheelmount.variables import TLS
from wheelmount.wheels.target import Target

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

PATH = "/mnt/tree"

KINDS = ["ssh:host0,host1", "slurm:2"]

START_TIMEOUT = 60.0
"""Seconds that hosts may take to start; those of a job that is cancelled do not take them."""


@pytest.fixture(scope="module")
def lab(shared_source: Path) -> Iterator[Lab]:
    before = Traces()
    with Lab(3, shared=[shared_source.parent]) as made:
        start_sshd(made)
        start_slurm(made)
        traces = Traces(besides=before)
        yield made
    assert traces.left() == []


def _command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "wheelmount.cli.main", *map(str, words)]


def _call(
    lab: Lab, *words: str | Path, script: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return lab.run(
        LOGIN, _command(*words), stdin=None, input=script, env={**os.environ, **environment}
    )


def _queue(lab: Lab) -> list[str]:
    return lab.run(LOGIN, ["squeue", "--noheader", "--format=%T %r"]).stdout.splitlines()


def _processes(lab: Lab, host: str) -> list[str]:
    """Processes of ours on a host."""
    done = lab.run(host, ["pgrep", "--full", "--list-full", "wheelmount|monarch"])
    return done.stdout.splitlines()


def _assert_clean(lab: Lab, hosts: Sequence[str] | None = None) -> None:
    deadline = time.monotonic() + 60
    for host in hosts or lab.hosts:
        while _processes(lab, host) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert _processes(lab, host) == []
        assert lab.run(host, ["sh", "-c", f"ls {PATH} /tmp/wheelmount-0/*/*"]).stdout == ""
    while _queue(lab) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _queue(lab) == []


@pytest.mark.parametrize("spec", KINDS)
def test_a_script_runs_where_the_directory_is(lab: Lab, source: Path, spec: str) -> None:
    script = "hostname; pwd; cat .hidden; exit $WHEELMOUNT_RANK"
    done = _call(lab, "run", source, "--hosts", spec, "--mntpoint", PATH, "-", script=script)
    assert done.returncode == 1, done.stderr
    assert "security" not in done.stderr
    blocks = [f"== {host} ==\n{host}\n{PATH}\nhidden\n" for host in ("host0", "host1")]
    assert done.stdout == "".join(blocks)
    _assert_clean(lab)


@pytest.mark.parametrize("spec", KINDS)
def test_hosts_have_a_certificate_for_themselves_and_only_monarch_has_it(
    lab: Lab, source: Path, spec: str
) -> None:
    started, script = source.parent / "started", source.parent / "script"
    seen = source.parent / "seen"
    for path in (started, seen):
        path.unlink(missing_ok=True)
    script.write_text(f"touch {started}; until [ -e {seen} ]; do sleep 0.1; done")
    command = _command("run", "--hosts", spec, "--mntpoint", PATH, source, script)
    own_secrets = {
        "WHEELMOUNT_CREDENTIALS": "secret of login",
        "HYPERACTOR_TLS_KEY": "key of login",
    }
    environment = {**os.environ, **own_secrets}
    with lab.popen(LOGIN, command, stderr=subprocess.PIPE, env=environment) as client:
        while not started.exists():
            assert client.poll() is None, client.communicate()[1]
            time.sleep(0.05)
        there = {host: environments(lab, host) for host in ("login", "host0")}
        seen.touch()
        client.communicate(timeout=60)
    for host, processes in there.items():
        for command_line, variables in processes:
            if host == "login" and "wheelmount.cli.main" in command_line:
                continue
            assert not set(own_secrets.values()).intersection(variables.values()), command_line
    assert_only_monarch_is_told(there["host0"])
    assert [words for words, variables in there["host0"] if "WHEELMOUNT_RANK" in variables]
    given = "".join(
        variables[name] for _, variables in there["host0"] for name in TLS if name in variables
    )
    certificates = x509.load_pem_x509_certificates(given.encode())
    own = [each for each in certificates if each.subject != each.issuer]
    assert own
    (key,) = set(re.findall("-----BEGIN PRIVATE.*?-----END", given, re.DOTALL))
    secret = serialization.load_pem_private_key(f"{key} PRIVATE KEY-----\n".encode(), None)
    for each in own:
        assert each.public_key() == secret.public_key()  # and so it is not the authority's
        alternatives = each.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        addresses = set(map(str, alternatives.get_values_for_type(x509.IPAddress)))
        mine = {lab.address(host) for host in ("host0", "host1")}
        assert addresses <= (mine if spec.startswith("slurm") else {lab.address("host0")})
        assert each.not_valid_after_utc - each.not_valid_before_utc < timedelta(days=32)
    _assert_clean(lab)


GREETING = "echo '42'; echo '{\"address\": 42}'; printf 'half a line'; echo"


def test_what_login_shells_say_is_passed_over(lab: Lab, source: Path) -> None:
    """Greetings, and the shells that people have."""
    for host, shell in (("host0", "tcsh"), ("host1", "fish"), ("host2", "bash")):
        if shutil.which(shell) is None:
            continue
        lines = f"{GREETING}\n"
        start = {"tcsh": ".tcshrc", "fish": ".config/fish/config.fish", "bash": ".bashrc"}[shell]
        write = 'cd; mkdir -p .config/fish; cat >"$0"; usermod --shell "$(command -v $1)" root'
        prepare = ["sh", "-c", write, start, shell]
        lab.run(host, prepare, stdin=None, input=lines, check=True)
    where = ["--hosts", "ssh:host0,host1,host2", "--mntpoint", PATH]
    done = _call(lab, "run", *where, source, "-", script="pwd")
    for host in ("host0", "host1", "host2"):
        lab.run(host, ["sh", "-c", "cd; rm -f .tcshrc .bashrc .config/fish/config.fish"])
        lab.run(host, ["usermod", "--shell", "/bin/bash", "root"], check=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(PATH) == 3
    _assert_clean(lab)


CONFIGURATION = """
Host far
  HostName host1
  ProxyJump host0
  ControlMaster auto
  ControlPath ~/.ssh/%C
  ControlPersist 120
"""


@pytest.mark.costly
def test_ssh_goes_as_it_is_configured(lab: Lab, source: Path) -> None:
    """By another host, by a connection that is shared and stays, as a user, to another port."""
    write = ["sh", "-c", "umask 077; cat >~/.ssh/config"]
    lab.run(LOGIN, write, stdin=None, input=CONFIGURATION, check=True)
    daemon = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-p", "2222"]
    other = Service(lab, "host2", [*daemon, "-h", "/root/.ssh/host_key"], 2222)
    other.await_port()
    trust = "sed 's/^host2 /[host2]:2222 /;t;d' ~/.ssh/known_hosts >>~/.ssh/known_hosts"
    lab.run(LOGIN, ["sh", "-c", trust], check=True)
    where = ["--hosts", "ssh:far,root@host2:2222", "--mntpoint", PATH]
    try:
        for _ in range(2):  # the first makes the connection that is shared
            done = _call(lab, "run", *where, source, "-", script="hostname; cat .hidden")
            shown = "== far ==\nhost1\nhidden\n== host2 ==\nhost2\nhidden\n"
            assert done.stdout == shown, done.stderr
            assert lab.run(LOGIN, ["ssh", "-O", "check", "far"]).returncode == 0
        assert _call(lab, "up", "--hosts", "ssh:far").returncode == 0
        assert _call(lab, "down").returncode == 0
    finally:
        lab.run(LOGIN, ["ssh", "-O", "exit", "far"])
        lab.run(LOGIN, ["rm", "/root/.ssh/config"], check=True)
        lab.run("host2", ["pkill", "-KILL", "--full", "sshd -D .* -p 2222"], check=True)
        other.process.wait(60)
    _assert_clean(lab)


@pytest.mark.costly
@pytest.mark.parametrize("spec", KINDS)
def test_a_session_stays_and_goes(lab: Lab, source: Path, spec: str) -> None:
    up = _call(lab, "up", "--hosts", spec)
    assert (up.returncode, up.stdout) == (0, "session default is up: host0, host1\n"), up.stderr
    for text in ("hidden\n", "edited\n"):
        (source / ".hidden").write_text(text)
        done = _call(lab, "run", source, "--mntpoint", PATH, "-", script="cat .hidden")
        assert done.stdout == f"== host0 ==\n{text}== host1 ==\n{text}", done.stderr
        assert "connected to session default: 2 hosts" in done.stderr
    made = ["mkdir", "-p", "/root/.local/state/wheelmount/overlays/own/host1/upper"]
    lab.run("host1", made, check=True)
    status = _call(lab, "status", "--each")
    assert f"session default: {spec}  up" in status.stdout
    assert "overlay own  host1  directory" in status.stdout
    assert status.stdout.count(f"{source} at {PATH}") == 2, status.stderr
    down = _call(lab, "down")
    assert (down.returncode, down.stdout) == (0, ""), down.stderr
    _assert_clean(lab)
    (source / ".hidden").write_text("hidden\n")


@pytest.mark.costly
@pytest.mark.parametrize("spec", KINDS)
def test_hosts_of_an_up_that_was_killed_are_ended(lab: Lab, spec: str) -> None:
    killed = lab.run(LOGIN, [sys.executable, "-c", UP_AND_DIE, "up", "--hosts", spec])
    assert killed.returncode != 0
    assert _call(lab, "status").stdout == "nothing is mounted\n"
    down = _call(lab, "down")
    assert (down.returncode, "ending what a killed `up` had started" in down.stderr) == (0, True)
    _assert_clean(lab)


@pytest.mark.costly
@pytest.mark.parametrize("spec", KINDS)
def test_hosts_of_a_program_that_was_killed_end_though_a_child_of_it_goes_on(
    lab: Lab, spec: str
) -> None:
    killed = lab.run(LOGIN, [sys.executable, "-c", FORK_AND_DIE, spec])
    assert killed.returncode != 0
    _assert_clean(lab)
    lab.run(LOGIN, ["kill", killed.stdout.strip()], check=True)


@pytest.mark.costly
@pytest.mark.parametrize("spec", KINDS)
def test_logs_are_read_where_they_are(lab: Lab, source: Path, spec: str) -> None:
    """Of mounts and of the hosts' own processes, at once and as more is logged."""
    done = _call(lab, "up", "--hosts", spec)
    assert done.returncode == 0, done.stderr
    try:
        done = _call(lab, "mount", source, PATH)
        assert done.returncode == 0, done.stderr
        for host in ("host0", "host1"):
            script = f"for log in /tmp/wheelmount-0/mounts/*/log; do echo of {host} >>$log; done"
            lab.run(host, ["sh", "-c", script], check=True)
        there = ["--hosts", "session:default"]
        done = _call(lab, "logs", PATH, *there)
        assert done.returncode == 0, done.stderr
        for host in ("host0", "host1"):
            assert re.search(rf"^mount \w+ {host}: of {host}$", done.stdout, re.MULTILINE)
        shown = json.loads(_call(lab, "logs", PATH, "--json", *there).stdout)
        lines = [json.loads(line) for line in shown[1]["stdout"].splitlines()]
        assert "of host1" in [line["line"] for line in lines]
        assert "host host" in _call(lab, "logs", *there).stdout
        assert _call(lab, "logs", "/nothing", *there).returncode == 64
        follow = _command("logs", "--follow", PATH, *there)
        with lab.popen(LOGIN, follow, stdout=subprocess.PIPE) as following:
            assert following.stdout is not None
            awaited = {f"of {host}" for host in ("host0", "host1")}
            while awaited:
                line = following.stdout.readline().decode()
                assert line, "it goes on"
                awaited.discard(line.strip().rpartition(": ")[2])
            lab.run("host1", ["sh", "-c", "echo later >>$(echo /tmp/wheelmount-0/mounts/*/log)"])
            while not line.endswith("later\n"):
                line = following.stdout.readline().decode()
                assert line, "it goes on"
            assert line.startswith("host1: mount ")
            following.send_signal(signal.SIGINT)
            following.wait(60)
    finally:
        _call(lab, "down")
    _assert_clean(lab)


@pytest.mark.parametrize("spec", KINDS)
def test_an_environment_is_mounted(lab: Lab, source: Path, spec: str) -> None:
    place = source.parent
    make_wheel(place / "wheels", "small")
    own = {"WHEELMOUNT_CACHE_DIR": str(place / "cache"), "UV_CACHE_DIR": str(place / "uv")}
    own |= {"UV_OFFLINE": "1", "UV_NO_CONFIG": "1"}
    run = ["run", "--with", "small", "--find-links", f"{place}/wheels", "--hosts", spec]
    code = "import os, small, sys; print(small.VALUE, sys.prefix, os.environ['WHEELMOUNT_RANK'])"
    done = _call(lab, *run, "-", script=code, **own)
    assert done.returncode == 0, done.stderr
    said = [line.rpartition(" ") for line in done.stdout.splitlines() if line.startswith("1.0 ")]
    assert [rank for _, _, rank in said] == ["0", "1"], done.stdout
    assert len({before for before, _, _ in said}) == 1  # one path
    assert "/environment-" in said[0][0]
    _assert_clean(lab)


@pytest.mark.costly
@pytest.mark.parametrize("spec", KINDS)
def test_hosts_say_what_wheels_are_to_be_for(lab: Lab, source: Path, spec: str) -> None:
    place, venv = source.parent, "/mnt/env"
    wheel = make_wheel(place, "own")
    own = {"WHEELMOUNT_CACHE_DIR": str(place / "cache"), "UV_CACHE_DIR": str(place / "uv")}
    done = _call(lab, "install", wheel, "--hosts", spec, "--venv", venv, **own)
    assert done.returncode == 0, done.stderr
    assert "ask: 2 hosts in " in done.stderr
    assert f"resolve: 1 package for {Target.here()} in " in done.stderr
    for host in ("host0", "host1"):
        said = lab.run(host, [f"{venv}/bin/python", "-c", "import own; print(own.VALUE)"]).stdout
        assert said == "1.0\n"
        lab.run(host, ["rm", "-r", venv], check=True)
    done = _call(lab, "download", wheel, "-d", place / "house", "--hosts", spec, **own)
    assert done.stdout == f"{wheel.name}\n", done.stderr
    assert "ask: 2 hosts in " in done.stderr
    assert f"resolve: 1 package for {Target.here()} in " in done.stderr
    _assert_clean(lab)


@pytest.mark.costly
@pytest.mark.parametrize("spec", [*KINDS, "slurm:2,exclusive"])
def test_an_interrupted_client_leaves_nothing(lab: Lab, source: Path, spec: str) -> None:
    started = source.parent / "started"
    script = source.parent / "script"
    script.write_text(f"touch {started}; sleep 100")
    command = _command("run", source, "--hosts", spec, "--mntpoint", PATH, script)
    for number in (signal.SIGINT, signal.SIGKILL):
        started.unlink(missing_ok=True)
        # In a session of its own, as what nsenter started is asked and not nsenter.
        with lab.popen(LOGIN, ["setsid", "--wait", *command], stderr=subprocess.PIPE) as client:
            while not started.exists():
                assert client.poll() is None, client.communicate()[1]
                time.sleep(0.05)
            signalled = ["pkill", f"-{number}", "--full", "--oldest", "cli.main run"]
            lab.run(LOGIN, signalled, check=True)
            client.communicate(timeout=60)
        _assert_clean(lab)


def test_hosts_that_ssh_cannot_reach_are_named(lab: Lab, source: Path) -> None:
    done = _call(lab, "run", source, "--hosts", "ssh:host0,nowhere", "--mntpoint", PATH, "-")
    assert done.returncode == 68
    assert "error: nowhere: ssh: Could not resolve hostname nowhere" in done.stderr
    assert "hint: `ssh HOST true` must work" in done.stderr
    _assert_clean(lab)


@pytest.mark.parametrize("spec", KINDS)
def test_hosts_without_wheelmount_are_named(lab: Lab, source: Path, spec: str) -> None:
    done = _call(
        lab, "run", source, "--hosts", spec, "--mntpoint", PATH, "-", WHEELMOUNT_PYTHON="/no/python"
    )
    assert done.returncode == 68
    assert "/no/python" in done.stderr
    assert "hint: wheelmount must be installed there" in done.stderr
    _assert_clean(lab)


def test_a_job_that_waits_says_why_and_goes_with_an_interrupt(lab: Lab, source: Path) -> None:
    holder = ["sbatch", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 100"]
    lab.run(LOGIN, holder, check=True)
    try:
        while "RUNNING None" not in _queue(lab):
            time.sleep(0.1)
        command = _command("run", source, "--hosts", "slurm:2,exclusive", "--mntpoint", PATH, "-")
        with lab.popen(LOGIN, ["setsid", "--wait", *command], stderr=subprocess.PIPE) as client:
            assert client.stderr is not None
            while b"waits: Resources" not in client.stderr.readline():
                assert client.poll() is None, client.communicate()[1]
            lab.run(LOGIN, ["pkill", "-INT", "--full", "--oldest", "cli.main run"], check=True)
            _, errors = client.communicate(timeout=60)
        assert b"interrupted" in errors
        assert _queue(lab) == ["RUNNING None"]
    finally:
        lab.run(LOGIN, ["scancel", "--user=root"], check=True)
    _assert_clean(lab)


@pytest.mark.parametrize("words", ["run", "up"])
def test_a_client_that_is_killed_while_its_job_waits_leaves_no_job(
    lab: Lab, source: Path, words: str
) -> None:
    holder = ["sbatch", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 300"]
    lab.run(LOGIN, holder, check=True)
    command = _command(words, "--hosts", "slurm:2,exclusive")
    if words == "run":
        command += ["--mntpoint", PATH, str(source), "-"]
    try:
        while "RUNNING None" not in _queue(lab):
            time.sleep(0.1)
        with lab.popen(LOGIN, ["setsid", "--wait", *command], stderr=subprocess.PIPE) as client:
            assert client.stderr is not None
            while b"waits: Resources" not in client.stderr.readline():
                assert client.poll() is None, client.communicate()[1]
            kill = ["pkill", "-KILL", "--full", "--oldest", f"cli.main {words}"]
            lab.run(LOGIN, kill, check=True)
            client.wait(60)
        deadline = time.monotonic() + 60
        while (queue := _queue(lab)) != ["RUNNING None"]:
            assert time.monotonic() < deadline, queue
            time.sleep(0.2)
    finally:
        lab.run(LOGIN, ["scancel", "--user=root"], check=True)
    _assert_clean(lab)


def test_options_go_to_slurm_and_its_refusal_to_the_user(lab: Lab, source: Path) -> None:
    done = _call(lab, "up", "--hosts", "slurm:1,partition=none")
    assert done.returncode == 68
    assert "invalid partition name specified" in done.stderr.lower()
    done = _call(lab, "run", source, "--hosts", "slurm:1,partition=none", "-")
    assert done.returncode == 68
    assert "invalid partition name specified" in done.stderr.lower()
    _assert_clean(lab)


@pytest.mark.costly
def test_a_job_cancelled_from_outside_is_said_and_leaves_no_mount(lab: Lab, source: Path) -> None:
    _call(lab, "up", "--hosts", "slurm:2")
    done = _call(lab, "mount", source, PATH)
    assert done.stdout == f"host0 {PATH}\nhost1 {PATH}\n", done.stderr
    lab.run(LOGIN, ["scancel", "--user=root"], check=True)
    _assert_clean(lab)
    status = _call(lab, "status")
    assert "cannot be used: job" in status.stdout
    done = _call(lab, "run", source, "--mntpoint", PATH, "-", script="pwd")
    assert done.returncode == 68
    assert "has ended" in done.stderr
    assert "`wheelmount up --name default` makes it anew" in done.stderr
    anew = _call(lab, "up", "--hosts", "slurm:1,time=10")
    assert (anew.returncode, anew.stdout) == (0, "session default is up: host0\n"), anew.stderr
    assert _call(lab, "down").returncode == 0


@pytest.mark.costly
def test_a_time_limit_that_was_reached_is_said(lab: Lab, source: Path) -> None:
    assert _call(lab, "up", "--hosts", "slurm:1,time=1").returncode == 0
    started = source.parent / "started"
    started.unlink(missing_ok=True)
    script = source.parent / "script"
    script.write_text(f"touch {started}; sleep 100")
    command = _command("run", source, "--hosts", "slurm:2,time=1", "--mntpoint", PATH, script)
    with lab.popen(LOGIN, command, stderr=subprocess.PIPE) as client:
        while not started.exists():
            assert client.poll() is None, client.communicate()[1]
            time.sleep(0.05)
        # Limits are in minutes; Slurm looks twice in one whether a job is at its end.
        for job in lab.run(LOGIN, ["squeue", "--noheader", "--format=%A"]).stdout.split():
            ends = ["scontrol", "update", f"JobId={job}", "EndTime=now"]
            lab.run(LOGIN, ends, check=True)
        _, errors = client.communicate(timeout=90)
    assert client.returncode == 68
    said = rb"host\[0-1\]: job \d+ has ended: its time limit was reached"
    assert re.search(said, errors), errors
    _assert_clean(lab)
    assert "has ended: its time limit was reached" in _call(lab, "status").stdout
    done = _call(lab, "run", source, "--mntpoint", PATH, "-", script="pwd")
    assert (done.returncode, "its time limit was reached" in done.stderr) == (68, True)
    assert "`wheelmount up --name default` makes it anew" in done.stderr
    assert _call(lab, "down").returncode == 0


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["ssh", "slurm", "tls"])
def test_a_host_that_goes_down_is_named_and_the_others_finish(source: Path, kind: str) -> None:
    own = {**os.environ, "WHEELMOUNT_STATE_DIR": str(source.parent / "state")}
    with Lab(2, shared=[source.parent]) as small:
        names = small.hosts
        if kind == "ssh":
            start_sshd(small)
            spec = "ssh:host0,host1"
        elif kind == "slurm":
            start_slurm(small)
            spec = "slurm:2"
        else:
            start_workers(small, SECURE, env=own)
            names = [small.address(host) for host in small.hosts]
            spec = "tls://" + ",".join(f"{name}:{WORKER_PORT}" for name in names)
        started = source.parent / "started"
        started.unlink(missing_ok=True)
        script = source.parent / "script"
        script.write_text(f"touch {started}; sleep 3; hostname")
        command = _command("run", source, "--hosts", spec, "--mntpoint", PATH, script)
        pipe = subprocess.PIPE
        with small.popen(LOGIN, command, stdout=pipe, stderr=pipe, env=own) as client:
            while not started.exists():
                assert client.poll() is None, client.communicate()[1]
                time.sleep(0.05)
            small.kill("host1")
            out, errors = client.communicate(timeout=60)
        assert out.decode() == f"== {names[0]} ==\nhost0\n"
        assert f"error: {names[1]}: the host died" in errors.decode()
        assert client.returncode == 68


@pytest.mark.costly
def test_a_session_goes_on_hosts_that_answer_though_another_crashed(source: Path) -> None:
    own = {**os.environ, "WHEELMOUNT_STATE_DIR": str(source.parent / "state")}
    with Lab(2, shared=[source.parent]) as small:
        start_sshd(small)
        for words in (["up", "--hosts", "ssh:host0,host1"], ["mount", source, PATH]):
            done = small.run(LOGIN, _command(*words), env=own)
            assert done.returncode == 0, done.stderr
        mounts = ["grep", "-c", f" {PATH} ", "/proc/self/mountinfo"]
        assert small.run("host0", mounts).stdout == "1\n"
        small.kill("host1")
        done = small.run(LOGIN, _command("down"), env=own, timeout=120)
        assert small.run("host0", mounts).stdout == "0\n", done.stderr
        assert (done.returncode, "workers may be left on host1" in done.stderr) == (68, True)
        hint = re.search(r"if they are gone for good, delete (\S+)$", done.stderr)
        assert hint is not None, done.stderr
        small.run(LOGIN, ["rm", "-r", hint[1]], check=True)
        assert "there is no session" in small.run(LOGIN, _command("down"), env=own).stderr


def test_inside_an_allocation_its_nodes_are_used(lab: Lab, source: Path) -> None:
    command = _command("run", source, "--hosts", "slurm:2", "--mntpoint", PATH, "-")
    inside = ["salloc", "--nodes=2", "--quiet", *command]
    done = lab.run(LOGIN, inside, stdin=None, input="hostname")
    assert done.stdout == "== host0 ==\nhost0\n== host1 ==\nhost1\n", done.stderr
    _assert_clean(lab)


@pytest.mark.costly
def test_a_batch_script_uses_its_allocation_and_its_own_node_too(lab: Lab, source: Path) -> None:
    output = source.parent / "output"
    script = "echo $WHEELMOUNT_MOUNT; cat new; stat -f -c %T ."
    (source / "new").write_text("new\n")
    lines = [
        f"echo {shlex.quote(script)} | {shlex.join(_command('run', source, '--quiet', '-'))}",
        f"cat {source}/new; stat -f -c %T {source}",
        f"{shlex.join(_command('mount', source, '--quiet'))}",
        f"{shlex.join(_command('umount', '--all'))}",
    ]
    batch = ["sbatch", "--wait", "--nodes=2", f"--output={output}", "--wrap", "\n".join(lines)]
    done = lab.run(LOGIN, batch)
    said = output.read_text()
    assert done.returncode == 0, said
    own = lab.run("host0", ["stat", "-f", "-c", "%T", source]).stdout
    each = f"{source}\nnew\ntmpfs\n"
    shown = f"== host0 ==\n{each}== host1 ==\n{each}"
    stands = f"host0 {source}\nhost1 {source}\n"
    assert said == f"{shown}new\n{own}{stands}", "only the hosts of the script see the mount"
    tool = shlex.join(_command("umount", "--all"))
    assert lab.run("host1", ["bash", "-c", tool]).returncode == 0
    _assert_clean(lab)


def test_an_allocation_of_more_tasks_than_nodes_has_one_worker_a_node(
    lab: Lab, source: Path
) -> None:
    command = _command("run", "--hosts", "slurm:2", "--mntpoint", PATH, source, "-")
    inside = ["salloc", "--nodes=2", "--ntasks=6", "--ntasks-per-node=3", "--quiet", *command]
    done = lab.run(LOGIN, inside, stdin=None, input="hostname")
    assert done.stdout == "== host0 ==\nhost0\n== host1 ==\nhost1\n", done.stderr


def test_a_new_job_is_made_from_within_an_allocation_if_asked_for(lab: Lab, source: Path) -> None:
    inside = ["salloc", "--nodes=1", "--quiet", *_command("run", "--mntpoint", PATH)]
    done = lab.run(LOGIN, [*inside, "--hosts", "slurm:2", source, "-"])
    assert done.returncode == InputError.exit_code, done.stderr
    assert "this allocation has 1 node, not 2" in done.stderr
    assert "slurm:2,new-job" in done.stderr
    script = 'test -n "$SLURM_JOB_ID" && hostname'
    done = lab.run(
        LOGIN,
        [*inside, "--hosts", "slurm:2,new-job,time=10", source, "-"],
        stdin=None,
        input=script,
    )
    assert done.stdout == "== host0 ==\nhost0\n== host1 ==\nhost1\n", done.stderr
    assert re.search(r"queue: job \d+ running", done.stderr)
    up = [*inside[:3], *_command("up", "--hosts", "slurm:1,new-job")]
    assert lab.run(LOGIN, up).returncode == 0
    assert _queue(lab) == ["RUNNING None"], "it outlives the allocation"
    assert _call(lab, "down").returncode == 0
    _assert_clean(lab)


@pytest.mark.parametrize("where", [["--hosts", "slurm:1"], []])
def test_a_heterogeneous_allocation_is_refused(lab: Lab, source: Path, where: list[str]) -> None:
    command = _command("run", *where, "--mntpoint", PATH, source, "-")
    done = lab.run(LOGIN, ["salloc", "--quiet", "--nodes=1", ":", "--nodes=1", *command])
    assert done.returncode == InputError.exit_code, done.stderr
    assert "this allocation has parts of several kinds (a heterogeneous job)" in done.stderr
    _assert_clean(lab)


def test_nodes_do_not_take_the_address_of_a_login_by_ssh_for_theirs(lab: Lab, source: Path) -> None:
    own = f"192.0.2.1 1 {lab.address(LOGIN)} 22"
    words = "run", source, "--hosts", "slurm:2", "--mntpoint", PATH, "-"
    done = _call(lab, *words, script="hostname", SSH_CONNECTION=own)
    assert done.stdout == "== host0 ==\nhost0\n== host1 ==\nhost1\n", done.stderr
    _assert_clean(lab)


@pytest.mark.costly
def test_an_environment_that_slurm_is_to_keep_goes_to_hosts(lab: Lab, source: Path) -> None:
    """Sites recommend ``--export=NONE``; workers and their scripts need the client's variables."""
    output = source.parent / "none"
    command = shlex.join(_command("run", "--quiet", "--mntpoint", PATH, source, "-"))
    batch = ["sbatch", "--wait", "--export=NONE", "--nodes=1", f"--output={output}"]
    done = lab.run(LOGIN, [*batch, "--wrap", f"echo cat .hidden | {command}"])
    assert (done.returncode, output.read_text()) == (0, "hidden\n")
    told = {"SLURM_EXPORT_ENV": "NONE", "SBATCH_EXPORT": "NONE"}
    words: list[str | Path] = ["run", "--mntpoint", PATH, source, "-"]
    done = _call(lab, *words, "--hosts", "slurm:1", script="cat .hidden", **told)
    assert done.stdout == "hidden\n", done.stderr
    up = _call(lab, "up", "--hosts", "slurm:1", **told)
    assert up.returncode == 0, up.stderr
    assert _call(lab, *words, script="cat .hidden").stdout == "hidden\n"
    assert _call(lab, "down").returncode == 0
    _assert_clean(lab)


def test_each_job_of_an_array_has_hosts_of_its_own(lab: Lab, source: Path) -> None:
    output = source.parent / "array"
    command = _command("run", "--quiet", "--mntpoint", f"{PATH}-$SLURM_ARRAY_TASK_ID", source, "-")
    words = " ".join(word if "$" in word else shlex.quote(word) for word in command)
    lines = f"echo 'echo $SLURM_ARRAY_TASK_ID; cat .hidden' | {words}"
    batch = ["sbatch", "--wait", "--array=1-2", "--nodes=1", f"--output={output}-%a"]
    done = lab.run(LOGIN, [*batch, "--wrap", lines])
    for number in "12":
        said = Path(f"{output}-{number}").read_text()
        assert said == f"{number}\nhidden\n"
    assert done.returncode == 0
    _assert_clean(lab)


BUSY = """
import sys
from wheelmount.cli.main import main
from wheelmount.hosts import slurm
slurm._ports = lambda: [20000, 20001]
sys.argv[0] = "wheelmount"
sys.exit(main())
"""

LISTENS = """
import socket
with socket.create_server(("", 20000)) as server:
    while True:
        server.accept()[0].close()
"""


@pytest.mark.parametrize("words", ["run", "up"])
def test_a_port_of_another_program_is_left_to_it(lab: Lab, source: Path, words: str) -> None:
    other = Service(lab, "host1", [sys.executable, "-c", LISTENS], 20000)
    other.await_port()
    command = [sys.executable, "-c", BUSY, words, "--hosts", "slurm:2"]
    if words == "run":
        command += ["--mntpoint", PATH, str(source), "-"]
    done = lab.run(LOGIN, command, stdin=None, input="hostname")
    lab.run("host1", ["pkill", "-KILL", "--full", "server.accept"], check=True)
    other.process.wait(60)
    assert done.returncode == 0, done.stderr
    assert "host1" in done.stdout
    if words == "up":
        assert _call(lab, "down").returncode == 0
    _assert_clean(lab)


@pytest.mark.parametrize("words", ["run", "up"])
def test_a_job_that_is_cancelled_while_hosts_start_is_noticed_at_once(
    lab: Lab, source: Path, words: str
) -> None:
    command = _command(words, "--hosts", "slurm:2")
    if words == "run":
        command += ["--mntpoint", PATH, str(source), "-"]
    with lab.popen(LOGIN, command, stderr=subprocess.PIPE) as client:
        assert client.stderr is not None
        while b" running in " not in (line := client.stderr.readline()):  # now workers start
            assert line, "it has ended"
        lab.run(LOGIN, ["scancel", "--user=root"], check=True)
        cancelled = time.monotonic()
        _, errors = client.communicate(timeout=60)
    print(time.monotonic() - cancelled, errors)
    assert client.returncode == 68
    assert time.monotonic() - cancelled < START_TIMEOUT, "it was not waited for"
    assert b"must be installed" not in errors
    assert re.search(rb"cancelled|is being ended", errors, re.IGNORECASE), errors
    _assert_clean(lab)


@pytest.mark.costly
def test_a_step_of_an_up_that_was_killed_is_ended(lab: Lab) -> None:
    up_and_die = shlex.join([sys.executable, "-c", UP_AND_DIE, "up", "--hosts", "slurm:2"])
    steps = "squeue --steps --noheader --format %j | grep wheelmount || echo no step"
    commands = [f"{up_and_die} || true", steps, shlex.join(_command("down", "--all")), steps]
    done = lab.run(LOGIN, ["salloc", "--nodes=2", "--quiet", "bash", "-ec", "\n".join(commands)])
    before, after = done.stdout.splitlines()
    assert before.startswith("wheelmount-"), done.stderr
    assert after == "no step", done.stderr
    _assert_clean(lab)


TWO = """
import os, subprocess, threading
from wheelmount import Cluster
from wheelmount.errors import HostError
with Cluster("slurm:1") as first, Cluster("slurm:1") as second:
    queue = ["squeue", "--noheader", "--sort=i", "--format=%A"]
    job, _ = subprocess.run(queue, capture_output=True, text=True).stdout.split()
    threading.Timer(2, subprocess.run, [["scancel", job]]).start()
    for cluster, seconds in (second, "8"), (first, "100"), (second, "0"):
        (end,) = cluster.run(["sleep", seconds]).values()
        print(end.message if isinstance(end, HostError) else end.code)
"""


def test_a_lost_job_of_one_cluster_is_none_of_another(lab: Lab) -> None:
    done = lab.run(LOGIN, [sys.executable, "-c", TWO], timeout=120)
    said = done.stdout.splitlines()
    assert (said[0], said[2]) == ("0", "0"), done.stdout + done.stderr
    assert re.search("job .* has ended|is being ended|died", said[1])
    assert done.returncode == 0, done.stderr
    _assert_clean(lab)


@pytest.mark.parametrize("python", ["", sys.executable])
def test_one_node_that_cannot_start_a_worker_says_why(lab: Lab, source: Path, python: str) -> None:
    lab.run("host1", ["sh", "-c", "mkdir -p /tmp/wheelmount-0; chmod 755 /tmp/wheelmount-0"])
    started = time.monotonic()
    words = "run", source, "--hosts", "slurm:3", "--mntpoint", PATH, "-"
    done = _call(lab, *words, script="true", WHEELMOUNT_PYTHON=python)
    lab.run("host1", ["chmod", "700", "/tmp/wheelmount-0"])
    assert done.returncode == 68, done.stderr
    assert "error: host1: /tmp/wheelmount-0 is not a private directory of yours\n" in done.stderr
    assert "hint: run: chmod 700 /tmp/wheelmount-0; or remove it\n" in done.stderr
    assert time.monotonic() - started < START_TIMEOUT
    _assert_clean(lab)


def test_a_session_within_an_allocation_is_a_step_of_it(lab: Lab, source: Path) -> None:
    tool = shlex.join(_command())
    commands = [
        f"{tool} up --hosts slurm:2 --quiet",
        f"echo hostname | {tool} run {source} --mntpoint {PATH} --quiet -",
        f"{tool} down --quiet",
        "squeue --steps --noheader --format %j | grep wheelmount || echo no step",
    ]
    inside = ["salloc", "--nodes=2", "--quiet", "bash", "-ec", "\n".join(commands)]
    done = lab.run(LOGIN, inside)
    up, *run, end = done.stdout.splitlines()
    assert up == "session default is up: host0, host1", done.stderr
    assert run == ["== host0 ==", "host0", "== host1 ==", "host1"]
    assert end == "no step"
    _assert_clean(lab)
