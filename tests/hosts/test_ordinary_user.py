"""A user who is not root, of hosts by ssh and in Slurm."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.user import HOME, NUMBER, USER, as_user, assert_clean, make_user
from tests.testbed import LOGIN, Lab
from tests.testbed.service import Service
from tests.testbed.slurm import start_slurm
from tests.testbed.sshd import start_sshd
from tests.testbed.traces import Traces

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

KINDS = ["ssh:host0,host1", "slurm:2"]

PATH = f"{HOME}/tree"


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    """A directory of the user's, which all hosts see as well."""
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as place:
        Path(place).chmod(0o755)
        made = Path(place, "source")
        made.mkdir()
        (made / "text").write_text("text\n")
        for path in (made, made / "text"):
            os.chown(path, NUMBER, NUMBER)
        (made / "text").chmod(0o600)
        yield made


@pytest.fixture(scope="module")
def lab(source: Path) -> Iterator[Lab]:
    before = Traces()
    with Lab(2, shared=[source.parent]) as made:
        start_sshd(made)
        for host in made.names:
            make_user(made, host)
        start_slurm(made)
        traces = Traces(besides=before)
        yield made
    assert traces.left() == []


def _command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "wheelmount.cli.main", *map(str, words)]


def _call(lab: Lab, *words: str | Path, script: str = "") -> subprocess.CompletedProcess[str]:
    return lab.run(LOGIN, as_user(*_command(*words)), stdin=None, input=script, timeout=120)


@pytest.mark.costly
@pytest.mark.parametrize("spec", KINDS)
def test_a_script_runs_as_the_user(lab: Lab, source: Path, spec: str) -> None:
    script = 'id -un; pwd; cat text; exit "$WHEELMOUNT_RANK"'
    done = _call(lab, "run", "--hosts", spec, "--mntpoint", PATH, source, "-", script=script)
    each = f"{USER}\n{PATH}\ntext\n"
    assert done.stdout == f"== host0 ==\n{each}== host1 ==\n{each}", done.stderr
    assert done.returncode == 1
    assert_clean(lab, lab.hosts, PATH)


@pytest.mark.costly
def test_the_user_s_next_job_ships_nothing(lab: Lab, source: Path) -> None:
    big = source / "big"
    big.write_bytes(os.urandom(4 << 20))
    os.chown(big, NUMBER, NUMBER)
    size = sum(path.stat().st_size for path in source.iterdir())
    keep = ["env", f"WHEELMOUNT_STORE_KEEP={HOME}/keep"]
    kept = []
    try:
        for _ in range(2):
            up = _call(lab, "up", "--hosts", "ssh:host0,host1")
            assert up.returncode == 0, up.stderr
            words = as_user(*keep, *_command("run", source, "--mntpoint", PATH, "-"))
            done = lab.run(LOGIN, words, stdin=None, input="cksum <big", timeout=120)
            assert done.returncode == 0, done.stderr
            mounts = json.loads(_call(lab, "status", "--json").stdout)["mounts"]
            kept.append([mount["delivery"]["kept"] for mount in mounts])
            assert _call(lab, "down").returncode == 0
            assert_clean(lab, lab.hosts, PATH)
    finally:
        big.unlink()
    assert kept == [[0, 0], [size, size]]
    for host in lab.hosts:
        look = ["stat", "-c", "%a %U", f"{HOME}/keep/wheelmount-kept-{NUMBER}"]
        assert lab.run(host, look).stdout == f"700 {USER}\n"


@pytest.mark.costly
@pytest.mark.parametrize("spec", KINDS)
def test_a_session_of_the_user_s_stays_and_goes(lab: Lab, source: Path, spec: str) -> None:
    up = _call(lab, "up", "--hosts", spec)
    assert (up.returncode, up.stdout) == (0, "session default is up: host0, host1\n"), up.stderr
    for text in ("edited\n", "text\n"):
        (source / "text").write_text(text)
        done = _call(lab, "run", source, "--mntpoint", PATH, "-", script="cat text")
        assert done.stdout == f"== host0 ==\n{text}== host1 ==\n{text}", done.stderr
    deadline = time.monotonic() + 60  # a host may still keep the tree before, and the other not
    while f"  host[0-1]  {source} at {PATH}  " not in (status := _call(lab, "status").stdout):
        assert time.monotonic() < deadline, status
    down = _call(lab, "down")
    assert (down.returncode, down.stdout) == (0, ""), down.stderr
    assert_clean(lab, lab.hosts, PATH)


