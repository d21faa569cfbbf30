"""A mount that follows its directory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Cli, mounts_shown, shorter_than_its_size
from tests.mount.conformance import assert_same, await_last
from tests.mount.test_server import Served
from wheelmount.config import MEMORY, Settings
from wheelmount.errors import MountError, SourceError, WheelmountError
from wheelmount.hosts import runtime
from wheelmount.hosts.local import LocalHosts
from wheelmount.lock import try_lock
from wheelmount.mount.client.delivery import Delivery
from wheelmount.mount.client.remote import RemoteMount, remotemount
from wheelmount.mount.serve import processes
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.source import Source
from wheelmount.progress import SILENT

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]


@pytest.fixture(params=["bind", "devfuse", "pyfuse3"])
def mount(
    source: Path, workplace: Path, settings: Settings, request: pytest.FixtureRequest
) -> Iterator[RemoteMount]:
    """A mount of ``source`` on two hosts, complete."""
    settings = replace(settings, adapter=request.param, store=MEMORY)
    with LocalHosts(2, settings, namespaces=False) as hosts:
        made = remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings)
        with made:
            made.wait(30)
            yield made


def _everywhere(mount: RemoteMount, source: Path) -> None:
    store = mount._settings.private_store(mounted=True)
    await_last([store / f"{mount.identity}-{name}" for name in mount.mntpoints])
    for path in mount.mntpoints.values():
        assert_same(source, Path(path))


def _held(mount: RemoteMount) -> list[int]:
    return [status["held"] for status in mount.status().values()]


@pytest.mark.costly
def test_all_kinds_of_change_arrive(
    mount: RemoteMount, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _everywhere(mount, source)
    (source / "page").write_bytes(b"Q" * 4096)  # an edit, of the same size
    os.utime(source / "page", ns=(1, 1_234_567_890_123_456_789))  # and with the same mtime
    (source / "odd").write_bytes(b"short")
    (source / "new").write_text("new\n")
    (source / "package" / "small1").unlink()
    (source / "package" / "small2").rename(source / "package" / "renamed")
    (source / "package" / "sub").rename(source / "moved")
    (source / "link").unlink()
    (source / "link").symlink_to("moved/module.py")
    (source / "hardlink").unlink()
    (source / "hardlink").hardlink_to(source / "moved" / "module.py")
    (source / "empty-file").unlink()
    (source / "empty-file").mkdir()
    (source / "empty-directory").rmdir()
    (source / "empty-directory").write_text("a file now")
    (source / "with blank").chmod(0o400)
    os.setxattr(source / "page", "user.test", b"value")
    (source / "package" / "sub").mkdir()
    (source / "package" / "sub" / "module.py").hardlink_to(source / "hardlink")
    assert mount.refresh()
    _everywhere(mount, source)
    assert [status["generation"] for status in mount.status().values()] == [2, 2]
    assert not mount.refresh(), "nothing changed since"
    (source / "new").write_text("newer\n")
    assert mount.refresh()
    _everywhere(mount, source)
    assert {s["adapter"] for s in mount.status().values()} == {mount._settings.adapter}


@pytest.mark.parametrize("adapter", ["bind", "devfuse", "pyfuse3"])
def test_extended_attributes_that_come_where_there_were_none(
    workplace: Path, settings: Settings, adapter: str
) -> None:
    """The kernel is never told that there are none at all; a file of holes has no data."""
    settings = replace(settings, adapter=adapter, store=MEMORY)
    source, shown = workplace / "plain", workplace / "host0"
    source.mkdir()
    (source / "file").touch()
    os.truncate(source / "file", 1 << 20)
    with (
        LocalHosts(1, settings, namespaces=False) as hosts,
        remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings) as mount,
    ):
        mount.wait(30)
        for path in shown, shown / "file":
            assert os.listxattr(path) == []
            with pytest.raises(OSError, match="No data available"):
                os.getxattr(path, "user.new")
        if adapter != "pyfuse3":  # it has no call for that
            descriptor = os.open(shown / "file", os.O_RDONLY)
            with pytest.raises(OSError, match="No such device or address"):
                os.lseek(descriptor, 0, os.SEEK_DATA)
            os.close(descriptor)
        for path in source, source / "file":
            os.setxattr(path, "user.new", b"value")
        assert mount.refresh()
        for path in shown, shown / "file":
            assert os.listxattr(path) == ["user.new"]
            assert os.getxattr(path, "user.new") == b"value"


def test_open_files_keep_their_bytes_and_are_freed_when_closed(
    mount: RemoteMount, source: Path, workplace: Path
) -> None:
    (source / "large").write_bytes(b"1" * (8 << 20))
    assert mount.refresh()
    with (workplace / "host0" / "large").open("rb") as file:
        assert file.read(1) == b"1"
        (source / "large").unlink()
        assert mount.refresh()
        assert not (workplace / "host0" / "large").exists()
        assert file.read() == b"1" * ((8 << 20) - 1)
        assert os.fstat(file.fileno()).st_size == 8 << 20
    store = mount._settings.private_store(mounted=True) / f"{mount.identity}-host0"
    deadline = time.monotonic() + 60
    while _used(store) > 4 << 20 and time.monotonic() < deadline:
        os.listdir(workplace / "host0")
        time.sleep(0.1)
    assert _used(store) < 4 << 20, "the memory of the dropped file was not freed"


def _used(store: Path) -> int:
    usage = os.statvfs(store)
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


@pytest.mark.costly
def test_only_changed_bytes_travel(
    mount: RemoteMount, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "large").write_bytes(os.urandom(4 << 20))
    assert mount.refresh()
    travelled: list[int] = []
    monkeypatch.setattr(Delivery, "arrived", lambda _self, _host, length: travelled.append(length))
    (source / "large").chmod(0o600)
    (source / "large").rename(source / "package" / "renamed")
    (source / "new").write_text("new\n")
    assert mount.refresh()
    _everywhere(mount, source)
    assert sum(travelled) == 2 * len("new\n")


READER = """
import os, sys
place = sys.argv[1]
seen = 0
while seen < 14:
    first = int(open(f"{place}/a/first").read())
    second = int(open(f"{place}/b/second").read())
    names = os.listdir(f"{place}/names")
    assert seen <= first <= second, (seen, first, second)
    assert f"{second}" in names or int(max(names, key=int)) > second, (second, names)
    seen = second
