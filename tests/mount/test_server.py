"""The serving process: a real mount, fed by hand."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mount.conformance import assert_read_only, assert_same
from tests.test_logs import await_small
from wheelmount import logs
from wheelmount.config import MEMORY, Settings
from wheelmount.errors import InputError, MountError
from wheelmount.mount.kernel import points
from wheelmount.mount.serve import adapters, control, processes, server
from wheelmount.mount.serve.control import Task
from wheelmount.mount.serve.server import KEPT_LOGS
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.source import Source
from wheelmount.mount.store import capacity
from wheelmount.mount.store.store import Store
from wheelmount.mount.transfer.ring import Ring

pytestmark = pytest.mark.fuse


class Served:
    """A mount of ``source`` whose blocks arrive when the test says so."""

    def __init__(
        self,
        source: Path,
        place: Path,
        settings: Settings,
        adapter: str = "devfuse",
        name: str = "test",
    ) -> None:
        self.adapter = adapter
        self.layout = Layout(scan(os.fsencode(source)), settings.block_size)
        self._source = Ring(Source(os.fsencode(source), self.layout), slots=4, lease=5)
        self.mount = place / f"mount-{name}"
        self.directory = processes.directory(settings) / f"{name}-host0"
        self.directory.mkdir()
        own = settings.store == MEMORY
        store = settings.private_store(mounted=own) / f"{name}-host0"
        set_attributes = adapter == "bind"
        self.store = Store.create(
            store, self.layout.encode(), mounted=own, set_attributes=set_attributes
        )
        made = points.prepare(str(self.mount), cover=False)
        Task(
            "host0",
            str(source),
            str(self.mount),
            str(self.store.directory),
            adapter,
            settings.read_timeout,
            made,
        ).write(self.directory)
        processes.start(self.directory, 20)
        self.feeder: socket.socket | None = None

    def arrive(self, block: int) -> None:
        staged = self._source.stage(block)
        self.store.write(block, self._source.slots[staged.slot][: staged.length])
        self._source.release(block)
        if self.feeder is not None:
            self.say({"have": block})

    def feed(self, *, keep: bool = False) -> None:
        self.feeder = socket.socket(socket.AF_UNIX)
        self.feeder.settimeout(10)
        self.feeder.connect(str(self.directory / control.SOCKET))
        self.say({"op": "feed", "keep": keep})
        while not processes.status(self.directory)["fed"]:
            time.sleep(0.01)

    def say(self, message: control.Message) -> None:
        assert self.feeder is not None
        self.feeder.sendall(control.encode(message))

    def wanted(self) -> int:
        assert self.feeder is not None
        with self.feeder.makefile("rb") as lines:
            want: int = json.loads(lines.readline())["want"]
        return want

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def end(self) -> None:
        if self.feeder is not None:
            self.feeder.close()
        processes.stop(self.directory, force=True)


@pytest.fixture(params=["devfuse", "pyfuse3"])
def served(
    source: Path, workplace: Path, settings: Settings, request: pytest.FixtureRequest
) -> Iterator[Served]:
    mount = Served(source, workplace, replace(settings, read_timeout=60), request.param)
    yield mount
    mount.end()


@pytest.fixture(params=["devfuse", "pyfuse3"])
def impatient(
    source: Path, workplace: Path, settings: Settings, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """A mount whose reads wait for a second only."""
    mount = Served(source, workplace, replace(settings, read_timeout=1.0), request.param)
    yield mount
    mount.end()


def _arrive_all(served: Served) -> None:
    for block in range(served.layout.blocks):
        served.arrive(block)


def _await_end(served: Served, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while served.directory.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not served.directory.exists()


def _number(served: Served, path: bytes) -> int:
    return next(n for n, i in served.layout.tree.inodes.items() if i.path == path)


def test_shows_the_tree(served: Served, source: Path) -> None:
    _arrive_all(served)
    assert_same(source, served.mount)


def test_is_read_only(served: Served) -> None:
    assert_read_only(served.mount)


def test_names_are_there_before_any_byte(served: Served, source: Path) -> None:
    names = sorted(p.relative_to(served.mount) for p in served.mount.rglob("*"))
    assert names == sorted(p.relative_to(source) for p in source.rglob("*"))
    assert (served.mount / "odd").stat().st_size == 100_001
    assert (served.mount / "empty-file").read_bytes() == b""


def test_mmap_shows_the_bytes(served: Served, source: Path) -> None:
    _arrive_all(served)
    with (
        (served.mount / "odd").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert mapped[:] == (source / "odd").read_bytes()


def test_a_read_waits_for_its_own_bytes_only(served: Served, source: Path) -> None:
    served.feed()
    reader = subprocess.Popen(["cat", served.mount / "page"], stdout=subprocess.PIPE)
    served.arrive(served.wanted())
    assert reader.communicate(timeout=60)[0] == (source / "page").read_bytes()
    assert len(served.store.missing()) == served.layout.blocks - 1


def test_readers_of_one_block_want_it_once(served: Served) -> None:
    served.feed()
    readers = [subprocess.Popen(["cat", served.mount / "page"], stdout=-3) for _ in range(5)]
    block = served.wanted()
    time.sleep(0.2)
    served.arrive(block)
    assert [reader.wait(60) for reader in readers] == [0] * 5
    assert served.feeder is not None
    served.feeder.settimeout(0.2)
    with pytest.raises(TimeoutError):
        served.feeder.recv(1)


def test_waiting_is_bounded_and_the_reason_logged(impatient: Served) -> None:
    impatient.feed()
    started = time.monotonic()
    with pytest.raises(OSError) as error:
        (impatient.mount / "page").read_bytes()
    assert error.value.errno == errno.EIO
    assert time.monotonic() - started < 30
    assert "cannot read page: its bytes did not come within 1 s" in impatient.log()


def test_a_block_that_failed_is_an_error_at_once(impatient: Served) -> None:
    impatient.feed()
    answer = threading.Thread(
        target=lambda: impatient.say({"failed": impatient.wanted(), "reason": "its hash was wrong"})
    )
    answer.start()
    with pytest.raises(OSError) as error:
        (impatient.mount / "page").read_bytes()
    answer.join()
    assert error.value.errno == errno.EIO
    assert "its hash was wrong" in impatient.log()


def test_without_a_client_missing_bytes_fail_and_held_ones_are_read(
    served: Served, source: Path
) -> None:
    served.feed(keep=True)
    for block in served.layout.covering(_number(served, b"page"), 0, 4096):
        served.arrive(block)
    assert served.feeder is not None
    served.feeder.close()
    served.feeder = None
    while processes.status(served.directory)["fed"]:
        time.sleep(0.01)
    assert (served.mount / "page").read_bytes() == (source / "page").read_bytes()
    blocks = _number(served, b"blocks")
    missing = [
        offset
        for offset in range(0, 256 << 10, served.layout.block_size)
        if served.store.absent(blocks, offset, offset + 1) is not None
    ]
    with (served.mount / "blocks").open("rb", buffering=0) as file:
        file.seek(missing[0])
        with pytest.raises(OSError) as error:
            file.read(1)
    assert error.value.errno == errno.EIO
    assert "when the client ended" in served.log()


def test_a_read_before_who_delivers_is_there_waits_for_it(served: Served, source: Path) -> None:
    reader = subprocess.Popen(["cat", served.mount / "page"], stdout=subprocess.PIPE)
    time.sleep(0.2)
    served.feed()
    served.arrive(served.wanted())
    assert reader.communicate(timeout=60)[0] == (source / "page").read_bytes()


def test_unmounts_when_its_client_goes_before_it_was_kept(served: Served) -> None:
    served.feed(keep=False)
    assert served.feeder is not None
    served.feeder.close()
    _await_end(served)
    assert not served.store.directory.exists()
    assert not served.mount.exists()


def test_a_killed_reader_goes_at_once(served: Served) -> None:
    served.feed()
    reader = subprocess.Popen(["cat", served.mount / "page"], stdout=subprocess.DEVNULL)
    served.wanted()
    reader.kill()
    reader.wait(30)  # long before a read is given up


@pytest.mark.parametrize("adapter", ["devfuse", "pyfuse3"])
def test_many_waiting_readers_do_not_stop_others(
    source: Path, workplace: Path, settings: Settings, adapter: str
) -> None:
    served = Served(source, workplace, replace(settings, read_timeout=20), adapter)
    try:
        served.feed()
        script = "import sys; file = open(sys.argv[1], 'rb'); print(flush=True); file.read()"
        waiting = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", script, served.mount / "package" / f"small{n}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for n in range(120)
        ]
        for reader in waiting:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"\n"
        time.sleep(1)
        assert (served.mount / "empty-directory").is_dir()
        assert os.listdir(served.mount)
        for reader in waiting:
            assert reader.poll() is None, "it was answered before others, or given up"
            reader.kill()
        if adapter == "pyfuse3":  # it has no call for interrupted reads: each lasts until answered
            _arrive_all(served)
        for reader in waiting:
            reader.communicate(timeout=60)
    finally:
        served.end()


def test_a_host_without_pyfuse3_serves_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is hidden, as the one that tests use is installed."""
    (tmp_path / "pyfuse3.py").write_text("raise ImportError('hidden')")
    command = [sys.executable, "-c", "import wheelmount.mount.serve.server"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True, timeout=60)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match="does not have the Python package pyfuse3") as error:
        adapters.choose("pyfuse3")
    assert error.value.hint is not None and "wheelmount[pyfuse3]" in error.value.hint
    assert adapters.choose("devfuse") == "devfuse"


