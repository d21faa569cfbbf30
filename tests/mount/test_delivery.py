"""Bytes on their way to several hosts, who have them from one another."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wheelmount import remotemount
from wheelmount.config import Settings
from wheelmount.errors import TransferError, WaitError, WheelmountError
from wheelmount.hosts import runtime
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client import delivery
from wheelmount.mount.client.delivery import Delivery
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.source import Source
from wheelmount.mount.transfer.receiver import RETRY_AFTER
from wheelmount.mount.transfer.stream import BlockServer, Lender

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]


@pytest.fixture
def large(workplace: Path) -> Path:
    source = workplace / "large"
    source.mkdir()
    for name in ("one", "two"):
        (source / name).write_bytes(os.urandom(5 << 20))
    return source


def _same(source: Path, mount: str) -> None:
    subprocess.run(["diff", "-r", source, mount], check=True, timeout=60)


@pytest.mark.costly
@pytest.mark.parametrize(("fanout", "racks"), [(0, ""), (1, ""), (2, ""), (1, "host1 host0,host2")])
def test_every_byte_leaves_the_client_once(
    large: Path, workplace: Path, settings: Settings, fanout: int, racks: str
) -> None:
    settings = replace(settings, fanout=fanout, racks=racks)
    with (
        LocalHosts(3, settings, namespaces=False) as hosts,
        remotemount(hosts, large, f"{workplace}/{{host}}", settings=settings) as mount,
    ):
        mount.wait(60)
        assert mount.sent == 10 << 20
        found = [status["delivery"] for status in mount.status().values()]
        assert [sum(each["received"].values()) for each in found] == [10 << 20] * 3
        assert sum(each["received"].get("client", 0) for each in found) == 10 << 20
        assert sum(each["sent"] for each in found) == 20 << 20
        assert {each["transport"] for each in found} <= {"local", "tcp"}
        if racks:  # which makes host1 the last of the chain
            assert [each["sent"] for each in found] == [10 << 20, 0, 10 << 20]
        for path in mount.mntpoints.values():
            _same(large, path)
        (large / "two").write_bytes(os.urandom(4 << 20))
        assert mount.refresh()
        assert mount.sent == 4 << 20
        for path in mount.mntpoints.values():
            _same(large, path)


@pytest.mark.parametrize("compress", ["always", "never"])
def test_bytes_travel_compressed_if_they_are_to(
    workplace: Path, settings: Settings, compress: str
) -> None:
    source, settings = workplace / "text", replace(settings, compress=compress)
    source.mkdir()
    for name in ("one", "two"):
        (source / name).write_bytes(
            b"".join(b"%s, line %d\n" % (name.encode(), n) for n in range(400_000))
        )
    size = sum(path.stat().st_size for path in source.iterdir())
    with (
        LocalHosts(3, settings, namespaces=False) as hosts,
        remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings) as mount,
    ):
        mount.wait(60)
        found = [status["delivery"] for status in mount.status().values()]
        received = [sum(each["received"].values()) for each in found]
        if compress == "never":
            assert (mount.sent, received) == (size, [size] * 3)
        else:
            assert mount.sent < size / 2
            assert max(received) < size / 2
        for path in mount.mntpoints.values():
            _same(source, path)


@pytest.mark.parametrize("kind", ["none", "closed"])
def test_where_streams_are_out_of_reach_bytes_come_through_monarch(
    large: Path,
    workplace: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    def closed(lender: Lender, timeout: float) -> BlockServer:
        block_server = BlockServer(lender, timeout)
        block_server.close()
        return block_server

    monkeypatch.setattr(delivery, "block_server", closed if kind == "closed" else lambda *_: None)
    with (
        LocalHosts(2, settings, namespaces=False) as hosts,
        remotemount(hosts, large, f"{workplace}/{{host}}", settings=settings) as mount,
    ):
        mount.wait(60)
        assert mount.sent == 10 << 20
        for path in mount.mntpoints.values():
            _same(large, path)


@pytest.mark.parametrize("small", [False, True])
def test_the_client_keeps_only_what_more_than_one_host_may_ask_it_for(
    large: Path, workplace: Path, settings: Settings, small: bool
) -> None:
    if small:
        (large / "one").write_bytes(b"few")
        (large / "two").unlink()
    with (
        LocalHosts(2, settings, namespaces=False) as hosts,
        remotemount(hosts, large, f"{workplace}/{{host}}", settings=settings) as mount,
    ):
        mount.wait(60)
        assert mount._delivery is not None
        assert bool(mount._delivery._ring._used) is small


@pytest.fixture
def held(
    large: Path, workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RemoteMount]:
    """A mount on two hosts to which nothing is delivered by itself."""
    monkeypatch.setattr(Delivery, "deliver", lambda *_: None)
    settings = replace(settings, adapter="devfuse")
    with (
        LocalHosts(2, settings, namespaces=False) as hosts,
        remotemount(hosts, large, f"{workplace}/{{host}}", settings=settings) as mount,
    ):
        yield mount


def _deliver(mount: RemoteMount, host: str) -> None:
    runtime.one(mount._agents[host].deliver.call_one(), 60)


def _layout(mount: RemoteMount) -> Layout:
    assert mount._layout is not None
    return mount._layout


def test_what_a_host_gives_on_is_what_it_got(held: RemoteMount, large: Path) -> None:
    _deliver(held, "host0")  # and so host1 has what it has to give to host0
    assert held.sent == 10 << 20
    _deliver(held, "host1")
    assert held.sent == 10 << 20, "the rest came from host0"
    for path in held.mntpoints.values():
        _same(large, path)


def test_bytes_that_rotted_on_a_host_are_fetched_elsewhere(
    held: RemoteMount, large: Path, workplace: Path
) -> None:
    _deliver(held, "host0")
    (store,) = (workplace / "store").glob("*/*-host0")
    for name in ("one", "two"):
        with (store / "1" / name).open("r+b") as file:
            file.write(bytes(5 << 20))
    _deliver(held, "host1")
    assert held.sent > 12 << 20, "the client sent again what host0 should have given"
    _same(large, held.mntpoints["host1"])


def test_a_read_brings_its_bytes_from_the_host_that_gives_them(
    held: RemoteMount, large: Path
) -> None:
    """Reads of one host alone fill both, in so far as bytes pass through the other."""
    _same(large, held.mntpoints["host1"])
    blocks = _layout(held).blocks
    found = held.status()
    assert found["host1"]["held"] == 10 << 20
    passed = found["host0"]["held"]
    assert abs(passed - (10 << 20) * (blocks // 2) / blocks) <= 64 << 10


def test_a_source_that_stalls_fails_nothing(
    large: Path, workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(settings, fetch_timeout=2)
    stalled: list[int] = []
    fill = Source.fill

    def slow(source: Source, block: int, view: memoryview) -> tuple[bytes, tuple[int, ...]]:
        if not stalled:
            stalled.append(block)
            time.sleep(6)
        return fill(source, block, view)

    monkeypatch.setattr(Source, "fill", slow)
    with (
        LocalHosts(2, settings, namespaces=False) as hosts,
        remotemount(hosts, large, f"{workplace}/{{host}}", settings=settings) as mount,
    ):
        mount.wait(60)
        assert mount.sent == 10 << 20, "nobody asked the client for what others had to give"
        for path in mount.mntpoints.values():
            _same(large, path)


@contextlib.contextmanager
def _hanging(file: Path) -> Iterator[None]:
    """Have whatever opens a file wait, as on a disk that hangs; it fails in the end."""
    saved = file.with_name(f"{file.name}.saved")
    if file.exists():
        file.rename(saved)
    os.mkfifo(file)
    try:
        yield
    finally:
        ends = os.open(file, os.O_RDWR | os.O_NONBLOCK)
        file.unlink()
        if saved.exists():
            saved.rename(file)
        os.close(ends)


@pytest.mark.costly
def test_a_host_whose_disk_hangs_ends_the_wait_and_has_all_once_it_goes_on(
    large: Path, workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(settings, adapter="devfuse", fetch_timeout=1)
    hangs, deliver = threading.Event(), Delivery.deliver

    def deliver_then(*arguments: Any) -> None:
        hangs.wait(30)
        deliver(*arguments)

    monkeypatch.setattr(Delivery, "deliver", deliver_then)
    with (
        LocalHosts(2, settings, namespaces=False) as hosts,
        remotemount(hosts, large, f"{workplace}/{{host}}", settings=settings) as mount,
    ):
        (store,) = (workplace / "store").glob("*/*-host0")
        with _hanging(store / "1" / "two"):
            hangs.set()
            with pytest.raises(WaitError, match=r"host0: nothing was heard of it for 1\d s"):
                mount.wait(120)
            _same(large, mount.mntpoints["host1"])  # which waited for host0
        _await_refresh(mount)
        for path in mount.mntpoints.values():
            _same(large, path)


@pytest.mark.costly
def test_a_host_whose_disk_hangs_keeps_no_other_from_a_refresh_and_follows_later(
    large: Path, workplace: Path, settings: Settings
) -> None:
    settings = replace(settings, adapter="devfuse", fetch_timeout=1)
    with (
        LocalHosts(2, settings, namespaces=False) as hosts,
        remotemount(hosts, large, f"{workplace}/{{host}}", settings=settings) as mount,
    ):
        mount.wait(60)
        (store,) = (workplace / "store").glob("*/*-host1")
        (large / "new").write_bytes(b"new")
        shown = [Path(path, "new") for path in mount.mntpoints.values()]
        with _hanging(store / "1.tree"):
            with pytest.raises(WaitError, match=r"host1: nothing was heard of it for 1\d s"):
                mount.refresh()
            assert [path.exists() for path in shown] == [True, False]
        _await_refresh(mount)
        for path in mount.mntpoints.values():
            _same(large, path)


def _await_refresh(mount: RemoteMount) -> None:
    deadline = time.monotonic() + 60
    while (error := _refresh(mount)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert error is None


def _refresh(mount: RemoteMount) -> WheelmountError | None:
    """Refresh a mount; return the error."""
    try:
        mount.refresh()
    except WheelmountError as error:
        return error
    return None


def test_what_could_not_be_had_is_asked_for_again(
    large: Path, workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = Source.fill

    def broken(source: Source, block: int, view: memoryview) -> tuple[bytes, tuple[int, ...]]:
        if block == 0:
            raise OSError(errno.EIO, "the disk fails")
        return fill(source, block, view)

    with (
        LocalHosts(2, settings, namespaces=False) as hosts,
        remotemount(hosts, large, f"{workplace}/{{host}}", settings=settings) as mount,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Source, "fill", broken)
            with pytest.raises(TransferError, match="did not arrive"):
                mount.wait(60)
            first = Path(mount.mntpoints["host0"], "one")
            with pytest.raises(OSError, match="Input/output"):
                first.read_bytes()
        time.sleep(RETRY_AFTER)
        assert first.read_bytes() == (large / "one").read_bytes()
        assert not mount.refresh(), "nothing changed"
        mount.wait(60)
        assert all(found["held"] == 10 << 20 for found in mount.status().values())
        for path in mount.mntpoints.values():
            _same(large, path)


def test_a_delivery_that_fails_by_itself_is_no_success(
    large: Path, workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("this must not happen")

    with LocalHosts(1, settings, namespaces=False) as hosts:
        mount = remotemount(hosts, large, f"{workplace}/{{host}}", settings=settings)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(Delivery, "fetch", fail)
                mount.open()
                with pytest.raises(ValueError, match="must not happen"):
                    mount.wait(60)
            assert not mount.refresh()
            mount.wait(60)
            _same(large, mount.mntpoints["host0"])
        finally:
            mount.close(force=True)


LOSING = """
import os, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path
import psutil
from wheelmount import config, remotemount
from wheelmount.errors import WheelmountError
from wheelmount.hosts.local import LocalHosts
source, place, how, victim = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
settings = replace(config.load(), block_size=256 << 10, fetch_timeout=3, read_timeout=30)
with LocalHosts(4, settings, namespaces=False) as hosts:
    mount = remotemount(hosts, source, f"{place}/{{host}}", settings=settings)
    mount.open()
    pid = hosts.pids[victim]
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    family = [each for each in family if "wheelmount.mount.serve.server" not in each.cmdline()]
    for process in family:
        process.send_signal(getattr(signal, how))
    started = time.monotonic()
    for number in range(4):
        if number != victim:
            subprocess.run(["diff", "-r", source, f"{place}/host{number}"], check=True)
    try:
        mount.wait(60)
    except WheelmountError as error:
        assert f"host{victim}" in error.message, error.message
    else:
        raise AssertionError("nobody missed the host")
    for process in family:
        if process.is_running():
            process.kill()
    mount.close(force=True)
"""


@pytest.mark.costly
@pytest.mark.parametrize(("how", "victim"), [("SIGKILL", 0), ("SIGTERM", 3), ("SIGSTOP", 1)])
def test_a_host_that_is_lost_costs_the_others_nothing(
    large: Path, workplace: Path, how: str, victim: int
) -> None:
    for number in range(6):
        (large / f"file{number}").write_bytes(os.urandom(16 << 20))
    # In a process of its own: Monarch in a client that lost a host may take no new ones.
    code = [sys.executable, "-c", LOSING, str(large), str(workplace), how, str(victim)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
