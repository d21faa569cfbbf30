"""An image of a container registry: a real registry, on this machine only."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uv

from tests.conftest import CHECKOUT
from tests.containers.test_running import output, wait_until
from wheelmount.containers import image
from wheelmount.containers.container import Bind, Container

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

OCI = "application/vnd.oci.image"


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


def test_an_image_of_a_registry(
    registry: str, sif: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    bind = Bind(tmp_path / "out", "/out", writable=True)
    with Container(sif, tmp_path / "work", binds=[bind]) as container:
        # Without what the definition itself brings.
        left_out = "--exclude=./out --exclude=./usr/local/bin/uv --exclude=./etc/pip.conf"
        output(container, f"tar -C / --one-file-system {left_out} -cf /out/layer.tar .")
    push(registry, "python", "3.11-slim", tmp_path / "out" / "layer.tar")

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