@pytest.mark.parametrize("spec", KINDS)
def test_a_client_of_the_user_s_that_is_killed_leaves_nothing(
    lab: Lab, source: Path, spec: str
) -> None:
    started = source.parent / "started"
    os.chown(source.parent, NUMBER, NUMBER)
    started.unlink(missing_ok=True)
    words = ["run", "--hosts", spec, "--mntpoint", PATH, str(source), "-"]
    command = ["setsid", "--wait", *as_user(*_command(*words))]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with lab.popen(LOGIN, command, **pipes) as client:
        assert client.stdin is not None
        client.stdin.write(f"touch {started}; sleep 100".encode())
        client.stdin.close()
        client.stdin = None
        while not started.exists():
            assert client.poll() is None, client.communicate()[1]
            time.sleep(0.05)
        kill = ["pkill", f"-{signal.SIGKILL}", "--full", "--oldest", "^[^ ]*python[^ ]* .*main run"]
        lab.run(LOGIN, kill, check=True)
        client.communicate(timeout=60)
    assert_clean(lab, lab.hosts, PATH)


def test_workers_of_the_user_s_are_used(lab: Lab, source: Path) -> None:
    state = source.parent / "state"  # as in a home directory that all hosts share
    state.mkdir()
    os.chown(state, NUMBER, NUMBER)
    own = ["env", f"WHEELMOUNT_STATE_DIR={state}"]
    workers = []
    for host in lab.hosts:
        command = as_user(*own, *_command("worker", f"tls://{host}:26600"))
        workers.append(Service(lab, host, command, 26600))
    for worker in workers:
        worker.await_port()
    spec = "tls://host0:26600,host1:26600"
    words = ["run", "--hosts", spec, "--mntpoint", PATH, str(source), "-"]
    done = lab.run(
        LOGIN, as_user(*own, *_command(*words)), stdin=None, input="id -un; cat text", timeout=120
    )
    assert done.stdout == f"== host0 ==\n{USER}\ntext\n== host1 ==\n{USER}\ntext\n", done.stderr
    for worker in workers:
        lab.run(worker.host, ["pkill", "-INT", "--full", "--oldest", "main worker"], check=True)
        worker.process.wait(60)
    assert_clean(lab, lab.hosts, PATH)


def test_an_allocation_of_the_user_s_is_used(lab: Lab, source: Path) -> None:
    command = _command("run", "--mntpoint", PATH, source, "-")
    inside = as_user("salloc", "--nodes=2", "--ntasks=6", "--quiet", *command)
    done = lab.run(LOGIN, inside, stdin=None, input="id -un")
    assert done.stdout == f"== host0 ==\n{USER}\n== host1 ==\n{USER}\n", done.stderr
    assert_clean(lab, lab.hosts, PATH)


def test_a_batch_script_of_the_user_s_uses_its_own_node_too(lab: Lab, source: Path) -> None:
    output = source.parent / "output"
    os.chown(source.parent, NUMBER, NUMBER)
    line = f"echo 'id -un; cat text' | {shlex.join(_command('run', source, '--quiet', '-'))}"
    batch = ["sbatch", "--wait", "--nodes=2", f"--output={output}", "--wrap", line]
    done = lab.run(LOGIN, as_user(*batch))
    said = output.read_text()
    assert said == f"== host0 ==\n{USER}\ntext\n== host1 ==\n{USER}\ntext\n"
    assert done.returncode == 0
    assert_clean(lab, lab.hosts, PATH)


def test_a_job_of_the_user_s_that_is_cancelled_is_said(lab: Lab, source: Path) -> None:
    assert _call(lab, "up", "--hosts", "slurm:2,time=10").returncode == 0
    lab.run(LOGIN, as_user("scancel", f"--user={USER}"), check=True)
    assert_clean(lab, lab.hosts, PATH)
    done = _call(lab, "run", source, "--mntpoint", PATH, "-", script="pwd")
    assert (done.returncode, "has ended" in done.stderr) == (68, True), done.stderr
    anew = _call(lab, "up", "--hosts", "slurm:1")
    assert anew.stdout == "session default is up: host0\n", anew.stderr
    assert _call(lab, "down").returncode == 0
    assert_clean(lab, lab.hosts, PATH)
