"""A running instance sees what is added to its packages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import Cli, mounts_shown
from tests.containers.conftest import make_wheel

pytestmark = [
    pytest.mark.containers,
    pytest.mark.hosts,
    pytest.mark.fuse,
    pytest.mark.timeout(600),
]


@pytest.mark.costly
def test_a_wheel_that_is_added_is_installed_in_a_running_instance(
    cli: Cli, workplace: Path, wheels: Path, sif: Path
) -> None:
    packages = workplace / "work" / "packages"
    shutil.copytree(wheels, packages)
    start = ["exec", "--hosts", "local:1", "--image", sif, "--instance", "one"]
    assert cli(*start, "--packages", packages, "--", "true").returncode == 0
    make_wheel(packages, "extra", "2.0")
    assert cli("refresh", packages).returncode == 0
    try:
        done = cli("exec", "--instance", "one", "--", "pip", "install", "extra", "greeting")
        assert done.returncode == 0
        assert "Successfully installed extra-2.0 greeting-2.0 hello-1.0" in done.stdout
    finally:
        assert cli("instance", "stop", "one").returncode == 0
    assert mounts_shown(cli) == []
