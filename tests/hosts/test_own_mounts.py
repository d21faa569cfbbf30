"""Hosts of an ordinary user's, with a mount namespace each in which the user may bind."""

from __future__ import annotations

import contextlib
import os
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

KINDS = ["ssh:host0", "slurm:1"]

PATH = f"{HOME}/tree"

IDS = 1 << 20
"""First subordinate id of the user, who has 65536 of them."""

SHOWN = f"awk '$5 == \"{PATH}\" {{print $(NF - 2)}}' /proc/self/mountinfo"
"""Prints the types of the file systems that are mounted at ``PATH``."""

BIND, FUSE = "tmpfs\n", "fuse.wheelmount\n"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that all hosts see as well, and that everybody may write to."""
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture
def source(place: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="source-", dir=place) as name:
        made = Path(name)
        (made / "text").write_text("text\n")
        for path in (made, made / "text"):
            os.chown(path, NUMBER, NUMBER)
        yield made


@pytest.fixture(scope="module")
def lab(place: Path) -> Iterator[Lab]:
    before = Traces()
    with Lab(1, shared=[place]) as made:
        start_sshd(made)
        for host in made.names:
            make_user(made, host)
            ranges = f"echo {USER}:{IDS}:65536 | tee /etc/subuid >/etc/subgid"
            made.run(host, ["sh", "-c", ranges], check=True)
        start_slurm(made)
        traces = Traces(besides=before)
        yield made
    assert traces.left() == []


@pytest.fixture(params=KINDS)
def session(request: pytest.FixtureRequest, lab: Lab, source: Path) -> Iterator[None]:
    """A session on one host, which shows the source at ``PATH``."""
    _done(_call(lab, "up", "--hosts", request.param))
    try:
        mounted = _call(lab, "mount", source, PATH)
        assert _done(mounted) == f"host0 {PATH}\n"
        assert "only what wheelmount runs on these hosts sees it" in mounted.stderr
        yield
    finally:
        _done(_call(lab, "down"))
        assert_clean(lab, ["host0"], PATH)


def _command(*words: str | Path, **environment: str) -> list[str]:
    given = ["env", *(f"{name}={value}" for name, value in environment.items())]
    return as_user(*given, sys.executable, "-m", "wheelmount.cli.main", *words)


def _call(
    lab: Lab, *words: str | Path, script: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    command = _command(*words, **environment)
    return lab.run(LOGIN, command, stdin=None, input=script, timeout=120)


def _done(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run(lab: Lab, source: Path, script: str, *words: str, **environment: str) -> str:
    given = [*words, "--mntpoint", PATH, str(source), "-"]
    return _done(_call(lab, "run", *given, script=script, **environment))


def _outside(lab: Lab, script: str) -> str:
    """What the user prints on the host in a process that wheelmount did not start."""
    return lab.run("host0", as_user("sh", "-c", script), timeout=60).stdout


@contextlib.contextmanager
def _running(lab: Lab, source: Path, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """A client whose script runs in the context; ``%s`` in it tells that it does."""
    began = Path(tempfile.mkdtemp(dir=source.parent), "began")
    began.parent.chmod(0o777)
    command = _command("run", "--mntpoint", PATH, source, "-")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    client = lab.popen(LOGIN, command, **pipes)
    try:
        assert client.stdin is not None
        client.stdin.write((script % f"echo >{began}").encode())
        client.stdin.close()
        client.stdin = None
        deadline = time.monotonic() + 60
        while not began.exists():
            assert client.poll() is None, client.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield client
    finally:
        client.kill()
        client.communicate()


@pytest.mark.parametrize("spec", KINDS)
def test_a_script_sees_files_bound_once_all_are_there(lab: Lab, source: Path, spec: str) -> None:
    """From another directory: a working directory in the mount is not taken away."""
    script = f'cd /; while [ "$({SHOWN})" != tmpfs ]; do sleep 0.05; done; cat {PATH}/text'
    assert _run(lab, source, script, "--hosts", spec) == "text\n"
    assert_clean(lab, ["host0"], PATH)


@pytest.mark.parametrize("spec", KINDS)
def test_hosts_that_need_no_bind_get_no_namespace(lab: Lab, source: Path, spec: str) -> None:
    script = f"{SHOWN}; cat /proc/self/uid_map"
    said = _run(lab, source, script, "--hosts", spec, WHEELMOUNT_ADAPTER="devfuse")
    assert said.split() == [FUSE.strip(), "0", "0", "4294967295"]
    assert_clean(lab, ["host0"], PATH)


@pytest.mark.costly
@pytest.mark.parametrize("spec", KINDS)
def test_where_namespaces_are_forbidden_fuse_serves(lab: Lab, source: Path, spec: str) -> None:
    lab.run("host0", ["chmod", "a-x", "/usr/bin/unshare"], check=True)
    try:
        assert _run(lab, source, f"{SHOWN}; cat text", "--hosts", spec) == f"{FUSE}text\n"
        said = _call(lab, "doctor", "--hosts", spec).stdout
        assert "adapter: devfuse, not bind" in said
        assert "namespaces: not allowed" in said
    finally:
        lab.run("host0", ["chmod", "a+x", "/usr/bin/unshare"], check=True)
    said = _call(lab, "doctor", "--hosts", spec).stdout
    assert "adapter: bind, for what wheelmount runs" in said
    assert_clean(lab, ["host0"], PATH)


def test_all_processes_of_the_user_see_a_mount_that_stays(lab: Lab, source: Path) -> None:
    said = _done(_call(lab, "mount", "--hosts", "ssh:host0", source, PATH))
    assert said == f"host0 {PATH}\n"
    try:
        assert _outside(lab, f"{SHOWN}; cat {PATH}/text") == f"{FUSE}text\n"
    finally:
        _done(lab.run("host0", _command("umount", PATH), timeout=60))
    assert_clean(lab, ["host0"], PATH)


@pytest.mark.costly
def test_a_session_s_mount_is_told_by_its_status(lab: Lab, session: None) -> None:
    said = _done(_call(lab, "status"))
    assert "  bind  up" in said
    assert "in a namespace of its own: nsenter -U --preserve-credentials -m -t " in said
    assert _outside(lab, SHOWN) == ""


def test_a_session_that_needs_no_bind_shows_its_mounts_to_all(lab: Lab, source: Path) -> None:
    own = {"WHEELMOUNT_ADAPTER": "devfuse"}
    _done(_call(lab, "up", "--hosts", "ssh:host0", **own))
    try:
        mounted = _call(lab, "mount", source, PATH, **own)
        _done(mounted)
        assert "sees it" not in mounted.stderr
        assert _outside(lab, SHOWN) == FUSE
        said = _done(_call(lab, "status", **own))
        assert "  devfuse  up" in said
        assert "namespace" not in said
    finally:
        _done(_call(lab, "down"))
    assert_clean(lab, ["host0"], PATH)


@pytest.mark.costly
def test_programs_have_the_user_s_ids_and_no_more_rights(
    lab: Lab, source: Path, session: None
) -> None:
    ids = "id -u; id -g; stat -c %u:%g $HOME"
    assert _run(lab, source, ids) == _outside(lab, ids)
    closed = "f=$(mktemp); echo secret >$f; chmod 0 $f; cat $f || echo closed; rm -f $f"
    assert _run(lab, source, closed) == "closed\n"
    unmount = f"cd /; umount -l {PATH} || echo refused; cat {PATH}/text"
    assert _run(lab, source, unmount) == "refused\ntext\n"
    # With root's setuid bit, programs get nothing from it.
    prepare = "cp /usr/bin/id /usr/local/bin/root-id && chmod u+s /usr/local/bin/root-id"
    lab.run("host0", ["sh", "-c", prepare], check=True)
    assert "euid=0(root)" in _outside(lab, "root-id")
    assert "euid" not in _run(lab, source, "root-id")
    # Newuidmap has root's setuid bit, too, and is what subordinate ids are used by.
    mapped = "unshare --user --map-root-user --map-auto cat /proc/self/uid_map"
    assert _run(lab, source, mapped).split()[:5] == ["0", f"{NUMBER}", "1", "1", f"{IDS}"]


@pytest.mark.costly
def test_a_script_that_runs_follows_a_refresh(lab: Lab, source: Path, session: None) -> None:
    script = f"cd /; {SHOWN}; %s; until grep -q edited {PATH}/text; do sleep 0.05; done; {SHOWN}"
    with _running(lab, source, script) as client:
        (source / "text").write_text("edited\n")
        assert _run(lab, source, f"{SHOWN}; cat text") == f"{BIND}edited\n"
        said, errors = client.communicate(timeout=60)
    assert (client.returncode, said) == (0, (BIND + BIND).encode()), errors


@pytest.mark.costly
def test_a_mount_that_a_script_uses_is_busy(lab: Lab, source: Path, session: None) -> None:
    script = f"%s; until [ -e {source}/go ]; do sleep 0.05; done; cat text"
    with _running(lab, source, script) as client:
        done = _call(lab, "umount", PATH)
        assert (done.returncode, f"{PATH} is busy: in use by bash (" in done.stderr) == (73, True)
        (source / "go").touch()
        said, errors = client.communicate(timeout=60)
    assert (client.returncode, said) == (0, b"text\n"), errors
    _done(_call(lab, "umount", PATH))
    assert _done(_call(lab, "status")).endswith("nothing is mounted\n")


def test_a_worker_of_the_user_s_can_have_a_namespace(lab: Lab, source: Path, place: Path) -> None:
    own = {"WHEELMOUNT_STATE_DIR": f"{place}/state"}  # as in a home directory that all share
    worker = Service(
        lab, "host0", _command("worker", "--own-mounts", "tls://host0:26600", **own), 26600
    )
    worker.await_port()
    script = f'cd /; while [ "$({SHOWN})" != tmpfs ]; do sleep 0.05; done; cat {PATH}/text'
    assert _run(lab, source, script, "--hosts", "tls://host0:26600", **own) == "text\n"
    lab.run("host0", ["pkill", "-INT", "--full", "--oldest", "main worker"], check=True)
    worker.process.wait(60)
    assert_clean(lab, ["host0"], PATH)
