"""Several processes that work on the mounts of one session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Cli, mounts_shown, shorter_than_its_size
from wheelmount import Cluster
from wheelmount.config import Settings
from wheelmount.errors import MountError, TransferError
from wheelmount.hosts.session import Session
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.operations import pools
from wheelmount.progress import SILENT

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]


@pytest.fixture
def cluster(cli: Cli, settings: Settings) -> Iterator[Cluster]:
    """A session that is up."""
    assert cli("up", "--hosts", "local:1").returncode == 0
    with Cluster("session:default", settings=settings) as cluster:
        yield cluster
    assert cli("down").returncode == 0


def _during_refresh(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    refresh = RemoteMount.refresh

    def acting(mount: RemoteMount, *, warn: bool = True) -> bool:
        act()
        return refresh(mount, warn=warn)

    monkeypatch.setattr(RemoteMount, "refresh", acting)


def test_other_mounts_can_be_made_and_taken_down_during_a_refresh(
    cluster: Cluster,
    cli: Cli,
    source: Path,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = workplace / "other"
    other.mkdir()
    monkeypatch.setenv("WHEELMOUNT_START_TIMEOUT", "30")  # the bound of a wait for others
    codes: list[int] = []

    def act() -> None:
        codes.extend(cli(word, other).returncode for word in ("mount", "umount"))

    cluster.mount(source)
    _during_refresh(monkeypatch, act)
    (source / "new").touch()
    cluster.mount(source)
    assert codes == [0, 0]


def test_a_refresh_whose_mount_another_command_unmounts_says_so(
    cluster: Cluster, cli: Cli, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.mount(source)
    with monkeypatch.context() as during:
        _during_refresh(during, lambda: cli("umount", source))
        with pytest.raises(MountError, match="another command unmounted"):
            cluster.mount(source)
    assert mounts_shown(cli) == []
    cluster.mount(source)
    assert len(mounts_shown(cli)) == 1


def test_a_whole_mount_stays_though_its_session_is_locked(
    cluster: Cluster, cli: Cli, source: Path, settings: Settings
) -> None:
    slow = replace(settings, block_size=4096, in_flight=1, ring=1)
    (source / "large").write_bytes(os.urandom(8 << 20))
    session = Session("default", slow)
    with pools.join(session, SILENT) as pool:
        assert isinstance(pool, pools.Standing)
        whole = pool.mount(source, None)
        whole.__enter__()
        with Session("default", settings).lock():
            session.settings = replace(slow, start_timeout=0.5)
            whole.__exit__(None, None, None)
        session.settings = slow
    (shown,) = mounts_shown(cli)
    assert shown["held"] == shown["size"]
    assert cli("refresh", source).returncode == 0
    assert [each["identity"] for each in mounts_shown(cli)] == [shown["identity"]]


def test_what_an_earlier_mount_lacked_is_not_said_again(cluster: Cluster, source: Path) -> None:
    run = partial(cluster.run, ["cat", ".hidden"], mount=source)
    with shorter_than_its_size(source / "torn"), pytest.raises(TransferError, match="torn"):
        run().raise_for_status()
    for _ in range(2):
        run().raise_for_status()
    cluster.on("host0").run(["cat", ".hidden"], mount=source).raise_for_status()
    assert len(cluster._open.pool._mounts) == 1


KILLED = """
import os, signal
from wheelmount.cli import main
from wheelmount.mount.client.remote import RemoteMount

def open_and_die(mount, **options):
    opening(mount, **options)
    os.kill(os.getpid(), signal.SIGKILL)

opening, RemoteMount.open = RemoteMount.open, open_and_die
main.main()
"""


@pytest.mark.parametrize("command", ["mount", "umount"])
def test_what_a_killed_client_left_half_made_is_taken_down(
    cli: Cli, source: Path, command: str
) -> None:
    assert cli("up", "--hosts", "local:1").returncode == 0
    subprocess.run([sys.executable, "-c", KILLED, "mount", source], check=False, timeout=90)
    (left,) = mounts_shown(cli)
    assert cli(command, source).returncode == 0
    identities = [mount["identity"] for mount in mounts_shown(cli)]
    assert len(identities) == (command == "mount")
    assert left["identity"] not in identities
    assert cli("down").returncode == 0