"""


@pytest.mark.costly
def test_a_reader_never_sees_the_new_and_then_the_old(
    mount: RemoteMount, source: Path, workplace: Path
) -> None:
    def generation(number: int) -> None:
        for name in ("a/first", "b/second"):
            (source / name).write_text(f"{number}")
        (source / "names" / f"{number}").touch()
        if number:
            (source / "names" / f"{number - 1}").unlink()

    for name in ("a", "b", "names"):
        (source / name).mkdir()
    generation(0)
    mount.refresh()
    readers = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", READER, workplace / f"host{n % 2}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    for number in range(1, 15):
        generation(number)
        mount.refresh()
    for reader in readers:
        errors = reader.communicate(timeout=30)[1]
        assert (reader.returncode, errors) == (0, "")


def test_a_directory_that_is_gone_changes_nothing(
    mount: RemoteMount, source: Path, workplace: Path
) -> None:
    source.rename(workplace / "away")
    with pytest.raises(SourceError, match="there is no directory"):
        mount.refresh()
    _everywhere(mount, workplace / "away")


@pytest.mark.costly
@pytest.mark.parametrize("adapter", ["bind", "devfuse"])
def test_two_clients_refresh_one_mount(
    source: Path,
    workplace: Path,
    settings: Settings,
    cli: Cli,
    adapter: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WHEELMOUNT_ADAPTER", adapter)
    settings = replace(settings, adapter=adapter)
    shown = workplace / "w" / "page"
    with LocalHosts(1, settings, namespaces=False) as hosts:
        with remotemount(hosts, source, f"{workplace}/w", settings=settings) as mount:
            mount.wait(30)
            for number in (1, 3):
                (source / "page").write_text(f"{number}")
                (source / f"new{number}").touch()
                assert cli("refresh", source).returncode == 0
                assert shown.read_text() == f"{number}"
                (source / "page").write_text(f"{number + 1}")
                assert mount.refresh()
                assert shown.read_text() == f"{number + 1}"
            (source / "page").write_text("5")
            assert cli("refresh", source).returncode == 0
            (source / "page").write_text("4")
            assert mount.refresh(), "not what this client had shown last"
            assert shown.read_text() == "4"
            assert len(mounts_shown(cli)) == 1
        assert mounts_shown(cli) == []


def test_what_was_torn_is_mended(source: Path, workplace: Path, settings: Settings) -> None:
    with LocalHosts(1, settings, namespaces=False) as hosts:
        made = remotemount(hosts, source, f"{workplace}/w", settings=settings)
        with made:
            made.wait(30)
            (source / "big").write_bytes(os.urandom(32 << 20))
            (source / "zlast").write_bytes(b"old")
        made = remotemount(hosts, source, f"{workplace}/w", settings=settings)
        made.open()
        try:
            (source / "zlast").write_bytes(b"new")
            made.wait(30)
            (status,) = made.status().values()
            if status["changed"]:
                assert status["adapter"] != "bind"
            made.refresh()
            (status,) = made.status().values()
            assert not status["changed"]
            assert status["adapter"] == "bind"
            _everywhere(made, source)
        finally:
            made.close(force=True)


def test_what_a_refresh_that_was_cut_short_left_does_not_hinder_the_next(
    mount: RemoteMount, source: Path
) -> None:
    for name in mount.mntpoints:
        store = mount._settings.private_store(mounted=True) / f"{mount.identity}-{name}"
        (store / "2").mkdir()
        (store / "2" / "page").touch()
        (store / "2.have").touch()
    (source / "page").write_text("new")
    assert mount.refresh()
    _everywhere(mount, source)


def test_a_refresh_that_fails_late_leaves_that_of_the_next_client_alone(
    source: Path, workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both clients use the same agents, as those of a session do."""
    sources: list[Source] = []
    begun, goes_on = threading.Event(), threading.Event()
    fill, edited = Source.fill, Source.edited
    failed: list[WheelmountError] = []

    def slow(reading: Source, block: int, view: memoryview) -> tuple[bytes, tuple[int, ...]]:
        if not sources:
            sources.append(reading)
            begun.set()
        if reading is sources[0]:
            assert goes_on.wait(60)
        return fill(reading, block, view)

    def after_the_first(reading: Source) -> list[bytes]:
        goes_on.set()  # by the second client, which has all bytes on the hosts
        first.join(60)
        return edited(reading)

    def refresh() -> None:
        with pytest.raises(WheelmountError) as error:
            mount.refresh()
        failed.append(error.value)

    first = threading.Thread(target=refresh)
    with LocalHosts(1, settings, namespaces=False) as hosts:
        mount = remotemount(hosts, source, f"{workplace}/w", settings=settings)
        with mount:
            mount.wait(30)
            next_ = RemoteMount(hosts, source, None, settings, SILENT, identity=mount.identity)
            next_.adopt(mount.handles)
            (source / "new").write_text("new")
            monkeypatch.setattr(Source, "fill", slow)
            monkeypatch.setattr(Source, "edited", after_the_first)
            first.start()
            assert begun.wait(60)
            assert next_.refresh()
            assert len(failed) == 1
            assert (workplace / "w" / "new").read_text() == "new"


