"""Mount points however they are written, and mounts that others cover."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Cli, mounts_shown
from tests.mount.conformance import assert_same
from wheelmount import linux
from wheelmount.config import Settings
from wheelmount.errors import InputError, MountError
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client.remote import remotemount
from wheelmount.mount.kernel import points
from wheelmount.mount.serve import processes

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]


def test_a_symlink_on_the_way_to_the_mount_point(source: Path, workplace: Path, cli: Cli) -> None:
    (workplace / "real").mkdir()
    (workplace / "linked").symlink_to("real")
    done = cli("mount", source, f"{workplace}/linked/{{host}}", "--hosts", "local:2")
    assert done.returncode == 0
    where = [mount["mntpoint"] for mount in mounts_shown(cli)]
    assert where == [f"{workplace}/real/host0", f"{workplace}/real/host1"]
    (source / "page").write_text("new\n")
    assert cli("refresh", source).returncode == 0
    assert [Path(path, "page").read_text() for path in where] == ["new\n"] * 2
    for host in ("host0", "host1"):
        assert cli("umount", f"{workplace}/linked/{host}").returncode == 0
    assert mounts_shown(cli) == []


@pytest.mark.parametrize("ending", ["/", "//", "/."])
def test_a_trailing_slash(source: Path, workplace: Path, settings: Settings, ending: str) -> None:
    with LocalHosts(1, settings, namespaces=False) as hosts:
        with remotemount(hosts, source, f"/{workplace}/w{ending}", settings=settings) as mount:
            mount.wait(30)
            assert mount.mntpoints == {"host0": f"{workplace}/w"}
            (source / "page").write_text("new\n")
            assert mount.refresh()
            assert (workplace / "w" / "page").read_text() == "new\n"
        assert points.mounted(str(workplace / "w")) is None


def test_a_mount_point_that_is_a_symlink_is_refused(
    source: Path, workplace: Path, cli: Cli
) -> None:
    (workplace / "real").mkdir()
    (workplace / "linked").symlink_to("real")
    done = cli("mount", source, f"{workplace}/linked/", "--hosts", "local:1")
    assert done.returncode == InputError.exit_code
    assert f"the mount point {workplace}/linked is a symbolic link" in done.stderr
    assert f"hint: give the directory itself: {workplace}/real" in done.stderr
    assert mounts_shown(cli) == []


def test_a_mount_point_in_its_own_source_is_refused(
    source: Path, workplace: Path, cli: Cli
) -> None:
    (workplace / "linked").symlink_to("source")
    for path in (source / "inside", workplace / "linked" / "inside", source):
        done = cli("mount", source, path, "--hosts", "local:1")
        assert done.returncode == InputError.exit_code
        assert "its own source" in done.stderr
    assert not (source / "inside").exists()
    assert mounts_shown(cli) == []


@pytest.mark.parametrize("adapter", ["bind", "devfuse"])
def test_another_mount_above_is_never_touched(
    source: Path, workplace: Path, settings: Settings, adapter: str
) -> None:
    if not linux.may_mount():
        pytest.skip("needs root")
    settings = replace(settings, adapter=adapter)
    where = workplace / "w"
    with LocalHosts(1, settings, namespaces=False) as hosts:
        mount = remotemount(hosts, source, str(where), settings=settings)
        mount.open()
        mount.wait(30)
        (directory,) = processes.find(settings)
        subprocess.run(["mount", "-t", "tmpfs", "above", where], check=True)
        above = points.find(str(where))
        assert [each["adapter"] for each in mount.status().values()] == [adapter]
        with pytest.raises(MountError, match="another mount is above"):
            mount.close()
        with pytest.raises(MountError, match="another mount is above"):
            processes.stop(directory, force=True)
        assert points.find(str(where)) == above
        assert os.listdir(where) == []
        subprocess.run(["umount", where], check=True)
        assert_same(source, where)
        (source / "page").write_text("new\n")
        assert mount.refresh()
        assert (where / "page").read_text() == "new\n"
        mount.close()
    assert points.find(str(where)) is None


def test_mount_points_with_blanks_that_the_kernel_does_not_escape(workplace: Path) -> None:
    odd = workplace / os.fsdecode(b"a b\rc\x0bd\x0ce\x85f\xffg\nh")
    odd.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", odd], check=True)
    try:
        found = points.find(str(odd))
        assert found is not None
        assert (found.path, found.root, found.kind) == (str(odd), "/", "tmpfs")
        assert "rw" in found.options
    finally:
        subprocess.run(["umount", odd], check=True)


def test_a_user_whose_name_is_not_utf_8(workplace: Path) -> None:
    code = "open('/proc/self/comm', 'wb').write(b'abcdefghijklmn\\xc3\\xa9'); print(); input()"
    command = [sys.executable, "-S", "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=workplace, **pipes) as user:  # type: ignore[call-overload]
        assert user.stdout.readline() == b"\n"
        name = f"abcdefghijklmn\N{REPLACEMENT CHARACTER} ({user.pid})"
        assert points.name_of(user.pid) == name
        assert name in points.holders(str(workplace))
        user.communicate(b"\n")
