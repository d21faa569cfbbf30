"""An image of a container registry: a real registry, on this machine only."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uv

from tests.conftest import CHECKOUT, Cli
from tests.containers.conftest import make_sif
from tests.containers.test_running import output, wait_until
from tests.testbed import LOGIN, Lab
from tests.testbed.service import WORKER_PORT, start_workers
from wheelmount.config import Settings
from wheelmount.containers import apptainer, image
from wheelmount.containers import registry as registry_images
from wheelmount.containers.container import Bind, Container
from wheelmount.containers.overlay import Overlay, name_for
from wheelmount.errors import WaitError
from wheelmount.hosts.address import SECURE
from wheelmount.operations import cache
from wheelmount.progress import SILENT

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

OCI = "application/vnd.oci.image"


def test_a_registry_that_says_nothing_is_an_error(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apptainer, "PULL_TIMEOUT", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reference = f"docker://127.0.0.1:{silent.getsockname()[1]}/image"
        with pytest.raises(WaitError, match="nothing of the image has arrived for 2 s"):
            registry_images.pull(reference, workplace / "work", SILENT)
    assert not list((workplace / "work").glob("[!.]*"))


def test_others_cannot_replace_a_pulled_image(workplace: Path, fake_apptainer: Path) -> None:
    fake_apptainer.write_text('#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\necho "$2" >"$1"\n')
    place, reference = workplace / "work", "docker://it"
    before = os.umask(0)
    try:
        made = registry_images.pull(reference, place, SILENT)
        assert made.parent.stat().st_mode & 0o777 == 0o755
        made.parent.chmod(0o777)  # as by an earlier version
        made.write_text("of another user")
        again = registry_images.pull(reference, place, SILENT)
    finally:
        os.umask(before)
    assert again.read_text() == f"{reference}\n"
    assert [each.stat().st_mode & 0o022 for each in (again, again.parent)] == [0, 0]


def test_a_pulled_image_stays_as_long_as_its_overlay(settings: Settings) -> None:
    images = Path(settings.cache_dir, "images")
    for number, name in enumerate(("used", "other")):
        (images / name).mkdir(parents=True)
        make_sif(images / name / registry_images.FILE, number + 1)
    sif = images / "used" / registry_images.FILE
    overlay = Overlay(Path(settings.state_dir), name_for(sif), "host0", "directory", base=sif)
    overlay.create()
    (overlay.path / "upper").mkdir()
    assert [item.path.name for item in cache.clean(settings)] == ["other"]
    assert overlay.remove()
    assert [item.path.name for item in cache.clean(settings)] == ["used"]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Debian's registry; gives its address."""
    assert shutil.which("docker-registry"), "examples/setup.sh --dev installs it"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    settings = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": address},
    }
    (tmp_path / "registry.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = ["docker-registry", "serve", str(tmp_path / "registry.yml")]

    def answers() -> bool:
        try:
            return httpx.get(f"http://{address}/v2/").status_code == 200
        except httpx.TransportError:
            return False

    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until(answers)
            yield address
        finally:
            server.terminate()


def push(registry: str, name: str, tag: str, layer: Path) -> None:
    """Make an image of one layer, a tar archive (OCI distribution and image specifications)."""
    repository = f"http://{registry}/v2/{name}"

    def blob(data: bytes, kind: str) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        begun = httpx.post(f"{repository}/blobs/uploads/").raise_for_status()
        where = httpx.URL(begun.headers["location"]).copy_merge_params({"digest": digest})
        httpx.put(where, content=data, timeout=60).raise_for_status()
        return {"mediaType": f"{OCI}.{kind}", "size": len(data), "digest": digest}

    top = blob(layer.read_bytes(), "layer.v1.tar")
    settings = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [top["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": blob(json.dumps(settings).encode(), "config.v1+json"),
        "layers": [top],
    }
    httpx.put(
        f"{repository}/manifests/{tag}",
        content=json.dumps(manifest).encode(),
        headers={"content-type": f"{OCI}.manifest.v1+json"},
    ).raise_for_status()


@pytest.fixture
def layer(sif: Path, tmp_path: Path) -> Path:
    """A tar archive of a Debian with Python, without what images/python.def brings."""
    (tmp_path / "out").mkdir()
    bind = Bind(tmp_path / "out", "/out", writable=True)
    with Container(sif, tmp_path / "work", binds=[bind]) as container:
        left_out = "--exclude=./out --exclude=./usr/local/bin/uv --exclude=./etc/pip.conf"
        output(container, f"tar -C / --one-file-system {left_out} -cf /out/layer.tar .")
    return tmp_path / "out" / "layer.tar"


@pytest.mark.costly
def test_an_image_of_a_registry(
    registry: str, layer: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(registry, "python", "3.11-slim", layer)
    monkeypatch.setenv("APPTAINER_NO_HTTPS", "true")
    monkeypatch.setenv("APPTAINER_CACHEDIR", str(tmp_path / "cache"))
    made = tmp_path / "docker.sif"
    arguments = {"from": f"{registry}/python:3.11-slim", "uv": uv.find_uv_bin()}
    definition = CHECKOUT / "images" / "python-docker.def"
    assert image.build(definition, made, build_args=arguments)
    assert not image.build(definition, made, build_args=arguments)
    with Container(made, tmp_path / "work", packages=wheels) as container:
        output(container, "uv pip install hello && pip install greeting")
        output(container, "python -c 'import hello, greeting'")


def small(where: Path, text: str) -> Path:
    """A layer of a shell and what it needs, and a file with a text."""
    root = where / "root"
    for name in ("bin", "lib64", "lib/x86_64-linux-gnu", "etc", "tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for program in ("/bin/sh", "/bin/cat"):
        shutil.copy(program, root / "bin")
        told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/lib\S+)", told):
            shutil.copy(library, root / library[1:])
    (root / "etc" / "said").write_text(text)
    archive = where / "layer.tar"
    subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
    return archive


@pytest.mark.costly
@pytest.mark.hosts
@pytest.mark.fuse
def test_an_image_is_pulled_once(
    registry: str, cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTAINER_NO_HTTPS", "true")
    push(registry, "small", "1", small(workplace, "first\n"))
    reference = f"docker://{registry}/small:1"

    def said(*more: str) -> str:
        done = cli("exec", "--image", reference, *more, "--", "cat", "/etc/said")
        assert done.returncode == 0, done.stderr
        return done.stdout + str(done.stderr.count("pull: "))

    assert said() == "first\n1"
    keep = ["exec", "--image", reference, "--", "sh", "-c"]
    assert cli(*keep, "echo kept >/kept").returncode == 0
    assert cli("cache", "clean").stdout.endswith("0 removed\n")
    assert cli(*keep, "cat /kept").stdout == "kept\n"
    assert said("--hosts", "local:2") == "== host0 ==\nfirst\n== host1 ==\nfirst\n0"
    push(registry, "small", "1", small(workplace, "second\n"))
    assert said() == "first\n0"
    (held,) = json.loads(cli("cache", "size", "--json").stdout)["items"]
    assert (held["kind"], held["bytes"] > 100_000) == ("image", True)
    sif = cli("image", "pull", reference).stdout.strip()
    assert said() == "second\n0", "an overlay of its own for another image"

    # The same by a registry of files, and by name from others of the cache.
    oras = f"oras://{registry}/mine:1"
    apptainer = ["apptainer", "push", sif, oras]
    subprocess.run(apptainer, check=True, capture_output=True, timeout=60)
    done = cli("exec", "--image", oras, "--", "cat", "/etc/said")
    assert (done.returncode, done.stdout) == (0, "second\n"), done.stderr

    done = cli("exec", "--image", f"docker://{registry}/none:1", "--", "true")
    assert done.returncode == 71
    assert f"docker://{registry}/none:1 cannot be pulled" in done.stderr
    assert cli("image", "pull", "small").returncode == 64
    assert cli("overlay", "prune", "--unused", "0").returncode == 0
    assert cli("cache", "clean").stdout.endswith("2 removed\n")


@pytest.mark.lab
@pytest.mark.hosts
@pytest.mark.fuse
def test_it_is_shown_to_hosts_elsewhere_by_a_mount(
    registry: str, cli: Cli, workplace: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pulled here, where the registry is, and run by hosts that reach nothing but the client."""
    monkeypatch.setenv("APPTAINER_NO_HTTPS", "true")
    for name in ("CACHE", "STATE"):
        monkeypatch.setenv(f"WHEELMOUNT_{name}_DIR", str(shared / name))
    push(registry, "small", "1", small(workplace, "said\n"))
    reference = f"docker://{registry}/small:1"
    assert cli("image", "pull", reference).returncode == 0
    with Lab(2, shared=[shared]) as lab:
        start_workers(lab, SECURE)
        hosts = ",".join(f"tls://{lab.address(host)}:{WORKER_PORT}" for host in lab.hosts)
        command = [sys.executable, "-m", "wheelmount.cli.main", "exec", "-q", "--hosts", hosts]
        script = 'echo "$APPTAINER_CONTAINER"; cat /etc/said'
        done = lab.run(LOGIN, [*command, "--image", reference, "sh", "-c", script])
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[2::3] == ["said", "said"], lines
        assert all("/image-" in line and line.endswith("/img.sif") for line in lines[1::3]), lines
        done = lab.run(LOGIN, [*command, "--image", reference, "--instance", "one", "true"])
        assert (done.returncode, "wheelmount up" in done.stderr) == (64, True)
