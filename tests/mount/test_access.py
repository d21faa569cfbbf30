"""Who may come into root's mounts, and what programs there may do."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import NOBODY
from wheelmount.config import Settings
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Commands, Result
from wheelmount.hosts.local import LocalHosts
from wheelmount.hosts.spec import parse
from wheelmount.mount.client.remote import RemoteMount, remotemount
from wheelmount.mount.serve.adapters import NAMES
from wheelmount.mount.snapshot import access
from wheelmount.operations.image import packages_point

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.hosts,
    pytest.mark.skipif(os.getuid() != 0, reason="root's mounts, as other users find them"),
]

ADAPTERS = [name for name in NAMES if name != "auto"]


@pytest.fixture
def host(settings: Settings) -> Iterator[LocalHosts]:
    with LocalHosts(1, settings, namespaces=False) as hosts:
        yield hosts


@pytest.fixture
def secret(workplace: Path) -> Path:
    """A directory that all may read, below one that only root may enter."""
    above = workplace / "above"
    source = above / "deep" / "source"
    source.mkdir(parents=True)
    (source / "file").write_text("secret\n")
    above.chmod(0o700)
    return source


def _run(program: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )


def _read(mount: RemoteMount) -> str:
    return _run(Path("cat"), Path(mount.mntpoints["host0"]) / "file").stdout


def test_what_is_closed_to_others_is_found(secret: Path) -> None:
    assert access.closed(str(secret)) == secret.parents[1]
    secret.parents[1].chmod(0o755)
    assert access.closed(str(secret)) is None
    secret.chmod(0o700)  # its own mode is part of the tree
    assert access.closed(str(secret)) is None


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_mount_is_closed_to_those_to_whom_its_source_is(
    host: LocalHosts, settings: Settings, workplace: Path, secret: Path, adapter: str
) -> None:
    settings = replace(settings, adapter=adapter)
    point = str(workplace / "mnt")
    with remotemount(host, secret, point, settings=settings) as mount:
        mount.wait(60)
        assert (Path(point) / "file").read_text() == "secret\n"
        assert _read(mount) == ""
        secret.parents[1].chmod(0o755)
        (secret / "more").touch()
        assert mount.refresh()
        assert _read(mount) == "", "who may come in is said when it is mounted"
    with remotemount(host, secret, point, settings=settings) as mount:
        assert _read(mount) == "secret\n"
        secret.parents[1].chmod(0o700)
        (secret / "again").touch()
        assert mount.refresh()
        assert _read(mount) == "secret\n"


def test_it_can_be_said_who_may_come_in(
    host: LocalHosts, settings: Settings, workplace: Path, secret: Path
) -> None:
    public = replace(settings, access="public")
    with remotemount(host, secret, str(workplace / "mnt"), settings=public) as mount:
        assert _read(mount) == "secret\n"
    secret.parents[1].chmod(0o755)
    private = replace(settings, access="private")
    with remotemount(host, secret, str(workplace / "mnt"), settings=private) as mount:
        assert _read(mount) == ""


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_programs_gain_nothing(
    host: LocalHosts, settings: Settings, workplace: Path, adapter: str
) -> None:
    source = workplace / "programs"
    source.mkdir()
    for name in ("id", "cat"):
        shutil.copy(str(shutil.which(name)), source)
    (source / "id").chmod(0o6755)
    capability = struct.pack("<5I", 0x02000001, 1 << 21, 0, 0, 0)  # CAP_SYS_ADMIN: capability.h
    os.setxattr(source / "cat", "security.capability", capability)

    def gained(place: Path) -> tuple[str, str]:
        status = _run(place / "cat", "/proc/self/status").stdout
        (effective,) = (line for line in status.splitlines() if line.startswith("CapEff"))
        return _run(place / "id", "-u").stdout.strip(), effective.split()[1].lstrip("0")

    assert gained(source) == ("0", "200000"), "at the source they do"
    point = workplace / "mnt"
    with remotemount(
        host, source, str(point), settings=replace(settings, adapter=adapter)
    ) as mount:
        assert gained(point) == (str(NOBODY), "")
        mount.wait(60)
        assert gained(point) == (str(NOBODY), "")


def test_a_mount_of_ours_is_below_no_directory_of_another_user(
    settings: Settings, workplace: Path
) -> None:
    """The host's directory of the name that the client's has is another user's."""
    source, runtime, theirs = (workplace / name for name in ("wheels", "away", "theirs"))
    for made in (source, runtime, theirs):
        made.mkdir()
    (source / "file").write_text("content\n")
    theirs.chmod(0o1777)
    squatted = theirs / f"wheelmount-{os.getuid()}"
    squatted.mkdir()
    squatted.chmod(0o777)
    os.chown(squatted, NOBODY, NOBODY)
    away = replace(settings, runtime_dir=str(runtime))
    ours = away.private_runtime()
    script = f"mount --bind {theirs} {runtime} && echo ready && exec sleep 600"
    elsewhere = ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", script]
    with subprocess.Popen(elsewhere, stdout=subprocess.PIPE) as there:
        try:
            assert there.stdout is not None
            assert there.stdout.readline() == b"ready\n"
            spec = parse("local:1")
            with (
                LocalHosts(1, settings, within={"host0": there.pid}) as hosts,
                Commands(list(hosts), 60) as commands,
                remotemount(hosts, source, packages_point(spec, source), settings=away) as mount,
            ):
                (point,) = mount.mntpoints.values()
                private = commands.private(away.runtime_dir)["host0"]
                look = f"cat {point}/file; stat -c '%u %a' {private}; ls {runtime / squatted.name}"
                said = commands.run({"host0": Command(("sh", "-c", look))})["host0"]
        finally:
            there.kill()
    assert isinstance(said, Result)
    assert said.stdout == f"content\n{os.getuid()} 700\n".encode()
    assert Path(point).parent == Path(private) != ours
    assert not list(squatted.iterdir())
