"""Hosts that are added to a live mount."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from wheelmount import remotemount
from wheelmount.config import Settings
from wheelmount.errors import InputError, MountError
from wheelmount.hosts.host import Host
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client.delivery import Delivery
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.mount.host import reattach
from wheelmount.progress import SILENT

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]

SIZE = 6 << 20


@pytest.fixture
def large(workplace: Path) -> Path:
    source = workplace / "large"
    source.mkdir()
    for name in ("one", "two"):
        (source / name).write_bytes(os.urandom(SIZE // 2))
    return source


@pytest.fixture
def hosts(settings: Settings) -> Iterator[list[Host]]:
    with LocalHosts(3, settings, namespaces=False) as made:
        yield list(made)


def _assert_everywhere(mount: RemoteMount, source: Path, count: int) -> None:
    assert len(mount.mntpoints) == count
    for path in mount.mntpoints.values():
        subprocess.run(["diff", "-r", source, path], check=True, timeout=60)


def _received(mount: RemoteMount, host: str) -> dict[str, int]:
    received: dict[str, int] = mount.status()[host]["delivery"]["received"]
    return received


def test_after_another_client_refreshed(
    hosts: list[Host], large: Path, workplace: Path, settings: Settings, cli: Cli
) -> None:
    with remotemount(hosts[:2], large, f"{workplace}/{{host}}", settings=settings) as mount:
        mount.wait(60)
        (large / "two").write_bytes(os.urandom(SIZE // 2))
        assert cli("refresh", large).returncode == 0
        mount.add(hosts[2])
        mount.wait(60)
        _assert_everywhere(mount, large, 3)


def test_while_bytes_arrive(
    hosts: list[Host],
    large: Path,
    workplace: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added, deliver = threading.Event(), Delivery.deliver

    def deliver_then(*arguments: Any) -> None:
        added.wait(30)
        deliver(*arguments)

    monkeypatch.setattr(Delivery, "deliver", deliver_then)
    with remotemount(hosts[:2], large, f"{workplace}/{{host}}", settings=settings) as mount:
        mount.add(hosts[2])
        assert os.listdir(workplace / "host2") == os.listdir(workplace / "host0")
        added.set()
        mount.wait(60)
        _assert_everywhere(mount, large, 3)
        assert mount.sent == SIZE, "the new host had its bytes from the others"
        with pytest.raises(InputError, match="host2 has the mount already"):
            mount.add(hosts[2])
    assert not (workplace / "host2").exists()


def test_after_a_refresh(
    hosts: list[Host], large: Path, workplace: Path, settings: Settings
) -> None:
    with remotemount(hosts[:2], large, f"{workplace}/{{host}}", settings=settings) as mount:
        mount.wait(60)
        (large / "two").write_bytes(os.urandom(SIZE // 2))
        assert mount.refresh()
        mount.add([hosts[2]])
        mount.wait(60)
        _assert_everywhere(mount, large, 3)
        assert mount.sent == 0, "the client gave hashes only"
        assert _received(mount, "host2").keys() == {"host0", "host1"}
        (large / "three").write_text("three")
        assert mount.refresh()
        _assert_everywhere(mount, large, 3)


def test_an_edit_whose_time_was_put_back_is_not_brought_to_the_new_host_alone(
    hosts: list[Host], large: Path, workplace: Path, settings: Settings
) -> None:
    with remotemount(hosts[:1], large, f"{workplace}/{{host}}", settings=settings) as mount:
        mount.wait(60)
        (large / "two").write_bytes(os.urandom(SIZE // 2))
        assert mount.refresh()
        shown, times = (large / "one").read_bytes(), (large / "one").stat()
        with (large / "one").open("r+b") as file:
            file.write(os.urandom(SIZE // 2))
        os.utime(large / "one", ns=(times.st_atime_ns, times.st_mtime_ns))
        mount.add(hosts[1])
        mount.wait(60)
        assert (workplace / "host0" / "one").read_bytes() == shown
        assert mount.unreadable == ["one"]
        with pytest.raises(OSError, match="Input/output error"):
            (workplace / "host1" / "one").read_bytes()
        assert mount.refresh()
        _assert_everywhere(mount, large, 2)


def test_by_another_client_to_a_mount_that_stayed(
    hosts: list[Host], large: Path, workplace: Path, settings: Settings
) -> None:
    where = f"{workplace}/{{host}}"
    made = remotemount(hosts[:2], large, where, settings=settings)
    made.open(keep=True)
    made.keep()
    made.release()
    with pytest.raises(MountError, match="not open"):
        RemoteMount(hosts[:2], str(large), where, settings, SILENT).add(hosts[2])
    again = RemoteMount(hosts[:2], large, where, settings, SILENT, identity=made.identity)
    again.adopt()
    try:
        (workplace / "host2").mkdir()
        (workplace / "host2" / "file").touch()
        with pytest.raises(MountError, match=r"host2 is not empty"):
            again.add(hosts[2])
        (workplace / "host2" / "file").unlink()
        for store in (workplace / "store").glob("*/*-host[01]"):
            with (store / "1" / "one").open("r+b") as file:
                file.write(bytes(SIZE // 2))
        again.add(hosts[2])
        again.wait(60)
        subprocess.run(["diff", "-r", large, workplace / "host2"], check=True, timeout=60)
        assert 0 < again.sent < SIZE, "the client gave what had rotted on both hosts, no more"
    finally:
        again.close(force=True)


def test_a_fixed_directory_is_taken_over_without_its_tree(
    hosts: list[Host],
    large: Path,
    workplace: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = f"{workplace}/{{host}}"
    made = remotemount(hosts[:2], large, where, settings=settings)
    made.open(keep=True)
    made.keep()
    again = RemoteMount(hosts[:2], large, where, settings, SILENT, identity=made.identity)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(reattach, "_layout", lambda *_: pytest.fail("the tree was fetched"))
            again.adopt(made.handles, fixed=True)
        _assert_everywhere(again, large, 2)
        assert again.mntpoints == made.mntpoints
        assert again.unreadable == []
        with pytest.raises(MountError, match="not open"):
            again.refresh()
    finally:
        again.close(force=True)


@pytest.mark.parametrize("fixed", [False, True])
def test_what_a_client_left_is_delivered_by_another_with_its_agents(
    hosts: list[Host],
    large: Path,
    workplace: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    fixed: bool,
) -> None:
    where = f"{workplace}/{{host}}"
    settings = replace(settings, adapter="devfuse")
    with monkeypatch.context() as patch:
        patch.setattr(Delivery, "deliver", lambda *_: None)
        mount = remotemount(hosts[:2], large, where, settings=settings)
        mount.open()
    with (workplace / "host0" / "one").open("rb") as file:
        assert file.read(SIZE // 4)
    again = RemoteMount(hosts[:2], large, where, settings, SILENT, identity=mount.identity)
    again.adopt(mount.handles, fixed=fixed)
    try:
        again.wait(60)
        assert 0 < again.sent < SIZE
        _assert_everywhere(again, large, 2)
        again.add(hosts[2])
        again.wait(60)
        _assert_everywhere(again, large, 3)
    finally:
        again.close(force=True)
        mount.close(force=True)


RETURNING = """
import os, signal, subprocess, sys
from dataclasses import replace
from pathlib import Path
import psutil
from wheelmount import config, remotemount
from wheelmount.errors import WheelmountError
from wheelmount.hosts.local import LocalHosts
source, place = Path(sys.argv[1]), sys.argv[2]
settings = replace(config.load(), block_size=256 << 10, fetch_timeout=5)
def local(count):
    return LocalHosts(count, settings, namespaces=False)
