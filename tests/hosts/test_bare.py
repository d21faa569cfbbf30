"""Hosts that have neither wheelmount nor a Python, nor any file of the client's."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.user import HOME, USER, as_user, make_user
from tests.testbed import LOGIN, Lab
from tests.testbed.slurm import start_slurm
from tests.testbed.space import CHECKOUT
from tests.testbed.sshd import start_sshd
from tests.testbed.traces import Traces

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

PATH = "/mnt/tree"

KINDS = ["ssh:host0,host1", "slurm:2"]

BUNDLES = "/root/.cache/wheelmount/bundles"

OF_ANOTHER_VERSION = """
from unittest import mock
from wheelmount.cli.main import main
from wheelmount.hosts import bundle
with mock.patch.object(bundle, "key", lambda: "0" * 32):
    main()
"""
"""A program that does what ``wheelmount`` does, and takes hosts' copies of it for outdated."""

TAKE_AWAY = r"""
set -e
for path; do if [ -d "$path" ]; then mount -t tmpfs none "$path"; fi; done
rm -rf /root/.cache /root/.local
rm -rf /usr/bin/*python* /usr/local/bin/*python* /usr/lib/python* /usr/local/lib/python*
rm -f /usr/bin/perl* /usr/local/bin/*
cd /usr/lib/*-linux-gnu
rm -f libpython* libssl.so* libfuse3.so* libffi.so* libsqlite3.so* libexpat.so* libstdc++.so*
if env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin sh -c 'command -v python3'; then exit 1; fi
"""
"""Leaves what a machine has on which nothing but sshd and slurmd was installed."""


def _pythons() -> list[Path]:
    """Where this machine has Python and what it runs, by directories that hold nothing else."""
    base = Path(sys.base_prefix).resolve()
    return [CHECKOUT, *([] if base == Path("/usr") else [base])]


@pytest.fixture(scope="module")
def lab(shared_source: Path) -> Iterator[Lab]:
    before = Traces()
    with Lab(2, shared=[shared_source.parent]) as made:
        start_sshd(made)
        start_slurm(made)
        for host in made.names:
            make_user(made, host)
        for host in made.hosts:
            made.run(host, ["bash", "-c", TAKE_AWAY, "bash", *_pythons()], check=True)
        traces = Traces(besides=before)
        yield made
    assert traces.left() == []


def _command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "wheelmount.cli.main", *map(str, words)]


def _call(lab: Lab, *words: str | Path, script: str = "") -> subprocess.CompletedProcess[str]:
    return lab.run(LOGIN, _command(*words), stdin=None, input=script, timeout=300)


def _assert_ended(lab: Lab) -> None:
    deadline = time.monotonic() + 60
    for host in lab.hosts:
        look = ["pgrep", "--full", "--list-full", f"monarch|{BUNDLES}"]
        while left := lab.run(host, look).stdout:
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


@pytest.mark.costly
@pytest.mark.parametrize("spec", KINDS)
def test_wheelmount_comes_along_once(lab: Lab, source: Path, spec: str) -> None:
    for host in lab.hosts:
        lab.run(host, ["rm", "-rf", BUNDLES], check=True)
    words: list[str | Path] = ["run", source, "--hosts", spec, "--mntpoint", PATH, "-"]
    # Of Slurm, scripts have the client's PATH.
    script = (
        "hostname; cat .hidden; umask; "
        'PATH=/usr/bin:/bin command -v python3; echo "$LD_LIBRARY_PATH"'
    )
    for brought in (True, False):
        done = _call(lab, *words, script=script)
        shown = [f"== {host} ==\n{host}\nhidden\n0022\n\n" for host in lab.hosts]
        assert done.stdout == "".join(shown), done.stderr
        assert ("bring: " in done.stderr) is brought, done.stderr
    listed = lab.run("host0", ["ls", "-l", BUNDLES]).stdout.splitlines()
    assert [line[:10] for line in listed[1:]] == ["drwx------"], "and nothing else lies there"
    assert ".tar.gz" not in lab.run("host0", ["ls", "/tmp"]).stdout
    _assert_ended(lab)


