"""``remotemount`` in a Monarch program: meshes of its own, and loops that run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conformance import assert_same
from wheelmount import remotemount
from wheelmount.config import Settings
from wheelmount.errors import InputError, SourceError
from wheelmount.hosts import runtime
from wheelmount.hosts.host import as_hosts
from wheelmount.hosts.local import LocalHosts

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]

MESHES = """
import sys
from pathlib import Path
import pytest
from monarch.job import ProcessJob
from tests.mount.conformance import assert_same
from wheelmount import remotemount
from wheelmount.errors import InputError
source, place = Path(sys.argv[1]), Path(sys.argv[2])
job = ProcessJob({"hosts": 3})
try:
    hosts = job.state(cached_path=None).hosts
    for mesh, names in (
        (hosts.slice(hosts=slice(1, 3)), ["host1", "host2"]),
        (hosts.slice(hosts=2), ["host2"]),
    ):
        with remotemount(mesh, source, f"{place}/{{host}}") as mount:
            mount.wait(60)
            assert list(mount.mntpoints) == names
            for name in names:
                assert_same(source, place / name)
    with pytest.raises(InputError, match="this is a ProcMesh") as error:
        remotemount(hosts.spawn_procs({"gpus": 1}), source, f"{place}/{{host}}")
    assert "HostMesh that its processes were spawned on" in error.value.hint
finally:
    job.kill()
"""


def test_slices_keep_names_and_processes_are_refused(source: Path, workplace: Path) -> None:
    code = [sys.executable, "-c", MESHES, str(source), str(workplace)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_no_mesh_is_refused() -> None:
    for given in (["host0"], 7, "local:2"):
        with pytest.raises(InputError, match=f"this is a {type(given).__name__}"):
            as_hosts(given)


def test_a_running_loop_goes_on(source: Path, workplace: Path, settings: Settings) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    async def main(hosts: LocalHosts) -> None:
        counting = asyncio.create_task(count())
        where = str(workplace / "w")
        async with remotemount(hosts, source, where, settings=settings) as mount:
            assert turns > 1, "while it was opened"
            await mount.arrived(60)
            assert_same(source, workplace / "w")
        with pytest.raises(SourceError, match="no directory"):
            async with remotemount(hosts, workplace / "no", where, settings=settings):
                pass
        counting.cancel()

    with LocalHosts(1, settings, namespaces=False) as hosts:
        asyncio.run(main(hosts))
    assert not (workplace / "w").exists()


def test_errors_in_a_running_loop_are_raised() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def main() -> Any:
        runtime.complete(fail())

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