def test_a_refresh_waits_while_a_store_is_trimmed(mount: RemoteMount, source: Path) -> None:
    (source / "new").touch()
    for name in mount.mntpoints:
        store = mount._settings.private_store(mounted=True) / f"{mount.identity}-{name}"
        lock = try_lock(store / "lock")
        assert lock is not None
        threading.Timer(1, os.close, [lock]).start()
    assert mount.refresh()
    _everywhere(mount, source)


@pytest.mark.costly
@pytest.mark.parametrize("command", ["verify", "refresh"])
def test_a_command_leaves_the_delivery_to_the_process_that_makes_the_mount(
    source: Path,
    workplace: Path,
    settings: Settings,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    settings = replace(settings, fetch_timeout=60)
    goes_on, fill = threading.Event(), Source.fill

    def slow(reading: Source, block: int, view: memoryview) -> tuple[bytes, tuple[int, ...]]:
        assert goes_on.wait(60)
        return fill(reading, block, view)

    monkeypatch.setattr(Source, "fill", slow)
    with LocalHosts(1, settings, namespaces=False) as hosts:
        mount = remotemount(hosts, source, f"{workplace}/w", settings=settings)
        with mount:
            threading.Timer(12, goes_on.set).start()  # the command's hosts have started by then
            done = cli(command, source)
            assert done.returncode == 0, done.stderr
            assert goes_on.is_set(), "the command did not wait"
            mount.wait(60)
            assert mount.sent == Layout(scan(os.fsencode(source)), settings.block_size).size
            assert_same(source, workplace / "w")


def test_a_host_that_prepared_nothing_does_not_say_that_it_changed_over(
    source: Path, workplace: Path, settings: Settings
) -> None:
    with LocalHosts(1, settings, namespaces=False) as hosts:
        mount = remotemount(hosts, source, f"{workplace}/w", settings=settings)
        with mount:
            mount.wait(30)
            calls = {n: agent.advance.call_one(b"tree") for n, agent in mount.handles.items()}
            with pytest.raises(MountError, match="gone"):
                runtime.raise_first(runtime.gather(calls, 30))


@pytest.mark.parametrize("by", ["command", "client"])
def test_what_arrived_but_was_not_finished_is_finished_by_the_next_client(
    source: Path, workplace: Path, settings: Settings, cli: Cli, by: str
) -> None:
    """Its client and agents were killed after the last block, before the last names and modes."""
    served = Served(source, workplace, settings, "bind")
    try:
        served.feed(keep=True)
        for block in range(served.layout.blocks):
            served.arrive(block)
        assert served.feeder is not None
        served.feeder.close()
        while processes.status(served.directory)["fed"]:
            time.sleep(0.01)
        (source / "new").touch()
        if by == "command":
            done = cli("refresh", source)
            assert (done.returncode, "refreshed" in done.stdout) == (0, True), done.stderr
        else:
            with LocalHosts(1, settings, namespaces=False) as hosts:
                mount = RemoteMount(hosts, source, None, settings, SILENT, identity="test")
                mount.adopt()
                assert mount.refresh()
                mount.release()
        assert processes.status(served.directory)["adapter"] == "bind"
        await_last([served.store.directory])
        assert_same(source, served.mount)
    finally:
        served.end()


@pytest.fixture
def unreadable(source: Path) -> Iterator[Path]:
    """A file of ``source`` that nobody can read as far as its size."""
    file = source / "package" / "unreadable"
    with shorter_than_its_size(file):
        yield file


def test_a_refresh_follows_with_all_but_the_files_that_cannot_be_read(
    source: Path, workplace: Path, settings: Settings, unreadable: Path, cli: Cli
) -> None:
    with LocalHosts(1, settings, namespaces=False) as hosts:
        mount = remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings)
        with mount:
            mount.wait(30)
            assert mount.unreadable == ["package/unreadable"]
            assert not mount.refresh(), "it still cannot be read, which is no change"
            for text in ("one", "two"):
                (source / "new").write_text(text)
                assert mount.refresh()
                assert (workplace / "host0" / "new").read_text() == text
                assert mount.unreadable == ["package/unreadable"]
                with pytest.raises(OSError, match="Input/output error"):
                    (workplace / "host0" / "package" / "unreadable").read_bytes()
            (source / "new").write_text("three")
            for word in ("refreshed", "unchanged"):
                done = cli("refresh", source)
                assert done.returncode == 74
                assert word in done.stdout
                assert "package/unreadable" in done.stderr
            assert (workplace / "host0" / "new").read_text() == "three"


