"""An instance sees what is added to its packages, and keeps their mount until it is stopped."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import Cli, mounts_shown
from tests.containers.conftest import make_wheel
from tests.containers.test_running import wait_until
from wheelmount.containers.instance import Instance

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


@pytest.mark.costly
def test_a_killed_instance_with_packages_is_started_again_and_stopped(
    cli: Cli, workplace: Path, wheels: Path, sif: Path
) -> None:
    def kill() -> Instance:
        (one,) = Instance.all(workplace / "runtime" / f"wheelmount-{os.getuid()}")
        record = one.record()
        assert record is not None
        children = Path(f"/proc/{record.pid}/task/{record.pid}/children").read_text().split()
        for number in (record.pid, *map(int, children)):
            os.kill(number, signal.SIGKILL)
        wait_until(lambda: one.record() is None)
        return one

    packages = workplace / "work" / "packages"
    shutil.copytree(wheels, packages)
    command = ["exec", "--hosts", "local:1", "--instance", "one", "--packages", packages, "--image"]
    try:
        assert cli(*command, sif, "--", "true").returncode == 0
        kill()
        make_wheel(packages, "extra", "2.0")
        assert cli(*command, sif, "--", "pip", "install", "extra").returncode == 0
        kill()
        (workplace / "no.sif").write_text("no image")
        assert cli(*command, workplace / "no.sif", "--", "true").returncode == 71
        assert mounts_shown(cli) == []
        assert cli(*command, sif, "--", "true").returncode == 0
        (kill().path / "instance.json").unlink()  # as if its start had been killed
    finally:
        assert cli("instance", "stop", "one").returncode == 0
    assert mounts_shown(cli) == []
