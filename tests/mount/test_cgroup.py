"""What control groups leave of memory."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wheelmount.mount.kernel import points
from wheelmount.mount.kernel.points import Mounted
from wheelmount.mount.store import capacity

MIB = 1 << 20


def _mounted(path: Path, kind: str, root: str = "/") -> Mounted:
    return Mounted(1, 0, "0:1", root, str(path), frozenset(), kind)


def _two(group: Path, limit: str, used: int, cache: int, high: str = "max") -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.high").write_text(f"{high}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\nactive_file 0\ninactive_file {cache}\n")


def _one(group: Path, limit: int, used: int, cache: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"cache 5\ntotal_active_file {cache}\n")


def test_the_least_that_a_group_or_one_above_it_leaves_counts(tmp_path: Path) -> None:
    mounts = [_mounted(tmp_path, "cgroup2"), _mounted(tmp_path, "tmpfs")]
    task = "0::/slurm/job_7/step_0\n"
    (tmp_path / "slurm" / "job_7" / "step_0").mkdir(parents=True)
    assert capacity.cgroup_left(task, mounts) is None
    _two(tmp_path / "slurm" / "job_7" / "step_0", "max", 90 * MIB, 0)
    assert capacity.cgroup_left(task, mounts) is None
    _two(tmp_path / "slurm" / "job_7", str(100 * MIB), 90 * MIB, 30 * MIB)
    assert capacity.cgroup_left(task, mounts) == 40 * MIB
    _two(tmp_path / "slurm", str(200 * MIB), 190 * MIB, 0, high=str(195 * MIB))
    assert capacity.cgroup_left(task, mounts) == 5 * MIB
    _two(tmp_path / "slurm", str(100 * MIB), 190 * MIB, 0)
    assert capacity.cgroup_left(task, mounts) == 0
    assert capacity.cgroup_left("0::/\n", mounts) is None


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    mounts = [_mounted(tmp_path / "cpu", "cgroup"), _mounted(tmp_path / "memory", "cgroup")]
    listed = "4:memory:/a/b\n3:cpu,cpuacct:/a\n1:name=systemd:/\n0::/\n"
    _one(tmp_path / "memory", (1 << 63) - 4096, 5, 5)
    _one(tmp_path / "memory" / "a", 100 * MIB, 60 * MIB, 0)
    _one(tmp_path / "memory" / "a" / "b", 100 * MIB, 20 * MIB, 0)
    assert capacity.cgroup_left(listed, mounts) == 40 * MIB
    # As in a container whose own group is shown as the topmost.
    shown = [_mounted(tmp_path / "memory" / "a" / "b", "cgroup", "/a/b")]
    assert capacity.cgroup_left(listed, shown) == 80 * MIB
    elsewhere = [_mounted(tmp_path / "memory" / "a", "cgroup", "/docker")]
    assert capacity.cgroup_left(listed, elsewhere) == 40 * MIB


@pytest.fixture
def group() -> Iterator[Path]:
    """A group of this machine below that of the tests, with a limit of 64 MiB."""
    listed = Path("/proc/self/cgroup").read_text()
    for top in capacity._groups(listed, points.table()):
        for name in ("memory.limit_in_bytes", "memory.max"):
            made = top / f"wm-{secrets.token_hex(4)}"
            try:
                made.mkdir()
            except OSError:
                continue
            try:
                (made / name).write_text(str(64 * MIB))
            except OSError:
                made.rmdir()
                continue
            yield made
            made.rmdir()
            return
    pytest.skip("this machine lets no groups be made")


def test_a_store_in_a_job_is_refused_where_its_group_has_no_room(group: Path) -> None:
    """Of a real group, by a process in it."""
    program = (
        "import sys; open(sys.argv[1], 'w').write('0')\n"
        "from pathlib import Path\n"
        "from wheelmount.errors import StoreError\n"
        "from wheelmount.mount.store import capacity\n"
        "capacity.check(Path('/tmp'), 1 << 20, memory=True)\n"
        "try: capacity.check(Path('/tmp'), 64 << 20, memory=True)\n"
        "except StoreError as error: print(error.message)\n"
    )
    command = [sys.executable, "-c", program, str(group / "cgroup.procs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "64 MiB do not fit into memory" in done.stdout
    assert capacity.available() > 64 * MIB or os.sysconf("SC_AVPHYS_PAGES") == 0
