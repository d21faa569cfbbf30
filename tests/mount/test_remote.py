"""``remotemount`` on real hosts: Monarch processes, RDMA buffers, serving processes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.mount.conformance import assert_read_only, assert_same
from wheelmount import remotemount
from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError, MountError, SourceError, StoreError, WaitError
from wheelmount.hosts import runtime
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client.delivery import Delivery
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.mount.kernel import points
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.server import FEED_TIMEOUT
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.tree import Tree

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]


@pytest.fixture
def hosts(settings: Settings) -> Iterator[LocalHosts]:
    with LocalHosts(2, settings, namespaces=False) as made:
        yield made


def test_brings_the_tree_to_every_host(
    hosts: LocalHosts, source: Path, workplace: Path, settings: Settings
) -> None:
    where = str(workplace / "w-{host}")
    served = replace(settings, adapter="devfuse")  # it is compared while it arrives
    with remotemount(hosts, source, where, settings=served) as mount:
        for name in ("host0", "host1"):
            assert mount.mntpoints[name] == str(workplace / f"w-{name}")
            assert_same(source, workplace / f"w-{name}")
            assert_read_only(workplace / f"w-{name}")
        mount.wait(30)
        status = mount.status()
        assert all(found["held"] == found["size"] > 0 for found in status.values())
    assert not (workplace / "w-host0").exists()


def test_a_directory_that_is_made_while_agents_start(
    hosts: LocalHosts, workplace: Path, settings: Settings
) -> None:
    source, where = workplace / "made", workplace / "w-{host}"

    def make() -> Tree:
        source.mkdir()
        (source / "known").write_text("bytes")
        tree = scan(os.fsencode(source))
        (source / "later").touch()
        return tree

    mount = remotemount(hosts, source, str(where), settings=settings)
    mount.make = make
    with mount:
        mount.wait(30)
        shown = Path(mount.mntpoints["host1"])
        assert [path.name for path in shown.iterdir()] == ["known"], "it is not scanned again"
        assert (shown / "known").read_text() == "bytes"
        mount.refresh()
        assert {path.name for path in shown.iterdir()} == {"known", "later"}
    again = remotemount(hosts, source, str(where), settings=settings)
    again.make = make
    with pytest.raises(FileExistsError), again:
        pass
    assert not (workplace / "w-host0").exists()


def test_a_path_that_hosts_share_gets_their_names(
    hosts: LocalHosts, source: Path, workplace: Path, settings: Settings
) -> None:
    with remotemount(hosts, source, str(workplace / "w"), settings=settings) as mount:
        assert list(mount.mntpoints.values()) == [f"{workplace}/w-host0", f"{workplace}/w-host1"]


@pytest.mark.costly
def test_files_beyond_2_gib_arrive(workplace: Path, settings: Settings) -> None:
    source = workplace / "big"
    source.mkdir()
    with (source / "file").open("wb") as file:
        for offset in (0, (1 << 31) - 5, (1 << 31) + 12345):
            file.seek(offset)
            file.write(b"here I am!!")
    settings = replace(settings, block_size=8 << 20)
    with (
        LocalHosts(1, settings, namespaces=False) as hosts,
        remotemount(hosts, source, str(workplace / "w"), settings=settings) as mount,
    ):
        with (workplace / "w" / "file").open("rb") as file:
            for offset in ((1 << 31) + 12345, 0, (1 << 31) - 5):
                file.seek(offset)
                assert file.read(11) == b"here I am!!"
        assert (workplace / "w" / "file").stat().st_size == (source / "file").stat().st_size
        mount.wait(60)
        same = subprocess.run(["cmp", source / "file", workplace / "w" / "file"], check=False)
        assert same.returncode == 0


def test_an_empty_directory_can_be_mounted(
    hosts: LocalHosts, workplace: Path, settings: Settings
) -> None:
    (workplace / "nothing").mkdir()
    with remotemount(hosts, workplace / "nothing", f"{workplace}/{{host}}", settings=settings) as m:
        m.wait(20)
        assert os.listdir(workplace / "host0") == []


def test_a_monarch_host_mesh_will_do(source: Path, workplace: Path, settings: Settings) -> None:
    from monarch.actor import this_host

    with remotemount(this_host(), source, str(workplace / "w"), settings=settings) as mount:
        mount.wait(30)
        assert_same(source, workplace / "w")


def test_a_file_edited_during_the_copy_is_never_torn(
    hosts: LocalHosts, workplace: Path, settings: Settings
) -> None:
    source = workplace / "edited"
    source.mkdir()
    (source / "a-first").write_bytes(os.urandom(64 << 20))
    (source / "z-last").write_bytes(b"old" * 100_000)
    mount = remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings)
    mount.open()
    try:
        (source / "z-last").write_bytes(b"new" * 100_000)
        mount.wait(60)
        for name, status in mount.status().items():
            try:
                found = (workplace / name / "z-last").read_bytes()
            except OSError as error:
                assert error.errno == errno.EIO
                assert status["changed"] == ["z-last"]
            else:
                assert found == b"old" * 100_000
                assert status["changed"] == []
            first = (workplace / name / "a-first").read_bytes()
            assert first == (source / "a-first").read_bytes()
    finally:
        mount.close(force=True)


def test_files_that_hosts_cannot_read_are_named(
    hosts: LocalHosts,
    source: Path,
    workplace: Path,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scanned, deliver = threading.Event(), Delivery.deliver

    def deliver_then(*arguments: Any) -> None:
        scanned.wait(30)
        deliver(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Delivery, "deliver", deliver_then)
        mount = remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings)
        with mount:
            (source / "odd").write_bytes(b"edited")
            (source / "page").unlink()
            scanned.set()
            mount.wait(60)
            assert mount.unreadable == ["odd", "page"]
            assert "2 files of" in caplog.text
            assert "odd, page" in caplog.text
            assert mount.refresh()
            assert mount.unreadable == []
            assert (workplace / "host1" / "odd").read_bytes() == b"edited"


def _suspended(*processes: psutil.Process) -> contextlib.ExitStack:
    resuming = contextlib.ExitStack()
    for process in processes:
        process.suspend()
        resuming.callback(process.resume)
    return resuming


def test_a_host_that_does_not_end_is_named_and_can_be_ended_later(
    hosts: LocalHosts, source: Path, workplace: Path, settings: Settings
) -> None:
    settings = replace(settings, start_timeout=4)
    mount = remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings)
    mount.open()
    mount.wait(60)
    status = mount.status()["host1"]
    with (
        _suspended(*(psutil.Process(status[key]) for key in ("pid", "server"))),
        pytest.raises(WaitError, match="host1: no answer"),
    ):
        mount.close()
    assert points.mounted(f"{workplace}/host0") is None
    mount.close()
    assert points.mounted(f"{workplace}/host1") is None


@pytest.mark.costly
def test_a_host_that_does_nothing_may_keep_its_mount(
    source: Path, workplace: Path, settings: Settings
) -> None:
    """Monarch says that it died, but its memory may only be swapped out."""
    settings = replace(settings, start_timeout=8)
    with LocalHosts(2, settings, namespaces=False) as hosts:
        mount = remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings)
        mount.open()
        mount.wait(60)
        host = psutil.Process(hosts.pids[1])
        with (
            _suspended(host, *host.children(recursive=True)),
            pytest.raises((HostError, WaitError), match="host1: ") as caught,
        ):
            mount.close()
        assert "the mount may stay there" in str(caught.value.hint)
        assert points.mounted(f"{workplace}/host0") is None
        assert points.mounted(f"{workplace}/host1") is not None
        mount.close()


CLIENT = """
import sys
from wheelmount import remotemount
from wheelmount.hosts.local import LocalHosts
hosts = LocalHosts(2, namespaces=False)
hosts.start()
mount = remotemount(hosts, sys.argv[1], sys.argv[2])
mount.open()
print("stands", flush=True)
sys.stdin.read()
"""


def test_a_killed_client_leaves_nothing(source: Path, workplace: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, source, f"{workplace}/{{host}}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"stands\n"
        assert points.mounted(str(workplace / "host0"))
        os.killpg(client.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    left = [str(workplace / name) for name in ("host0", "host1")]
    while (left := [path for path in left if points.mounted(path)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    # the fixture sees that no process and no file stays


def test_an_agent_finds_a_serving_process_that_took_long_to_take_over(
    source: Path, workplace: Path, settings: Settings
) -> None:
    settings = replace(settings, adapter="devfuse")
    with (
        LocalHosts(1, settings, namespaces=False) as hosts,
        remotemount(hosts, source, f"{workplace}/w", settings=settings) as mount,
    ):
        mount.wait(30)
        (status,) = mount.status().values()
        os.kill(status["pid"], signal.SIGSTOP)  # it starts the next when it goes on
        os.kill(status["server"], signal.SIGKILL)
        time.sleep(7)
        os.kill(status["pid"], signal.SIGCONT)
        (directory,) = processes.find(settings)
        fed, deadline = False, time.monotonic() + FEED_TIMEOUT
        while not fed and time.monotonic() < deadline:
            time.sleep(0.1)
            with contextlib.suppress(MountError):  # it does not listen yet
                fed = processes.status(directory)["fed"]
        assert fed, "it would unmount, as if the client had ended"
        assert (workplace / "w" / ".hidden").read_text() == "hidden\n"


@pytest.fixture
def held(
    hosts: LocalHosts,
    source: Path,
    workplace: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[RemoteMount]:
    """A mount to which nothing is delivered by itself."""
    monkeypatch.setattr(Delivery, "deliver", lambda *_: None)
    with remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings) as mount:
        yield mount


def test_a_busy_mount_is_not_taken_down_unasked(
    hosts: LocalHosts, source: Path, workplace: Path, settings: Settings
) -> None:
    mount = remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings)
    mount.open()
    mount.wait(30)
    holder = subprocess.Popen(["sleep", "60"], cwd=workplace / "host1")
    try:
        with pytest.raises(MountError, match=r"busy: in use by sleep"):
            mount.close()
    finally:
        holder.kill()
        holder.wait()
        mount.close()
    assert not (workplace / "host1").exists()


def test_a_working_directory_in_a_mount_stays_what_it_is(
    hosts: LocalHosts,
    source: Path,
    workplace: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, deliver = threading.Event(), Delivery.deliver

    def deliver_then(*arguments: Any) -> None:
        entered.wait(30)
        deliver(*arguments)

    monkeypatch.setattr(Delivery, "deliver", deliver_then)
    look = "print(flush=True); sys.stdin.readline(); print(os.getcwd()); print(os.listdir())"
    path = workplace / "host0"
    with remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings) as mount:
        command = [sys.executable, "-c", f"import os, sys; {look}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, cwd=path, **pipes) as process:  # type: ignore[call-overload]
            process.stdout.readline()
            entered.set()
            mount.wait(30)
            out, _ = process.communicate("\n", timeout=30)
        assert out.startswith(f"{path}\n")
        assert "blocks" in out


def test_a_mount_that_was_too_busy_to_be_taken_down_is_shown_by_the_kernel_in_the_end(
    held: RemoteMount, workplace: Path
) -> None:
    agent, path = held.handles["host0"], workplace / "host0"
    holder = subprocess.Popen(["sleep", "60"], cwd=path)
    try:
        runtime.one(agent.deliver.call_one(), 30)
        assert held.status()["host0"]["adapter"] == "devfuse", "for it is a working directory"
        with pytest.raises(MountError, match="in use by sleep"):
            runtime.one(agent.close.call_one(False), 30)
    finally:
        holder.kill()
        holder.wait()
    deadline = time.monotonic() + 20
    while held.status()["host0"]["adapter"] != "bind" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert held.status()["host0"]["adapter"] == "bind"


def test_two_mounts_on_the_same_hosts(
    hosts: LocalHosts, source: Path, workplace: Path, settings: Settings
) -> None:
    with (
        remotemount(hosts, source, f"{workplace}/a-{{host}}", settings=settings) as first,
        remotemount(hosts, source / "package", f"{workplace}/b-{{host}}", settings=settings) as two,
    ):
        first.wait(30)
        two.wait(30)
        assert (workplace / "b-host1" / "small7").read_text() == "7\n"
        assert_same(source, workplace / "a-host0")


def test_opened_from_another_thread(
    hosts: LocalHosts, source: Path, workplace: Path, settings: Settings
) -> None:
    found: list[str] = []

    def work() -> None:
        with remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings) as mount:
            mount.wait(30)
            found.append((workplace / "host0" / ".hidden").read_text())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == ["hidden\n"]


def test_who_mounts_on_local_hosts_sees_it(
    source: Path, workplace: Path, settings: Settings
) -> None:
    """As the README has it."""
    with (
        LocalHosts(2, settings) as hosts,
        remotemount(hosts, source, f"{workplace}/w-{{host}}", settings=settings) as mount,
    ):
        mount.wait(30)  # files have other numbers when the kernel shows them by itself
        for host in ("host0", "host1"):
            assert_same(source, Path(mount.mntpoints[host]))


def test_each_host_has_the_same_path_in_a_namespace(
    source: Path, workplace: Path, settings: Settings
) -> None:
    with LocalHosts(2, settings, namespaces=True) as hosts:
        assert hosts.namespaces, "this machine is expected to allow mount namespaces"
        with remotemount(hosts, source, settings=settings) as mount:
            assert set(mount.mntpoints.values()) == {str(source)}
            assert points.mounted(str(source)) is None, "the caller must not see it"
            mount.wait(30)  # files have other numbers when the kernel shows them by itself
            namespaces = set()
            for status in mount.status().values():
                root = Path(f"/proc/{status['pid']}/root")
                assert_same(source, Path(f"{root}{source}"))
                namespaces.add(status["namespace"])
            assert len(namespaces) == 2


def test_hiding_the_source_is_refused(source: Path, workplace: Path, settings: Settings) -> None:
    with LocalHosts(1, settings, namespaces=False) as hosts:
        with pytest.raises(InputError, match="hide its own source"):
            remotemount(hosts, source, settings=settings).open()
        with pytest.raises(InputError, match="hide its own source"):
            remotemount(hosts, source, str(workplace), settings=settings).open()


@pytest.mark.costly
def test_bad_mount_points_are_refused_and_nothing_stays(
    hosts: LocalHosts, source: Path, workplace: Path, settings: Settings
) -> None:
    (workplace / "full-host1").mkdir()
    (workplace / "full-host1" / "file").touch()
    with pytest.raises(MountError, match=r"host1: .*full-host1 is not empty") as error:
        remotemount(hosts, source, f"{workplace}/full-{{host}}", settings=settings).open()
    assert error.value.hint
    assert not points.mounted(f"{workplace}/full-host0"), "the other host must be taken down again"
    with (
        remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings),
        pytest.raises(MountError, match=r"something is mounted at .* already"),
    ):
        remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings).open()
    (workplace / "file").touch()
    with pytest.raises(MountError, match="cannot make the mount point"):
        remotemount(hosts, source, f"{workplace}/file/{{host}}", settings=settings).open()
    with pytest.raises(InputError, match="relative"):
        remotemount(hosts, source, "w-{host}", settings=settings).open()
    with pytest.raises(SourceError, match="no directory"):
        remotemount(hosts, workplace / "missing", f"{workplace}/{{host}}", settings=settings).open()


def test_a_host_without_room_says_so(source: Path, workplace: Path, settings: Settings) -> None:
    small = workplace / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], check=True)
    try:
        settings = replace(settings, store=str(small))
        with (
            LocalHosts(1, settings, namespaces=False) as hosts,
            pytest.raises(StoreError, match="do not fit") as error,
        ):
            remotemount(hosts, source, str(workplace / "w"), settings=settings).open()
        assert "WHEELMOUNT_STORE" in str(error.value.hint)
        assert list((small / f"wheelmount-{os.getuid()}").iterdir()) == []
        assert not (workplace / "w").exists(), "the mount point goes with it"
    finally:
        subprocess.run(["umount", small], check=True)


def test_memory_that_runs_out_on_the_way_is_an_error_not_a_crash(
    workplace: Path, settings: Settings
) -> None:
    source = workplace / "large"
    source.mkdir()
    (source / "file").write_bytes(os.urandom(24 << 20))
    small = workplace / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", small], check=True)
    try:
        settings = replace(settings, store=str(small))
        with LocalHosts(1, settings, namespaces=False) as hosts:
            mount = remotemount(hosts, source, str(workplace / "w"), settings=settings)
            # Somebody else takes the room between the check and the delivery.
            (small / "other").write_bytes(bytes(20 << 20))
            with pytest.raises(StoreError, match="do not fit"):
                mount.open()
            (small / "other").write_bytes(bytes(4 << 20))
            mount.open()
            (small / "other").write_bytes(bytes(7 << 20))
            mount.close(force=True)
    finally:
        subprocess.run(["umount", "-l", small], check=True)
