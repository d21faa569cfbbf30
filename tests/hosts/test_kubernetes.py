"""``kubernetes:N``, with a stand-in for the cluster: real pods were not to be had."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import FORK_AND_DIE, UP_AND_DIE, Cli
from tests.testbed.kubernetes import MISSING, SLOW, TEMPLATE, UNREADABLE, Cluster
from tests.wheels.support import make_wheel
from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError, UnavailableError
from wheelmount.hosts import pods
from wheelmount.hosts.credentials import Authority
from wheelmount.hosts.launcher import GUARDED
from wheelmount.hosts.pods import Order
from wheelmount.hosts.spec import parse

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

SPEC = "kubernetes:2,image=registry/wheelmount:1"


@pytest.fixture
def cluster(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("KUBECONFIG", str(workplace / "kubeconfig"))
    with Cluster(workplace / "kubeconfig") as made:
        yield made


def test_a_script_runs_in_pods_that_go_again(
    cli: Cli, cluster: Cluster, source: Path, workplace: Path, settings: Settings
) -> None:
    spec = f"{SPEC},namespace=lab,cpu=2,nvidia.com/gpu=8,shm=1Gi"
    where = ["--mntpoint", workplace / "mnt"]
    done = cli("run", source, "--hosts", spec, *where, "-", input="cat .hidden", stdin=None)
    secret, mesh = cluster.made
    name = mesh["metadata"]["name"]
    assert done.stdout == f"== {name}-0 ==\nhidden\n== {name}-1 ==\nhidden\n", done.stderr
    assert "pods wait: Monarch's operator makes no pods yet" in done.stderr
    assert "security" not in done.stderr
    assert cluster.objects == {}
    assert (mesh["kind"], mesh["metadata"]["namespace"]) == ("MonarchMesh", "lab")
    assert (mesh["spec"]["replicas"], mesh["spec"]["port"]) == (2, 26600)
    pod = mesh["spec"]["podTemplate"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry/wheelmount:1"
    asked = {"cpu": "2", "nvidia.com/gpu": "8"}
    assert container["resources"] == {"requests": asked, "limits": asked}
    assert container["securityContext"] == {"privileged": True}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["fuse"]["hostPath"] == {"path": "/dev/fuse", "type": "CharDevice"}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts == {"fuse": "/dev/fuse", "shm": "/dev/shm"}
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("MonarchMesh", mesh["metadata"]["uid"])
    # Only the Secret has credentials, and they are good for these pods alone.
    assert secret["metadata"]["name"] == name
    assert "PRIVATE" not in json.dumps(mesh)
    given = Authority.decode(secret["stringData"]["authority"].encode())
    assert given.certificate != Authority.of_user(settings).certificate


def test_pods_are_made_of_a_template_of_the_user_s(
    cli: Cli, cluster: Cluster, source: Path, workplace: Path
) -> None:
    file = workplace / "template.yaml"
    file.write_text(TEMPLATE)
    where = ["--mntpoint", workplace / "mnt", "--hosts", f"{SPEC},cpu=2,template={file}"]
    done = cli("run", source, *where, "-", input="echo $OWN; cat .hidden", stdin=None)
    assert done.stdout.count("own\nhidden\n") == 2, done.stderr
    template = cluster.made[1]["spec"]["podTemplate"]
    assert template["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "team",
        "app.kubernetes.io/managed-by": "wheelmount",
    }
    assert template["metadata"]["annotations"] == {"note": "kept"}
    pod = template["spec"]
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["terminationGracePeriodSeconds"] == 60
    worker, beside = pod["containers"]
    assert beside == {"name": "beside", "image": "registry/beside"}
    assert worker["image"] == "registry/wheelmount:1"
    asked = {"github.com/fuse": "1", "cpu": "2"}
    assert worker["resources"] == {"requests": asked, "limits": asked}
    # A device plugin brings /dev/fuse, and the pod is not privileged.
    assert worker["securityContext"] == {"capabilities": {"add": ["SYS_ADMIN"]}}
    assert (pod["volumes"], worker["volumeMounts"]) == ([], [])


@pytest.mark.parametrize(
    "text",
    ["[]", "kind: Pod\nspec: {}", "spec: 3", "{", "spec: {activeDeadlineSeconds: 60}", None],
)
def test_what_is_no_template_of_pods_is_refused(
    settings: Settings, workplace: Path, text: str | None
) -> None:
    file = workplace / "template.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError) as error:
        parse(f"{SPEC},template={file}").make(settings, namespaces=False)
    assert str(file) in error.value.message
    assert "template=FILE" in str(error.value.hint)


def test_what_the_operator_s_definition_does_not_allow_is_said(
    cli: Cli, cluster: Cluster, workplace: Path
) -> None:
    file = workplace / "template.yaml"
    file.write_text("spec: {tolerance: none}")
    done = cli("up", "--hosts", f"{SPEC},template={file}")
    assert done.returncode == 68
    assert "the cluster refuses: $.spec.podTemplate.spec: " in done.stderr
    assert "'tolerance' was unexpected" in done.stderr
    assert cluster.objects == {}


def test_fields_that_the_cluster_left_out_are_found() -> None:
    containers = [{"name": "worker", "imag": "x"}, {"name": "beside"}]
    spec = {"tolerance": "none", "empty": [], "containers": containers}
    given = {"metadata": {"labels": {"a": "1"}}, "spec": spec}
    kept = {"metadata": {"labels": {"a": "1"}}, "spec": {"containers": [{"name": "worker"}] * 2}}
    found = list(pods._missing(given, kept))
    assert found == ["spec.tolerance", "spec.containers[0].imag"]
    assert list(pods._missing(given, given | {"more": 1})) == []


@pytest.mark.costly
def test_pods_that_others_deleted_are_said(
    cli: Cli, cluster: Cluster, source: Path, workplace: Path
) -> None:
    assert cli("up", "--hosts", SPEC).returncode == 0
    try:
        name = cluster.made[1]["metadata"]["name"]
        path = next(path for path in cluster.objects if path.endswith(f"monarchmeshes/{name}"))
        assert cluster.answer("DELETE", path, {})[0] == 200
        assert cluster.objects == {}, "its Secret has gone with it"
        where = ["--mntpoint", workplace / "mnt"]
        done = cli("run", source, *where, "-", input="cat .hidden", stdin=None)
        assert done.returncode == 68
        assert f"MonarchMesh {name} was deleted" in done.stderr
    finally:
        cli("down")


def test_a_namespace_that_is_not_there_is_said(cli: Cli, cluster: Cluster) -> None:
    cluster.namespace = False
    done = cli("up", "--hosts", f"{SPEC},namespace=nowhere")
    assert done.returncode == 68
    assert 'the cluster refuses: namespaces "nowhere" not found' in done.stderr
    assert "hint: give namespace=NAME of one that exists" in done.stderr


@pytest.mark.costly
def test_packages_install_in_a_pod(
    cli: Cli, cluster: Cluster, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(workplace / "uv"))
    wheel, venv = make_wheel(workplace / "wheels", "own"), workplace / "venv"
    one = SPEC.replace(":2", ":1")
    done = cli("install", wheel, "--hosts", one, "--venv", venv)
    assert done.returncode == 0, done.stderr
    assert "ask: 1 host in " in done.stderr
    program = [str(venv / "bin/python"), "-c", "import own; print(own.VALUE)"]
    assert subprocess.run(program, capture_output=True, check=True).stdout == b"1.0\n"
    assert cluster.objects == {}


@pytest.mark.costly
def test_a_session_in_pods(cli: Cli, cluster: Cluster, source: Path, workplace: Path) -> None:
    up = cli("up", "--hosts", SPEC)
    name = cluster.made[1]["metadata"]["name"]
    assert up.stdout == f"session default is up: {name}-0, {name}-1\n", up.stderr
    for text in ("edited\n", "hidden\n"):
        (source / ".hidden").write_text(text)
        where = ["--mntpoint", workplace / "mnt"]
        done = cli("run", source, *where, "-", input="cat .hidden", stdin=None)
        assert done.stdout.count(text) == 2, done.stderr
    assert f"session default: {SPEC}  up" in cli("status").stdout
    assert len(cluster.objects) == 2
    assert cli("down").returncode == 0
    assert cluster.objects == {}


def test_pods_of_an_up_that_was_killed_are_deleted(cli: Cli, cluster: Cluster) -> None:
    up = [sys.executable, "-c", UP_AND_DIE, "up", "--hosts", SPEC]
    assert subprocess.run(up, capture_output=True, timeout=90, check=False).returncode < 0
    assert len(cluster.objects) == 2
    down = cli("down")
    assert (down.returncode, "ending what a killed `up` had started" in down.stderr) == (0, True)
    assert cluster.objects == {}


def test_pods_are_deleted_that_the_cluster_made_without_saying_so(
    cli: Cli, cluster: Cluster
) -> None:
    cluster.mute = True
    up = cli("up", "--hosts", SPEC)
    assert (up.returncode, "the cluster refuses: upstream request" in up.stderr) == (68, True)
    assert len(cluster.made) == 2
    assert cluster.objects == {}


def test_a_session_stays_until_its_pods_are_deleted(cli: Cli, cluster: Cluster) -> None:
    assert cli("up", "--hosts", SPEC).returncode == 0
    cluster.keeps = True
    down = cli("down")
    assert down.returncode == 68
    assert "pods may be left: the cluster refuses: etcdserver: leader changed" in down.stderr
    assert "hint: kubectl delete monarchmesh,secret" in down.stderr
    cluster.keeps = False
    assert cli("down").returncode == 0
    assert cluster.objects == {}


@contextlib.contextmanager
def _running(
    source: Path, workplace: Path, script: str = "sleep 100"
) -> Iterator[subprocess.Popen[str]]:
    """A client of two pods, in which a script runs."""
    run = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), "--hosts", SPEC, "-"]
    pipe = subprocess.PIPE
    with subprocess.Popen(run, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as client:
        assert client.stdin is not None
        client.stdin.write(f"touch {workplace}/runs$WHEELMOUNT_RANK; {script}")
        client.stdin.close()
        client.stdin = None
        while not all((workplace / f"runs{rank}").exists() for rank in (0, 1)):
            assert client.poll() is None
            time.sleep(0.05)
        yield client


def test_a_client_that_is_killed_leaves_no_pods(
    cluster: Cluster, source: Path, workplace: Path
) -> None:
    with _running(source, workplace) as client:
        client.kill()
        client.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while cluster.objects and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cluster.objects == {}


def test_pods_of_a_program_that_was_killed_go_though_a_child_of_it_stays(cluster: Cluster) -> None:
    command = [sys.executable, "-c", FORK_AND_DIE, SPEC]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    deadline = time.monotonic() + 30
    while cluster.objects and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(int(killed.stdout), signal.SIGTERM)
    assert cluster.objects == {}


@pytest.mark.costly
def test_a_pod_that_dies_is_named_and_the_others_finish(
    cluster: Cluster, source: Path, workplace: Path
) -> None:
    go = workplace / "go"
    with _running(source, workplace, f"until [ -e {go} ]; do sleep 0.1; done; echo end") as client:
        name = cluster.made[1]["metadata"]["name"]
        cluster.kill(f"{name}-1")
        assert client.stderr is not None
        go.touch()
        out, errors = client.communicate(timeout=60)
    assert out == f"== {name}-0 ==\nend\n"
    assert f"error: {name}-1: the host died" in errors
    assert client.returncode == 68
    assert cluster.objects == {}


@pytest.mark.costly
def test_a_command_whose_pods_are_deleted_ends_and_says_why(
    cluster: Cluster, source: Path, workplace: Path
) -> None:
    with _running(source, workplace) as client:
        name = cluster.made[1]["metadata"]["name"]
        path = next(path for path in cluster.objects if path.endswith(f"monarchmeshes/{name}"))
        assert cluster.answer("DELETE", path, {})[0] == 200
        _, errors = client.communicate(timeout=60)
    assert client.returncode == 68
    assert f"MonarchMesh {name} was deleted" in errors
    assert "left" not in errors


def test_an_interrupt_while_pods_are_made_deletes_them(cluster: Cluster) -> None:
    up = [sys.executable, "-m", "wheelmount.cli.main", "up", "--hosts"]
    command = [*up, f"kubernetes:1,image={SLOW}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as client:
        assert client.stderr is not None
        while "ContainerCreating" not in client.stderr.readline():
            assert client.poll() is None
        client.send_signal(signal.SIGINT)
        _, errors = client.communicate(timeout=30)
    assert (client.returncode, errors.splitlines()[-1]) == (130, "interrupted")
    assert "left" not in errors
    assert cluster.objects == {}


@pytest.mark.parametrize(
    ("image", "reason"),
    [(MISSING, "ImagePullBackOff"), (UNREADABLE, "CreateContainerConfigError")],
)
def test_pods_that_cannot_run_are_deleted(
    cli: Cli, cluster: Cluster, source: Path, image: str, reason: str
) -> None:
    done = cli("run", source, "--hosts", f"kubernetes:1,image={image}", "-")
    assert done.returncode == 68
    assert f"does not run: {reason}: no {MISSING}" in done.stderr
    assert "hint: give image=IMAGE" in done.stderr
    assert "left" not in done.stderr
    assert cluster.objects == {}


def test_a_wait_for_pods_outlasts_questions_without_an_answer(
    cli: Cli, cluster: Cluster, source: Path, workplace: Path
) -> None:
    cluster.fails = 2
    where = ["--mntpoint", workplace / "mnt"]
    done = cli("run", source, "--hosts", SPEC, *where, "-", input="cat .hidden", stdin=None)
    assert done.returncode == 0, done.stderr
    assert "pods wait: the cluster refuses: etcdserver: leader changed" in done.stderr
    assert cluster.fails == 0
    assert cluster.objects == {}


def test_what_the_process_that_makes_pods_said_last_is_told(
    cluster: Cluster, settings: Settings, monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    broken = workplace / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os\nos.write(2, b'no room for pods')\nos._exit(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(broken))
    with pytest.raises(HostError, match="the process that makes pods has died: no room for pods"):
        parse(SPEC).make(settings, namespaces=False).start()


def test_the_process_that_deletes_pods_ends_well_before_its_client(
    cluster: Cluster, workplace: Path
) -> None:
    order = Order("name", "default", str(workplace / "kubeconfig"), 1, MISSING, timeout=20)
    command = [sys.executable, "-m", "wheelmount.hosts.pods", GUARDED]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        process.stdin.write(order.encode())
        process.stdin.flush()
        assert process.wait(60) == 0
    assert cluster.objects == {}


def test_a_cluster_without_the_operator_is_said(cli: Cli, cluster: Cluster, source: Path) -> None:
    cluster.operator = False
    done = cli("up", "--hosts", SPEC)
    assert done.returncode == 68
    assert "the cluster refuses: the server could not find" in done.stderr
    assert "hint: Monarch's operator must run there" in done.stderr
    assert cluster.objects == {}


@pytest.mark.costly
def test_without_a_cluster_it_says_so(cli: Cli, workplace: Path, source: Path) -> None:
    alone = {**os.environ, "KUBECONFIG": "", "HOME": str(workplace)}
    done = cli("up", "--hosts", SPEC, env=alone)
    assert (done.returncode, "hint: give kubeconfig=FILE" in done.stderr) == (68, True)
    with Cluster(workplace / "kubeconfig"):
        pass
    done = cli("up", "--hosts", f"{SPEC},kubeconfig={workplace}/kubeconfig")
    assert done.returncode == 68
    assert "the cluster does not answer" in done.stderr


def test_without_its_package_it_says_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    hosts = parse(SPEC).make(settings, namespaces=False)
    with pytest.raises(UnavailableError) as error:
        hosts.start()
    assert "pip install 'wheelmount[kubernetes]'" in str(error.value.hint)


@pytest.mark.parametrize(
    "text",
    [
        "kubernetes",
        "kubernetes:0,image=i",
        "kubernetes:2",
        "kubernetes:2,image=",
        "kubernetes:2,image=i,image=j",
        "kubernetes:2,image=i,colour=red",
    ],
)
def test_refuses_nonsense_with_a_hint(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse(text)
    assert error.value.hint