with local(2) as hosts, local(1) as more:
    mount = remotemount(hosts, source, f"{place}/{{host}}", settings=settings)
    mount.open(keep=True)
    mount.keep()
    pid = hosts.pids[1]
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    family = [each for each in family if "wheelmount.mount.serve.server" not in each.cmdline()]
    for process in family:
        process.kill()
    mount.add([replace(host, name="host1") for host in more])
    mount.wait(60)
    subprocess.run(["diff", "-r", source, f"{place}/host1"], check=True)
    (source / "three").write_text("three")
    assert mount.refresh()
    for host in ("host0", "host1"):
        subprocess.run(["diff", "-r", source, f"{place}/{host}"], check=True)
    mount.close()
"""


LOST = """
import subprocess, sys
from pathlib import Path
import psutil, pytest
from wheelmount import config, remotemount
from wheelmount.errors import HostError
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client.delivery import Delivery
source, place = Path(sys.argv[1]), sys.argv[2]
fetch = Delivery.fetch
def kill(number):
    host = psutil.Process(hosts.pids[number])
    family = [host, *host.children(recursive=True)]
    family = [each for each in family if "wheelmount.mount.serve.server" not in each.cmdline()]
    for process in family:
        process.kill()
    psutil.wait_procs(family, 30)
def fetch_then_kill(*arguments):
    outcome = fetch(*arguments)
    Delivery.fetch = fetch
    kill(1)
    return outcome
def follow(lost):
    (source / f"new {lost}").write_text("new")
    (source / "one").chmod(0o600)  # its bytes are compared
    if lost:
        with pytest.raises(HostError, match=f"{lost}: lost, .* the other hosts show"):
            mount.refresh()
    else:
        assert mount.refresh()
    for path in mount.mntpoints.values():
        subprocess.run(["diff", "-r", source, path], check=True)
with LocalHosts(4, namespaces=False) as hosts:
    mount = remotemount(hosts, source, f"{place}/{{host}}")
    mount.open()
    mount.wait(60)
    Delivery.fetch = fetch_then_kill
    follow("host1")
    assert mount.mntpoints.keys() == {"host0", "host2", "host3"}
    follow("")
    kill(3)
    follow("host3")
    follow("")
    assert not mount.refresh()
    mount.close()
"""


@pytest.mark.costly
def test_hosts_that_are_lost_are_passed_over_by_later_refreshes(
    large: Path, workplace: Path
) -> None:
    code = [sys.executable, "-c", LOST, str(large), str(workplace)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_host_that_was_lost_and_came_back(large: Path, workplace: Path) -> None:
    # In a process of its own: Monarch in a client that lost a host may take no new ones.
    code = [sys.executable, "-c", RETURNING, str(large), str(workplace)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