def test_a_changed_file_is_an_error_and_named_in_the_status(served: Served) -> None:
    served.store.mark_changed(_number(served, b"page"))
    _arrive_all(served)
    with pytest.raises(OSError) as error:
        (served.mount / "page").read_bytes()
    assert error.value.errno == errno.EIO
    assert processes.status(served.directory)["changed"] == ["page"]
    assert "it changed at the source" in served.log()


def test_a_busy_mount_names_who_holds_it(served: Served) -> None:
    holder = subprocess.Popen(["sleep", "60"], cwd=served.mount)
    try:
        with pytest.raises(MountError, match=rf"busy: in use by sleep \({holder.pid}\)"):
            processes.stop(served.directory, force=False)
        assert sorted(os.listdir(served.mount))
        processes.stop(served.directory, force=True)
        assert points.mounted(str(served.mount)) is None
    finally:
        holder.kill()
        holder.wait()


def test_status_tells_where_it_stands(served: Served) -> None:
    served.arrive(0)
    status = processes.status(served.directory)
    assert status["held"] == served.layout.length(0)
    assert status["size"] == served.layout.tree.size
    assert status["adapter"] == served.adapter
    assert 0 < status["memory"] < 100 << 20
    assert status["files"] == served.layout.tree.files
    assert status["mntpoint"] == str(served.mount)


