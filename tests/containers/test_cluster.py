"""Containers and installations through ``Cluster``."""

from __future__ import annotations

from pathlib import Path

import pytest

from wheelmount import Cluster
from wheelmount.config import Settings

pytestmark = [pytest.mark.containers, pytest.mark.hosts, pytest.mark.fuse]


def test_commands_in_containers_and_installations(
    sif: Path, wheels: Path, settings: Settings, workplace: Path
) -> None:
    with Cluster("local:2", settings=settings) as cluster:
        install = ["pip", "install", "--no-cache-dir", "hello"]
        cluster.exec(sif, install, packages=wheels, overlay="own").raise_for_status()
        look = ["python3", "-c", "import hello; print(hello.version)"]
        found = cluster.exec(sif, look, overlay="own").texts
        assert found == dict.fromkeys(cluster.hosts, "1.0\n")
        (workplace / "folder").mkdir()
        (workplace / "folder" / "word").write_text("one")
        results = cluster.run(["cat", "word"], mount=workplace / "folder", image=sif)
        assert results.texts == dict.fromkeys(cluster.hosts, "one")
        wheel = str(next(wheels.glob("hello-*.whl")))
        for venv in "venv", "again":  # from one mount
            cluster.install(wheel, venv=str(workplace / venv)).raise_for_status()
            for name in cluster.hosts:
                place = workplace / f"{venv}-{name}"
                assert list(place.glob("lib/python*/site-packages/hello.py"))
