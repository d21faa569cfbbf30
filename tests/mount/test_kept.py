"""Blocks that stay on a host's disk do not travel in the next job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from blake3 import blake3

from tests.conftest import NOBODY, Cli, mounts_shown
from tests.mount.test_ordinary_user import as_nobody
from wheelmount import remotemount
from wheelmount.config import Settings
from wheelmount.errors import ConfigError
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.snapshot.layout import Extent
from wheelmount.mount.snapshot.tree import Inode
from wheelmount.mount.store.kept import FILE_CLOCK, STALE, Kept

BLOCK = 64 << 10
BIG, SMALL = 8 << 20, 300
"""Bytes of the one big file of a tree, and number of its small files."""


@pytest.fixture
def place(workplace: Path, settings: Settings) -> Path:
    """The private directory that blocks are kept in; not there yet."""
    return workplace / "keep" / f"wheelmount-kept-{os.getuid()}"


@pytest.fixture
def keeping(workplace: Path, settings: Settings) -> Settings:
    return replace(settings, store_keep=str(workplace / "keep"))


@pytest.fixture
def tree(workplace: Path) -> Path:
    root = workplace / "source"
    (root / "small").mkdir(parents=True)
    (root / "big").write_bytes(os.urandom(BIG))
    for number in range(SMALL):
        (root / "small" / f"file{number}").write_bytes(os.urandom(1000 + number))
    return root


def _size(tree: Path) -> int:
    return sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())


def _job(
    source: Path, workplace: Path, settings: Settings, *, hosts: int = 1
) -> tuple[int, list[dict[str, Any]]]:
    """Have new hosts mount a tree; return the bytes that the client sent, and each host's traffic.

    All of the tree is compared on each host.
    """
    with LocalHosts(hosts, settings, namespaces=False) as made:
        return _mount(made, source, f"{workplace}/w-{{host}}", settings)


def _mount(
    hosts: LocalHosts, source: Path, where: str, settings: Settings
) -> tuple[int, list[dict[str, Any]]]:
    with remotemount(hosts, source, where, settings=settings) as mount:
        mount.wait(60)
        for path in mount.mntpoints.values():
            subprocess.run(["diff", "-r", source, path], check=True, timeout=60)
        return mount.sent, [found["delivery"] for found in mount.status().values()]


def _leads_to(link: Path, place: Path) -> bool:
    with contextlib.suppress(OSError):
        return link.readlink() == place
    return False


def _blocks(place: Path) -> list[Path]:
    """All kept blocks, each of which must be whole."""
    found = [path for path in place.iterdir() if not path.name.startswith("new-")]
    kept = Kept(place, 0)
    for path in found:
        size = kept._size(path.name)
        assert blake3(path.read_bytes()[:size]).hexdigest() == path.name
    return found


@pytest.mark.fuse
@pytest.mark.hosts
class TestOnHosts:
    """Jobs one after the other, each with hosts of its own, on one machine."""

    def test_the_second_job_ships_nothing(
        self, tree: Path, workplace: Path, keeping: Settings, place: Path
    ) -> None:
        size = _size(tree)
        first, found = _job(tree, workplace, keeping)
        assert first >= size
        assert found[0]["kept"] == 0
        assert place.stat().st_mode & 0o777 == 0o700
        before = {path: path.stat().st_ino for path in _blocks(place)}
        second, found = _job(tree, workplace, keeping, hosts=2)
        assert second < size / 100
        assert [each["kept"] for each in found] == [size, size]
        assert [each["received"] for each in found] == [{}, {}]
        # What is there is not written again.
        assert {path: path.stat().st_ino for path in _blocks(place)} == before

    def test_two_hosts_of_one_machine_share_a_directory(
        self, tree: Path, workplace: Path, keeping: Settings, place: Path
    ) -> None:
        _job(tree, workplace, keeping, hosts=2)
        assert sum(path.stat().st_size for path in _blocks(place)) < 1.1 * _size(tree)
        sent, _ = _job(tree, workplace, keeping, hosts=2)
        assert sent < _size(tree) / 100

    def test_of_a_changed_tree_the_changes_travel(
        self, tree: Path, workplace: Path, keeping: Settings
    ) -> None:
        _job(tree, workplace, keeping)
        (tree / "added").write_bytes(os.urandom(5000))  # all that follows is cut elsewhere
        with (tree / "big").open("r+b") as big:
            big.seek(BIG // 2)
            big.write(os.urandom(100))
        (tree / "small" / "file7").rename(tree / "small" / "another")
        edited = 2 * BLOCK + 2 * BLOCK + 2 * BLOCK  # blocks that these touch
        sent, found = _job(tree, workplace, keeping)
        assert sent < edited + _size(tree) / 100
        assert found[0]["kept"] >= _size(tree) - edited
        # These were kept too.
        sent, _ = _job(tree, workplace, keeping)
        assert sent < _size(tree) / 100

    def test_of_edits_here_and_there_only_these_travel(
        self, tree: Path, workplace: Path, keeping: Settings
    ) -> None:
        _job(tree, workplace, keeping)
        edited = 0
        for number in range(0, SMALL, 10):  # each block has some
            path = tree / "small" / f"file{number}"
            path.write_bytes(os.urandom(path.stat().st_size + number % 20))  # or of the same size
            edited += path.stat().st_size
        sent, found = _job(tree, workplace, keeping, hosts=2)
        assert sent == edited
        assert [each["kept"] + each["reused"] for each in found] == [_size(tree) - edited] * 2
        sent, _ = _job(tree, workplace, keeping)
        assert sent == 0

    def test_blocks_of_another_size_serve_too(
        self, tree: Path, workplace: Path, keeping: Settings
    ) -> None:
        _job(tree, workplace, keeping)
        sent, _ = _job(tree, workplace, replace(keeping, block_size=48 << 10))
        assert sent < _size(tree) / 100

    def test_what_was_damaged_travels_and_is_kept_again(
        self, tree: Path, workplace: Path, keeping: Settings, place: Path
    ) -> None:
        _job(tree, workplace, keeping)
        rotten, short, *_, tableless = sorted(_blocks(place))
        with rotten.open("r+b") as file:
            file.write(b"rotten")
        os.truncate(short, short.stat().st_size // 2)
        with tableless.open("r+b") as file:
            file.seek(-60, os.SEEK_END)
            file.write(bytes(60))
        sent, _ = _job(tree, workplace, keeping)
        assert 2 * BLOCK < sent <= 3 * BLOCK
        assert {rotten, short, tableless} <= set(_blocks(place))  # sound again
        sent, _ = _job(tree, workplace, keeping)
        assert sent == 0

    def test_what_a_refresh_brought_is_kept(
        self, tree: Path, workplace: Path, keeping: Settings
    ) -> None:
        with (
            LocalHosts(1, keeping, namespaces=False) as hosts,
            remotemount(hosts, tree, f"{workplace}/w", settings=keeping) as mount,
        ):
            mount.wait(60)
            (tree / "added").write_bytes(os.urandom(20 * BLOCK))
            assert mount.refresh()
        sent, _ = _job(tree, workplace, keeping)
        assert sent < _size(tree) / 100

    @pytest.mark.costly
    def test_two_mounts_at_once(
        self, tree: Path, workplace: Path, keeping: Settings, place: Path
    ) -> None:
        other = workplace / "other"
        other.mkdir()
        (other / "big").write_bytes((tree / "big").read_bytes()[: BIG // 2] + os.urandom(BIG // 2))
        size = _size(tree) + _size(other)
        for bound in (size // 3, 2 * size, 2 * size):
            with (
                LocalHosts(1, keeping, namespaces=False) as hosts,
                ThreadPoolExecutor() as threads,
            ):
                settings = replace(keeping, store_keep_size=bound)
                jobs = [
                    threads.submit(_mount, hosts, source, f"{workplace}/{n}-{{host}}", settings)
                    for n, source in enumerate((tree, other, tree))
                ]
                sent = [job.result()[0] for job in jobs]
            _blocks(place)
        assert sum(sent) < _size(tree) / 100

    def test_a_tree_beyond_the_bound_is_kept_in_part(
        self, tree: Path, workplace: Path, keeping: Settings, place: Path
    ) -> None:
        keeping = replace(keeping, store_keep_size=BIG // 2)
        for expected in (_size(tree), _size(tree) - BIG // 2 + 4 * BLOCK):
            sent, _ = _job(tree, workplace, keeping)
            assert sent <= expected + BLOCK
            assert sum(path.stat().st_size for path in place.iterdir()) <= BIG // 2

    @pytest.mark.costly
    def test_a_full_disk_keeps_less(
        self, tree: Path, workplace: Path, keeping: Settings, place: Path
    ) -> None:
        keeping = replace(keeping, store_keep_size=BIG)
        with _disk(workplace / "keep", BIG // 2):
            sent, _ = _job(tree, workplace, keeping)
            assert sent >= _size(tree)
            assert _blocks(place)
            disk = os.statvfs(place)
            assert disk.f_bavail >= disk.f_blocks // 20
            place.joinpath("others").write_bytes(bytes(disk.f_bavail * disk.f_frsize))
            sent, _ = _job(tree, workplace, keeping)
            assert sent < _size(tree) - BIG // 4
        with _disk(workplace / "keep", BLOCK):  # not even a directory can be made in it
            with contextlib.suppress(OSError):
                workplace.joinpath("keep", "others").write_bytes(bytes(2 * BLOCK))
            for number in range(100):
                with contextlib.suppress(OSError):
                    workplace.joinpath("keep", f"{number}").mkdir()
            _job(tree, workplace, keeping)

    @pytest.mark.costly
    def test_the_directory_may_be_deleted_at_any_time(
        self, tree: Path, workplace: Path, keeping: Settings, place: Path
    ) -> None:
        _job(tree, workplace, keeping)
        with LocalHosts(1, keeping, namespaces=False) as hosts:
            mount = remotemount(hosts, tree, f"{workplace}/w", settings=keeping)
            with mount:
                mount.open()
                # Fails ("Directory not empty") if a block is kept after the directory was listed.
                removal = ["rm", "-rf", str(place)]
                assert any(not subprocess.run(removal, check=False).returncode for _ in range(50))
                mount.wait(60)
                subprocess.run(["diff", "-r", tree, f"{workplace}/w"], check=True, timeout=60)
        _job(tree, workplace, keeping)
        sent, _ = _job(tree, workplace, keeping)
        assert sent == 0

    @pytest.mark.costly
    def test_hosts_that_are_killed_leave_only_whole_blocks(
        self, tree: Path, workplace: Path, keeping: Settings, place: Path
    ) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, tree, f"{workplace}/w"],
            env={**os.environ, "WHEELMOUNT_STORE_KEEP": keeping.store_keep},
            start_new_session=True,
        ) as client:
            while not place.exists() or len(list(place.iterdir())) < 3:
                assert client.poll() is None
                time.sleep(0.001)
            (keeper,) = (
                process
                for process in psutil.Process(client.pid).children(recursive=True)
                if any(_leads_to(fd, place) for fd in Path(f"/proc/{process.pid}/fd").iterdir())
            )
            keeper.kill()
            os.killpg(client.pid, signal.SIGKILL)
        _blocks(place)
        _job(tree, workplace, keeping)
        sent, _ = _job(tree, workplace, keeping)
        assert sent == 0

    @pytest.mark.parametrize("wrong", ["mode", "owner", "link", "file", "parent"])
    def test_a_directory_that_is_not_private_is_refused(
        self, wrong: str, tree: Path, workplace: Path, keeping: Settings, place: Path
    ) -> None:
        message, hint = "is not a private directory of yours", "WHEELMOUNT_STORE_KEEP elsewhere"
        if wrong == "parent":
            place.parent.touch()
            message, hint = "cannot be used to keep blocks", "directory that you may write to"
        else:
            place.parent.mkdir()
        if wrong in ("mode", "owner"):
            place.mkdir(mode=0o700)
        if wrong == "mode":
            place.chmod(0o770)
            hint = f"chmod 700 {place}"
        elif wrong == "owner":
            os.chown(place, NOBODY, NOBODY)
        elif wrong == "link":
            (workplace / "elsewhere").mkdir(mode=0o700)
            place.symlink_to(workplace / "elsewhere")
            hint = "remove it"
        elif wrong == "file":
            place.touch(0o600)
            hint = "remove it"
        with pytest.raises(ConfigError, match=message) as raised:
            _job(tree, workplace, keeping)
        assert hint in str(raised.value.hint)

    @pytest.mark.costly
    def test_without_the_setting_nothing_is_kept(
        self, cli: Cli, tree: Path, workplace: Path
    ) -> None:
        for value in (None, ""):
            env = {**os.environ, **({} if value is None else {"WHEELMOUNT_STORE_KEEP": value})}
            mounted = cli("mount", tree, workplace / "w", "--hosts", "local:1", env=env)
            assert mounted.returncode == 0
            (mount,) = mounts_shown(cli)
            assert mount["delivery"]["kept"] == 0
            assert "kept" not in cli("status").stdout
            assert cli("umount", tree).returncode == 0
        assert not [path for path in workplace.rglob("*kept*") if "source" not in path.parts]

    @pytest.mark.costly
    def test_the_status_says_what_was_kept(self, cli: Cli, tree: Path, workplace: Path) -> None:
        env = {**os.environ, "WHEELMOUNT_STORE_KEEP": str(workplace / "keep")}
        for _ in range(2):
            mounted = cli("mount", tree, workplace / "w", "--hosts", "local:1", env=env)
            assert mounted.returncode == 0
            (mount,) = mounts_shown(cli)
            shown = cli("status").stdout
            assert cli("umount", tree).returncode == 0
        assert mount["delivery"]["kept"] == _size(tree)
        assert f"{_size(tree) / 1e6:.1f} MB of it were kept by earlier mounts" in shown


CLIENT = """
import os, sys, time
from wheelmount import config, remotemount
from wheelmount.hosts.local import LocalHosts
settings = config.load()
with LocalHosts(1, settings, namespaces=False) as hosts:
    with remotemount(hosts, sys.argv[1], sys.argv[2], settings=settings) as mount:
        mount.wait(60)
        time.sleep(60)
