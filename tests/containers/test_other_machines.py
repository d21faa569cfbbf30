"""Containers on hosts that have nothing of the client's but a network to it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.hosts.user import HOME, USER, as_user, make_user
from tests.testbed import LOGIN, Lab
from tests.testbed.kubernetes import Cluster
from tests.testbed.service import start_workers, workers_spec
from tests.testbed.sshd import start_sshd

pytestmark = [
    pytest.mark.containers,
    pytest.mark.hosts,
    pytest.mark.fuse,
    pytest.mark.lab,
    pytest.mark.timeout(600),
]


WHEELMOUNT = sys.executable, "-m", "wheelmount.cli.main"

INSTALLS = "pip install -q greeting && python -c 'import greeting' && hostname"


def _job(sif: Path, wheels: Path, shared: Path) -> Path:
    """Make a directory with an image and its packages."""
    shutil.copytree(wheels, shared / "packages")
    shutil.copy(sif, shared / "img.sif")
    return shared


@pytest.mark.costly
def test_image_and_wheels_come_over_the_network(sif: Path, wheels: Path, shared: Path) -> None:
    _job(sif, wheels, shared)
    with Lab(2) as lab:
        start_workers(lab)
        # To where the client has it and no host does.
        lab.run(LOGIN, ["cp", "-r", str(shared), "/tmp/job"], check=True)
        wheelmount = list(WHEELMOUNT)
        script = f"{INSTALLS}; ls /tmp; cat"
        run = [
            *wheelmount,
            "exec",
            "--insecure",
            "--hosts",
            workers_spec(lab),
            "--packages",
            "/tmp/job",
        ]
        # Its home directory is an overlay already, and so this one has to be a file.
        run += ["--overlay", "test", "-q"]
        done = lab.run(LOGIN, [*run, "--", "sh", "-ec", script])
        assert done.returncode == 0, done.stderr
        assert done.stdout == "== host0 ==\nhost0\n== host1 ==\nhost1\n"
        kinds = lab.run("host0", [*wheelmount, "overlay", "ls"]).stdout
        assert "test  host0  image" in kinds
        asked = [*wheelmount, "overlay", "ls", "--insecure", "--hosts", workers_spec(lab)]
        done = lab.run(LOGIN, asked)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert [line for line in lines if "==" in line] == ["== host0 ==", "== host1 =="]
        assert sum("test  host" in line for line in lines) == 2
        shell = shlex.join([*wheelmount, "shell", "--on", "host1", *run[len(wheelmount) + 1 :]])
        keys = "stty size; hostname; exit 3\r"
        # script(1) gives it a terminal; what is typed comes when the shell is there to echo it.
        inner = ["script", "--quiet", "--return", "--command", f"stty rows 33 cols 77; {shell}"]
        done = lab.run(LOGIN, [*inner, "/dev/null"], stdin=None, input=keys)
        assert done.returncode == 3, done.stdout
        assert "33 77" in done.stdout
        assert "\nhost1" in done.stdout.replace("\r", "")
        typed = [*run, "-i", "--on", "host1", "--", "sh", "-c", "cat; hostname"]
        done = lab.run(LOGIN, typed, stdin=None, input="typed\n")
        assert done.stdout == "typed\nhost1\n", done.stderr


def test_a_container_runs_on_a_host_by_ssh(sif: Path, wheels: Path, shared: Path) -> None:
    job = _job(sif, wheels, shared)
    with Lab(1) as lab:
        start_sshd(lab)
        lab.run(LOGIN, ["cp", "-r", str(job), "/tmp/job"], check=True)
        words = ["exec", "-q", "--hosts", "ssh:host0", "--packages", "/tmp/job", "--"]
        done = lab.run(LOGIN, [*WHEELMOUNT, *words, "sh", "-ec", INSTALLS])
        assert done.stdout == "host0\n", done.stderr


@pytest.mark.costly
@pytest.mark.parametrize("ids", [False, True])
def test_a_container_of_an_ordinary_user_sees_packages_bound(
    ids: bool, sif: Path, wheels: Path, shared: Path
) -> None:
    """On a host with a namespace of the user's, with subordinate ids and without."""
    job = _job(sif, wheels, shared)
    with Lab(1) as lab:
        start_sshd(lab)
        for host in lab.names:
            make_user(lab, host)
            if ids:
                ranges = f"echo {USER}:{1 << 20}:65536 | tee /etc/subuid >/etc/subgid"
                lab.run(host, ["sh", "-c", ranges], check=True)
        give = f"cp -r {job} {HOME}/job && chown -R {USER}: {HOME}/job"
        lab.run(LOGIN, ["sh", "-c", give], check=True)
        bound = "until grep -q ' /packages .* - tmpfs ' /proc/self/mountinfo; do sleep 0.1; done"
        chown = "touch /srv/f && chown 5:7 /srv/f && stat -c %u:%g /srv/f" if ids else "echo 5:7"
        words = ["exec", "-q", "--hosts", "ssh:host0", "--packages", f"{HOME}/job", "--"]
        script = f"{bound}; {INSTALLS}; id -u; {chown}"
        done = lab.run(LOGIN, as_user(*WHEELMOUNT, *words, "sh", "-ec", script), timeout=300)
        assert done.stdout == "host0\n0\n5:7\n", done.stderr


def test_a_container_runs_in_a_pod(
    cli: Cli,
    sif: Path,
    wheels: Path,
    shared: Path,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the stand-in for a cluster, whose pods see the files of this machine."""
    job = _job(sif, wheels, shared)
    monkeypatch.setenv("KUBECONFIG", str(workplace / "kubeconfig"))
    with Cluster(workplace / "kubeconfig") as cluster:
        where = ["--hosts", "kubernetes:1,image=registry/wheelmount:1", "--packages", job]
        done = cli("exec", "-q", *where, "--", "sh", "-ec", INSTALLS)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        assert cluster.objects == {}