@pytest.mark.costly
@pytest.mark.parametrize("spec", ["slurm:2"])  # which is not asked in the way of commands
def test_a_session_is_on_hosts_that_had_nothing(lab: Lab, source: Path, spec: str) -> None:
    lab.run("host0", ["rm", "-rf", BUNDLES], check=True)
    up = _call(lab, "up", "--hosts", spec)
    assert (up.returncode, up.stdout) == (0, "session default is up: host0, host1\n"), up.stderr
    assert "bring: " in up.stderr
    done = _call(lab, "run", source, "--mntpoint", PATH, "-", script="cat .hidden")
    assert done.stdout == "== host0 ==\nhidden\n== host1 ==\nhidden\n", done.stderr
    assert _call(lab, "down").returncode == 0
    _assert_ended(lab)


@pytest.mark.costly
def test_a_session_is_ended_after_an_upgrade(lab: Lab) -> None:
    up = _call(lab, "up", "--hosts", "ssh:host0,host1")
    assert up.returncode == 0, up.stderr
    down = lab.run(LOGIN, [sys.executable, "-c", OF_ANOTHER_VERSION, "down"], timeout=300)
    assert (down.returncode, down.stdout) == (0, ""), down.stderr
    _assert_ended(lab)


@pytest.mark.parametrize("spec", KINDS)
def test_a_place_of_another_user_is_refused(lab: Lab, source: Path, spec: str) -> None:
    lab.run("host1", ["sh", "-c", f"mkdir -p {BUNDLES}; chown 65534 {BUNDLES}"], check=True)
    try:
        done = _call(lab, "run", source, "--hosts", spec, "--mntpoint", PATH, "-", script="pwd")
    finally:
        lab.run("host1", ["chown", "0", BUNDLES], check=True)
    assert done.returncode == 68
    assert re.search(r"host1:? .*bundles is no private directory of this user", done.stderr)
    _assert_ended(lab)


@pytest.mark.parametrize("spec", KINDS)
def test_a_client_that_is_killed_while_it_brings_leaves_nothing(
    lab: Lab, source: Path, spec: str
) -> None:
    for host in lab.hosts:
        lab.run(host, ["rm", "-rf", BUNDLES], check=True)
    lab.shape("50mbit", LOGIN)
    command = ["setsid", "--wait", *_command("run", source, "--hosts", spec, "-")]
    arrives = ["sh", "-c", f"test -s /tmp/wheelmount-*.tar.gz || ls {BUNDLES}/new-*/python"]
    try:
        with lab.popen(LOGIN, command, stderr=subprocess.PIPE) as client:
            while lab.run("host1", arrives).returncode != 0:
                assert client.poll() is None, client.communicate()[1]
                time.sleep(0.1)
            kill = ["pkill", "-KILL", "--full", "--oldest", "cli.main run"]
            lab.run(LOGIN, kill, check=True)
            client.communicate(timeout=60)
        _assert_ended(lab)
    finally:
        lab.shape(None, LOGIN)
    look = ["sh", "-c", f"ls -d {BUNDLES}/* /tmp/wheelmount-*.tar.gz"]
    deadline = time.monotonic() + 60
    for host in lab.hosts:
        while left := lab.run(host, look).stdout:
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
    while left := lab.run(LOGIN, ["squeue", "--noheader"]).stdout:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.costly
def test_an_ordinary_user_has_it_once_for_hosts_with_one_home_directory(
    lab: Lab, source: Path
) -> None:
    """The directory that all share is named by a setting; the client's archive is in it too."""
    source.parent.chmod(0o755)
    own = source.parent / "own"
    place = own / "bundles"
    prepare = (
        f"mkdir -p {place}; cp {BUNDLES}/*.tar.gz {place}; chmod 700 {place}; "
        f"mkdir {own}/source; echo text >{own}/source/text; chown -R {USER}: {own}"
    )
    lab.run(LOGIN, ["sh", "-c", prepare], check=True)
    words: list[str | Path] = [
        "run",
        own / "source",
        "--hosts",
        "ssh:host0,host1",
        "--mntpoint",
        f"{HOME}/tree",
        "-",
    ]
    command = as_user("env", f"WHEELMOUNT_CACHE_DIR={own}", *_command(*words))
    for brought in (True, False):
        done = lab.run(LOGIN, command, stdin=None, input="id -un; cat text", timeout=300)
        shown = [f"== {host} ==\n{USER}\ntext\n" for host in lab.hosts]
        assert done.stdout == "".join(shown), done.stderr
        assert ("bring: " in done.stderr) is brought, done.stderr
    listed = lab.run(LOGIN, ["ls", "-l", place]).stdout.splitlines()
    assert sum(line.startswith("drwx------") for line in listed) == 1, "and nothing half done"
    _assert_ended(lab)