"""


@contextlib.contextmanager
def _disk(path: Path, size: int) -> Iterator[None]:
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def _put(kept: Kept, path: bytes, data: bytes) -> str:
    """Keep a block that is one file; return its name."""
    digest = blake3(data)
    inode = Inode(0o100644, len(data), 0, 1, path, (), None)
    kept.put(digest.digest(), memoryview(data), [Extent(5, 0, 0, len(data))], {5: inode})
    return digest.hexdigest()


def _open(settings: Settings, **others: int) -> Kept:
    kept = Kept.open(replace(settings, **others))  # type: ignore[arg-type]
    assert kept is not None
    return kept


def test_what_was_not_used_for_longest_goes_first(keeping: Settings, place: Path) -> None:
    contents = [bytes([number]) * 1000 for number in range(4)]
    names = [_put(_open(keeping), b"file%d" % n, data) for n, data in enumerate(contents[:3])]
    for age, name in zip((30, 20, 10), names, strict=True):
        os.utime(place / name, (0, time.time() - age))
    kept = _open(keeping, store_keep_size=sum(p.stat().st_size for p in place.iterdir()))
    memory = memoryview(bytearray(1000))
    assert kept.take(bytes.fromhex(names[0]), memory)
    assert bytes(memory) == contents[0]
    names.append(_put(kept, b"file3", contents[3]))
    assert {path.name for path in place.iterdir()} == {names[0], names[2], names[3]}
    # Those that a delivery is to use stay, and its own too; then nothing more is kept.
    os.utime(place / names[3], (0, time.time() - 1))
    small = _open(keeping, store_keep_size=1)
    (_, path, size, _) = next(small.files(lambda path, _: path == b"file0").files())
    assert (path, size) == (b"file0", 1000)
    _put(small, b"file9", b"9" * 1000)
    assert {path.name for path in place.iterdir()} == {names[0]}


def test_files_with_other_names_are_left_alone(keeping: Settings, place: Path) -> None:
    _open(keeping)
    outside = place.parent / "outside"
    outside.write_text("stays")
    (place / "notes").write_text("stays")
    name = blake3(b"stays").hexdigest()
    (place / name).symlink_to(outside)
    kept = _open(keeping, store_keep_size=1)
    assert not kept.take(bytes.fromhex(name), memoryview(bytearray(5)))
    _put(kept, b"file", b"1" * 100)
    assert (outside.read_text(), (place / "notes").read_text()) == ("stays", "stays")


def test_writers_that_are_killed_leave_whole_blocks(keeping: Settings, place: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        kept = _open(keeping)
        os.write(write, b"begun")
        while True:
            _put(kept, b"file", os.urandom(BLOCK))
    assert os.read(read, 5) == b"begun"
    while len(list(place.iterdir())) < 5:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert len(_blocks(place)) >= 4
    half = place / "new-0123"
    half.write_bytes(b"half")
    os.utime(half, (0, time.time() - STALE - 1))
    (place / "new-4567").write_bytes(b"being written")
    _put(_open(keeping), b"file", b"1")
    assert not half.exists()
    assert (place / "new-4567").exists()


def test_several_threads_and_processes_keep_the_same_blocks(keeping: Settings, place: Path) -> None:
    contents = [os.urandom(BLOCK) for _ in range(20)]
    keepers = [_open(keeping) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda k: [_put(k, b"file", each) for each in contents], args=(k,))
        for k in keepers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(_blocks(place)) == len(contents)
    assert len(list(place.iterdir())) == len(contents)


def test_several_threads_use_all_room(
    keeping: Settings, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(*arguments: Any, **options: Any) -> None:
        known(*arguments, **options)
        time.sleep(0.002)  # others look meanwhile

    known = os.rename
    monkeypatch.setattr(os, "rename", rename)
    _put(_open(keeping), b"one", os.urandom(BLOCK))
    (size,) = (path.stat().st_size for path in place.iterdir())
    kept = _open(keeping, store_keep_size=50 * size)
    with ThreadPoolExecutor(6) as threads:
        for _ in threads.map(lambda _: _put(kept, b"one", os.urandom(BLOCK)), range(200)):
            pass
    assert len(_blocks(place)) == 50


def test_blocks_of_a_disk_that_became_read_only_can_be_read(
    keeping: Settings, workplace: Path
) -> None:
    with _disk(workplace / "keep", BIG):
        name = _put(_open(keeping), b"file", b"content")
        subprocess.run(["mount", "-o", "remount,ro", workplace / "keep"], check=True)
        kept, memory = _open(keeping), memoryview(bytearray(7))
        assert kept.take(bytes.fromhex(name), memory)
        assert bytes(memory) == b"content"
        assert not kept.take(bytes(32), memory)
        _put(kept, b"other", b"other")
        del kept  # it keeps the disk mounted


def test_an_ordinary_user_s_stay_apart_from_root_s(workplace: Path) -> None:
    shared = workplace / "keep"
    shared.mkdir()
    shared.chmod(0o1777)
    _put(_open(Settings(store_keep=str(shared))), b"file", b"of root")

    def work(_place: Path) -> None:
        settings = Settings(store_keep=str(shared))
        name = _put(_open(settings), b"file", b"of nobody")
        own = shared / f"wheelmount-kept-{NOBODY}"
        assert [path.name for path in own.iterdir()] == [name]
        assert own.stat().st_mode & 0o777 == 0o700
        memory = memoryview(bytearray(9))
        assert _open(settings).take(bytes.fromhex(name), memory)
        assert bytes(memory) == b"of nobody"
        assert not _open(settings).take(blake3(b"of root").digest(), memory[:7])

    as_nobody(work)


def test_the_bound_is_a_share_of_the_disk(keeping: Settings, workplace: Path, place: Path) -> None:
    with _disk(workplace / "keep", 4 << 20):
        for _ in range(10):
            _put(_open(keeping), b"file", os.urandom(BLOCK))
        assert 5 * BLOCK < sum(path.stat().st_size for path in place.iterdir()) <= (4 << 20) // 10


def test_a_delivery_does_not_drive_out_its_own_blocks(keeping: Settings, place: Path) -> None:
    kept = _open(keeping, store_keep_size=3500)
    began = time.clock_gettime_ns(FILE_CLOCK)
    names = {_put(kept, b"file%d" % number, bytes([number]) * 1000) for number in range(3)}
    for name in names:  # as if all had been written at once
        os.utime(place / name, ns=(0, began))
    _put(kept, b"file9", b"9" * 1000)
    assert {path.name for path in place.iterdir()} == names