def test_what_a_killed_server_leaves_is_cleared_away(served: Served) -> None:
    os.kill(processes.status(served.directory)["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.statvfs(served.mount)
        except OSError as error:
            assert error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
            break
    points.prepare(str(served.mount), cover=False)  # as the next mount there does
    assert points.mounted(str(served.mount)) is None
    with pytest.raises(MountError, match="does not answer"):
        processes.status(served.directory)


def test_a_bad_request_does_not_end_it(served: Served) -> None:
    for line in (b"nonsense\n", b'{"op": 5}\n', b"\xff\n", b"{}\n"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(served.directory / control.SOCKET))
            connection.sendall(line)
            connection.settimeout(5)
            assert connection.recv(1 << 16) == b""
    assert processes.status(served.directory)["size"] == served.layout.size


def test_ends_on_a_signal_and_leaves_nothing(served: Served) -> None:
    os.kill(processes.status(served.directory)["pid"], signal.SIGTERM)
    _await_end(served)
    assert points.mounted(str(served.mount)) is None


def test_signals_that_come_again_and_again_leave_nothing_either(served: Served) -> None:
    """As where Slurm ends all processes of a job, and their parents pass that on."""
    served.feed(keep=True)
    status = processes.status(served.directory)
    deadline = time.monotonic() + 60
    while served.directory.exists() and time.monotonic() < deadline:
        for pid in {status["pid"], status["server"]}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.002)
    assert not served.directory.exists()
    assert points.mounted(str(served.mount)) is None
    assert not served.store.directory.exists()
    assert not Path(f"{served.directory}.log").exists()


def test_a_signal_reaches_the_next_server_where_one_dies_of_it(watched: Served) -> None:
    watched.feed(keep=True)
    status = processes.status(watched.directory)
    os.kill(status["server"], signal.SIGSTOP)
    os.kill(status["pid"], signal.SIGTERM)
    os.kill(status["server"], signal.SIGKILL)
    _await_end(watched)
    assert not Path(f"{watched.directory}.log").exists()


@pytest.fixture(params=["disk", "memory"])
def bound(
    source: Path, workplace: Path, settings: Settings, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """A mount that may be shown by the kernel alone, of which half the blocks have arrived."""
    if request.param == "memory":
        settings = replace(settings, store=MEMORY)
    mount = Served(source, workplace, replace(settings, read_timeout=5), "bind")
    mount.feed(keep=True)
    for block in range(mount.layout.blocks // 2):
        mount.arrive(block)
    yield mount
    mount.end()


def _bind(served: Served) -> None:
    for block in served.store.missing():
        served.arrive(block)
    served.store.finish()
    processes.show(served.directory, 1)
    assert processes.status(served.directory)["adapter"] == "bind"


def test_once_all_is_there_the_kernel_shows_it_alone(bound: Served, source: Path) -> None:
    assert points.mounted(str(bound.mount)) == points.FILE_SYSTEM
    _bind(bound)
    assert points.mounted(str(bound.mount)) != points.FILE_SYSTEM
    assert_same(source, bound.mount)
    assert_read_only(bound.mount)
    if bound.store.owned:
        usage = os.statvfs(bound.mount)
        room = usage.f_bfree * usage.f_frsize
        assert room == bound.store.summary.holes + capacity.SLACK
    before = (bound.mount / "odd").stat()
    os.kill(processes.status(bound.directory)["pid"], signal.SIGKILL)
    assert (bound.mount / "odd").read_bytes() == (source / "odd").read_bytes()
    assert (bound.mount / "odd").stat() == before


def test_readers_do_not_notice_the_change_over(bound: Served, source: Path) -> None:
    expected = (source / "odd").read_bytes()
    _arrive_all(bound)
    with (bound.mount / "odd").open("rb") as file:
        head = file.read(1)
        directory = os.open(bound.mount, os.O_RDONLY)
        script = (
            "import sys\nn = 0\nwhile True:\n"
            "    assert len(open(sys.argv[1], 'rb').read()) == 100001\n"
            "    n += 1; print(n, flush=True)"
        )
        with subprocess.Popen(
            [sys.executable, "-S", "-c", script, bound.mount / "odd"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as reader:
            assert reader.stdout is not None
            waiting = threading.Thread(target=_bind, args=(bound,))
            waiting.start()
            waiting.join()
            for _ in range(3):
                reader.stdout.readline()
            assert reader.poll() is None
            reader.kill()
        # What was opened before stays what it was, and is still served.
        assert head + file.read() == expected
        assert sorted(os.listdir(directory)) == sorted(os.listdir(bound.mount))
        with pytest.raises(MountError, match="opened before all bytes were there"):
            processes.stop(bound.directory, force=False)
        os.close(directory)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            processes.stop(bound.directory, force=False)
        except MountError:
            time.sleep(0.05)
        else:
            break
    assert not bound.directory.exists()


def test_a_changed_file_is_never_shown_by_the_kernel_alone(bound: Served) -> None:
    bound.store.mark_changed(_number(bound, b"page"))
    for block in bound.store.missing():
        bound.arrive(block)
    bound.store.finish()
    processes.show(bound.directory, 1)
    assert processes.status(bound.directory)["adapter"] == "devfuse"
    with pytest.raises(OSError) as error:
        (bound.mount / "page").read_bytes()
    assert error.value.errno == errno.EIO


def test_unmounted_by_somebody_else_it_ends(bound: Served) -> None:
    _bind(bound)
    subprocess.run(["umount", bound.mount], check=True)
    _await_end(bound)
    assert not bound.store.directory.exists()


def test_what_a_killed_server_of_a_bound_mount_left_is_cleared(bound: Served) -> None:
    _bind(bound)
    os.kill(processes.status(bound.directory)["pid"], signal.SIGKILL)
    processes.stop(bound.directory, force=False)
    assert points.mounted(str(bound.mount)) is None
    assert not bound.store.directory.exists()
    assert not bound.directory.exists()


def test_an_agent_that_leaves_does_not_take_another_ones_readers(
    served: Served, source: Path
) -> None:
    served.feed(keep=True)
    first = served.feeder
    served.feed(keep=True)
    assert served.feeder is not None
    with subprocess.Popen(["cat", served.mount / "odd"], stdout=subprocess.PIPE) as reader:
        served.wanted()
        served.feeder.close()
        served.feeder = first
        served.wanted()
        _arrive_all(served)
        assert reader.communicate(timeout=60)[0] == (source / "odd").read_bytes()
    assert processes.status(served.directory)["fed"]


def test_a_server_that_cannot_be_killed_is_an_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one is that waits for a disk that hangs; none can be had here."""
    monkeypatch.setattr(processes, "STOP_TIMEOUT", 0.2)
    with monkeypatch.context() as patched:
        patched.setattr(processes, "_alive", lambda *_: True)
        patched.setattr(os, "killpg", lambda *_: None)
        with pytest.raises(MountError, match="was killed and does not end"):
            processes.stop(served.directory, force=True)
    _await_end(served)


def test_a_process_that_reads_no_answer_delays_no_other(
    source: Path, workplace: Path, settings: Settings
) -> None:
    for number in range(2000):
        (source / f"{number:0200}").touch()
    served = Served(source, workplace, replace(settings, read_timeout=60))
    try:
        for number, inode in served.layout.tree.inodes.items():
            if len(inode.path) == 200:
                served.store.mark_changed(number)
        served.feed(keep=True)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(served.directory / control.SOCKET))
            asking.sendall(control.encode({"op": "status"}))  # the answer exceeds the buffers
            time.sleep(0.5)
            with subprocess.Popen(["cat", served.mount / "odd"], stdout=subprocess.PIPE) as reader:
                served.wanted()
                _arrive_all(served)
                assert reader.communicate(timeout=60)[0] == (source / "odd").read_bytes()
    finally:
        served.end()


@pytest.fixture
def watched(source: Path, workplace: Path, settings: Settings) -> Iterator[Served]:
    """A mount whose server is started again when it dies."""
    mount = Served(source, workplace, settings, "devfuse")
    yield mount
    mount.end()


def _kill_server(served: Served) -> None:
    before = processes.status(served.directory)
    os.kill(before["server"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            after = processes.status(served.directory)
        except MountError:
            time.sleep(0.02)
            continue
        if after["server"] != before["server"]:
            assert after["pid"] == before["pid"]
            return
    raise AssertionError("no server took over")


def test_a_killed_server_is_replaced_and_waiting_reads_go_on(watched: Served, source: Path) -> None:
    watched.feed(keep=True)
    readers = [
        subprocess.Popen(["cat", watched.mount / name], stdout=subprocess.PIPE)
        for name in ("page", "odd", "program")
    ]
    watched.wanted()
    _kill_server(watched)
    assert watched.feeder is not None
    watched.feeder.close()
    watched.feed(keep=True)
    _arrive_all(watched)
    for reader, name in zip(readers, ("page", "odd", "program"), strict=True):
        assert reader.communicate(timeout=60)[0] == (source / name).read_bytes()
    assert_same(source, watched.mount)
    assert "by signal 9; restarting it" in watched.log()


def test_a_server_that_took_over_ends_with_its_client_all_the_same(watched: Served) -> None:
    watched.feed(keep=False)
    assert watched.feeder is not None
    os.kill(processes.status(watched.directory)["server"], signal.SIGKILL)
    watched.feeder.close()
    watched.feeder = None
    _await_end(watched)
    assert points.mounted(str(watched.mount)) is None


def test_a_server_that_dies_again_and_again_is_given_up(watched: Served) -> None:
    watched.feed(keep=True)
    for _ in range(4):
        _kill_server(watched)
    os.kill(processes.status(watched.directory)["server"], signal.SIGKILL)
    _await_end(watched)
    assert points.mounted(str(watched.mount)) is None
    log = Path(f"{watched.directory}.log")
    assert "it is not restarted" in log.read_text()
    log.unlink()


def test_a_log_of_a_mount_stays_small(watched: Served) -> None:
    watched.feed(keep=True)
    log = watched.directory / "log"
    with log.open("ab") as file:
        file.write(b"x" * (logs.SIZE + 1))
    await_small(log)
    _kill_server(watched)
    log.write_bytes(b"")
    with log.open("ab") as file:
        file.write(b"x" * (logs.SIZE + 1))
    await_small(log)


def test_few_logs_of_mounts_that_ended_badly_are_kept(watched: Served) -> None:
    watched.feed(keep=True)
    place = watched.directory.parent
    older = [place / f"old{number}-host0.log" for number in range(20)]
    for number, log in enumerate(older):
        log.touch()
        os.utime(log, (number, number))
    for _ in range(4):
        _kill_server(watched)
    os.kill(processes.status(watched.directory)["server"], signal.SIGKILL)
    _await_end(watched)
    left = set(place.glob("*.log"))
    assert Path(f"{watched.directory}.log") in left
    assert older[-1] in left
    assert older[0] not in left
    assert len(left) == KEPT_LOGS
    for log in left:
        log.unlink()


def test_a_killed_server_of_a_bound_mount_is_replaced(bound: Served, source: Path) -> None:
    _bind(bound)
    _kill_server(bound)
    assert processes.status(bound.directory)["adapter"] == "bind"
    assert_same(source, bound.mount)
    processes.stop(bound.directory, force=False)
    assert not bound.directory.exists()


def test_a_server_that_does_not_answer_keeps_what_it_has(
    watched: Served, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _arrive_all(watched)
    monkeypatch.setattr(processes, "STOP_TIMEOUT", 1.0)
    pid = processes.status(watched.directory)["pid"]
    with (watched.mount / "odd").open("rb", buffering=0) as file:
        os.killpg(pid, signal.SIGSTOP)
        with pytest.raises(MountError, match="does not answer"):
            processes.stop(watched.directory, force=False)
        assert watched.store.directory.exists()
        os.killpg(pid, signal.SIGCONT)
        assert file.read() == (source / "odd").read_bytes()
    with (watched.mount / "blocks").open("rb", buffering=0) as file:
        os.killpg(pid, signal.SIGSTOP)
        processes.stop(watched.directory, force=True)
        with pytest.raises(OSError):
            file.read(1 << 20)
    assert points.mounted(str(watched.mount)) is None
    assert not watched.directory.exists()
    assert not watched.store.directory.exists()


def test_a_dead_server_with_open_files_is_busy(watched: Served) -> None:
    pid = processes.status(watched.directory)["pid"]
    with (watched.mount / "odd").open("rb") as file:
        reader = subprocess.Popen(["sleep", "60"], stdin=file)
    with reader:
        os.killpg(pid, signal.SIGKILL)
        with pytest.raises(MountError, match=rf"busy: in use by .*\({reader.pid}\)"):
            processes.stop(watched.directory, force=False)
        assert watched.store.directory.exists()
        reader.kill()
    processes.stop(watched.directory, force=False)
    assert not watched.directory.exists()


@pytest.mark.costly
def test_many_mounts_at_once(workplace: Path, settings: Settings) -> None:
    sources = []
    for number in range(20):
        sources.append(workplace / f"source{number}")
        sources[-1].mkdir()
        (sources[-1] / "file").write_text(f"{number}")
    mounts: list[Served] = []
    try:
        for number, source in enumerate(sources):
            mounts.append(Served(source, workplace, settings, name=f"m{number}"))
            _arrive_all(mounts[-1])
        for number, mount in enumerate(mounts):
            assert (mount.mount / "file").read_text() == f"{number}"
        memory = [processes.status(mount.directory)["memory"] for mount in mounts]
        assert max(memory) < 64 << 20
    finally:
        for mount in mounts:
            mount.end()


def test_servers_whose_names_begin_alike_are_two(
    source: Path, workplace: Path, settings: Settings
) -> None:
    longer = Served(source, workplace, settings, name="test-host")  # of test-host-host0
    shorter = processes.directory(settings) / "test-host-host"
    with processes.making(shorter):
        Task("host", str(source), "/nowhere", "/nowhere", "devfuse", 1.0, False).write(shorter)
    assert processes.dead(shorter)
    assert not processes.dead(longer.directory)
    shutil.rmtree(shorter)
    longer.end()


def test_a_task_of_another_version(served: Served, settings: Settings) -> None:
    written = json.loads((served.directory / "task.json").read_text())
    (served.directory / "task.json").write_text(json.dumps(written | {"later": 1}))
    assert Task.read(served.directory) == Task(**written)
    other = processes.directory(settings) / "other-host0"
    other.mkdir()
    del written["store"]
    (other / "task.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="another version"):
        Task.read(other)
    assert processes.find(settings) == [served.directory]
    shutil.rmtree(other)


def test_an_answer_that_is_cut_off(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / control.SOCKET))
        server.listen()

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b'{"ok": tr')

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(MountError, match="ended"):
            control.ask(tmp_path, {"op": "status"}, 5)
        thread.join()


def test_a_mount_stays_while_what_is_mounted_cannot_be_found_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as limited:
        limited.setattr(Path, "read_text", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            points.standing(served.directory)
        assert server._stands(served.directory)


DIES_ONCE = """
import os, pathlib
note = pathlib.Path(__file__).with_name("died")
def end():
    if not note.exists():
        note.touch()
        os._exit(1)
os.register_at_fork(after_in_child=end)
"""


def test_a_server_that_dies_before_it_listens_is_replaced(
    source: Path, workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(workplace))
    (workplace / "sitecustomize.py").write_text(DIES_ONCE)
    served = Served(source, workplace, settings)
    assert (workplace / "died").exists()
    assert sorted(os.listdir(served.mount)) == sorted(os.listdir(source))
    served.end()