@pytest.mark.costly
def test_the_kernel_alone_shows_no_bytes_of_files_that_cannot_be_read(
    mount: RemoteMount, source: Path, workplace: Path
) -> None:
    """As above, of a mount that had none before: under ``bind`` the kernel shows it alone."""
    shown = workplace / "host0" / "package" / "late"
    late = source / "package" / "late"
    late.write_text("whole")
    assert mount.refresh()
    late.unlink()
    with shorter_than_its_size(late):
        for text in ("one", "two"):
            (source / "new").write_text(text)
            assert mount.refresh()
            assert (workplace / "host1" / "new").read_text() == text
            assert mount.unreadable == ["package/late"]
            ways = {status["adapter"] for status in mount.status().values()}
            assert ways == {mount._settings.adapter}, "it stays shown as it was"
            with pytest.raises(OSError, match=r"Input/output error|No such device or address"):
                shown.read_bytes()
        assert mount.verify()["host0"].wrong == []
    late.write_text("whole again")
    assert mount.refresh()
    assert mount.unreadable == []
    assert shown.read_text() == "whole again"
    _everywhere(mount, source)
    assert {s["adapter"] for s in mount.status().values()} == {mount._settings.adapter}


@pytest.mark.costly
def test_memory_of_the_client_stays_as_it_is(source: Path, workplace: Path) -> None:
    """Monarch keeps 225 KiB of each actor that has ended, and 45 of each read without a device."""
    code = """
import sys
from pathlib import Path
import psutil
from wheelmount import remotemount
from wheelmount.hosts.local import LocalHosts
process, rounds, source = psutil.Process(), 60, Path(sys.argv[1])
with LocalHosts(1) as hosts, remotemount(hosts, source, sys.argv[2]) as mount:
    mount.wait(60)
    for number in range(2 * rounds):
        if number == rounds:
            resident, descriptors = process.memory_info().rss, process.num_fds()
        (source / "odd").write_text(f"{number}")
        mount.refresh()
    print((process.memory_info().rss - resident) / rounds)
    print((process.num_fds() - descriptors) / rounds)
"""
    # In a process of its own: what other tests left in this one takes and gives memory too.
    command = [sys.executable, "-c", code, str(source), f"{workplace}/{{host}}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    resident, descriptors = map(float, done.stdout.split())
    assert resident < 40 << 10
    assert descriptors < 0.5
