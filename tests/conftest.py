"""What all tests share; above all, that none leaves a mount, a process or a file behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import uv

from wheelmount.config import Settings
from wheelmount.containers import image

NOBODY = 65534
"""Number of a user who owns nothing."""

SHARE = 4
"""Of so many costly tests, one is in each run of tests/run.sh."""

CHECKOUT = Path(__file__).parents[1]

KERNEL_FILE = "/sys/kernel/mm/transparent_hugepage/enabled"
"""Has 4096 bytes, it says, and a few in truth."""

hypothesis.configuration.set_hypothesis_home_dir(CHECKOUT / "build" / "hypothesis")
# The same examples at each run, so that a change which fails is the one that is at fault; more, and
# others each time: pytest --hypothesis-profile=random.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("fixed")

FORK_AND_DIE = """
import os, signal, sys, time
from wheelmount import Cluster
cluster = Cluster(sys.argv[1])
cluster.start()
child = os.fork()
if child == 0:
    os.closerange(1, 3)
    time.sleep(100)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Program that starts hosts, forks, prints the number of the child, and is killed."""

UP_AND_DIE = """
import os, signal
from unittest import mock
from wheelmount.cli.main import main
from wheelmount.hosts.commands import Commands
with mock.patch.object(Commands, "run", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
    main()
"""
"""A program that does what ``wheelmount up`` does, and is killed when its hosts have started."""

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure() -> None:
    """Have what tests start answer to ^C, also where a shell started pytest in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which tests/run.sh bounds its time."""
    parser.addoption(
        "--share",
        metavar="COMMIT",
        help=f"of the tests marked costly, run one in {SHARE}: others for another commit",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out costly tests that are not in the share of this commit."""
    commit = config.getoption("share")
    if commit is None:
        return

    def chosen(item: pytest.Item) -> bool:
        digest = hashlib.sha256(f"{commit} {item.nodeid}".encode()).digest()
        return item.get_closest_marker("costly") is None or digest[0] % SHARE == 0

    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = filter(chosen, items)


def _mounts(place: Path) -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    return {path for path in (line.split()[4] for line in lines) if path.startswith(f"{place}/")}


def _processes(place: Path) -> set[str]:
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "wheelmount." in line and f"{place}/" in line:
            found.add(f"{process.pid} {line}")
    return found


@pytest.fixture
def workplace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short-named private directory in which everything of a test happens.

    Settings point into it, and at the end no mount, process or file of wheelmount may be left.
    """
    # Not pytest's tmp_path: paths of Unix sockets are limited to 107 bytes.
    place = Path(tempfile.mkdtemp(prefix="wm-", dir="/tmp"))
    place.chmod(0o755)  # so that mounts of what is in it are for all to see
    for name in ("runtime", "store", "cache", "state", "work"):
        (place / name).mkdir()
    monkeypatch.setenv("WHEELMOUNT_RUNTIME_DIR", str(place / "runtime"))
    monkeypatch.setenv("WHEELMOUNT_CACHE_DIR", str(place / "cache"))
    monkeypatch.setenv("WHEELMOUNT_STATE_DIR", str(place / "state"))
    monkeypatch.setenv("WHEELMOUNT_STORE", str(place / "store"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    for name in [n for n in os.environ if n.startswith("WHEELMOUNT_HOST")]:
        monkeypatch.delenv(name)
    yield place
    deadline = time.monotonic() + 60
    while (_mounts(place) or _processes(place)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [str(path) for name in ("runtime", "store") for path in (place / name).rglob("*")]
    kept = f"wheelmount-{os.getuid()}", "/mounts", "/stores", "/sessions", "/instances"
    left = [path for path in left if not path.endswith(kept)]
    mounts, processes = _mounts(place), _processes(place)
    for path in mounts:
        subprocess.run(["umount", "-l", path], check=False)
    shutil.rmtree(place, ignore_errors=True)
    assert not mounts, "mounts were left"
    assert not processes, "processes were left"
    assert not left, "files were left"


class SmallDisk:
    """A file system of a few KiB or files, which a test can fill.

    Args:
        path: the directory that shows it; made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filling = path / "filling"
        path.mkdir(exist_ok=True)
        options = "size=2m,nr_inodes=2000,mode=755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)
        subprocess.run(["mount", "--make-private", path], check=True)

    def fill(self, what: str = "bytes") -> None:
        """Leave no ``bytes`` or no ``inodes``, or make it ``read-only``."""
        self._filling.mkdir()
        if what == "read-only":
            self._remount("ro")
            return
        with contextlib.suppress(OSError):
            if what == "bytes":
                with (self._filling / "file").open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
            for number in range(10_000):
                (self._filling / str(number)).touch()

    def free(self) -> None:
        """Undo ``fill``."""
        self._remount("rw")
        shutil.rmtree(self._filling, ignore_errors=True)

    def _remount(self, mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", self.path], check=True)

    def end(self) -> None:
        """Unmount it."""
        subprocess.run(["umount", "-l", self.path], check=True)


@pytest.fixture
def small_disk(workplace: Path) -> Iterator[Callable[[Path], SmallDisk]]:
    """Makes small file systems, which are unmounted at the end; it must be empty then."""
    if os.getuid() != 0:
        pytest.skip("only root may mount a file system that all processes see")
    made: list[SmallDisk] = []

    def make(path: Path) -> SmallDisk:
        made.append(SmallDisk(path))
        return made[-1]

    yield make
    for disk in made:
        disk.free()
        disk.end()


@pytest.fixture
def settings(workplace: Path) -> Settings:
    """Settings for a test: small blocks, short waits."""
    return Settings(
        block_size=64 << 10,
        read_timeout=10,
        fetch_timeout=10,
        store=str(workplace / "store"),
        runtime_dir=str(workplace / "runtime"),
        cache_dir=str(workplace / "cache"),
        state_dir=str(workplace / "state"),
    )


@pytest.fixture
def cli(workplace: Path) -> Cli:
    """The command line, as a user has it: a process of its own."""

    def run(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(  # type: ignore[call-overload]
            [sys.executable, "-m", "wheelmount.cli.main", *map(str, arguments)],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            **{"cwd": workplace / "work", "stdin": subprocess.DEVNULL, "timeout": 90, **options},
        )
        print(arguments, done.returncode, done.stderr)  # seen when the test fails
        return done  # type: ignore[no-any-return]

    return run


def read_terminal(leader: int) -> bytes:
    """All that is shown on a terminal until nobody has it open; closes it."""
    shown = b""
    try:
        while piece := os.read(leader, 1 << 16):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    return shown


def mounts_shown(cli: Cli) -> list[dict[str, Any]]:
    """What ``wheelmount status`` says of mounts."""
    mounts: list[dict[str, Any]] = json.loads(cli("status", "--json").stdout)["mounts"]
    return mounts


@pytest.fixture
def source(workplace: Path) -> Path:
    """A directory with one of everything that a mount must bring through."""
    return make_source(workplace / "source")


def make_source(root: Path) -> Path:
    """Make what the fixture ``source`` gives."""
    deep = root / "package" / "sub"
    deep.mkdir(parents=True)
    (root / "empty-directory").mkdir()
    (root / "empty-file").touch()
    (root / ".hidden").write_text("hidden\n")
    (root / "with blank").write_text("blank\n")
    (deep / "module.py").write_text("print('module')\n")
    (deep / "module.py").chmod(0o640)
    (root / "program").write_text("#!/bin/sh\necho ran\n")
    (root / "program").chmod(0o755)
    Path(os.fsdecode(os.fsencode(root) + b"/not-utf8-\xff\xfe")).write_text("bytes\n")
    (root / "link").symlink_to("package/sub/module.py")
    (root / "dangling").symlink_to("nowhere")
    (root / "hardlink").hardlink_to(deep / "module.py")
    (root / "page").write_bytes(b"p" * 4096)
    (root / "blocks").write_bytes(bytes(range(256)) * 1024)  # 256 KiB: several blocks
    (root / "odd").write_bytes(os.urandom(100_001))
    for number in range(300):
        (root / "package" / f"small{number}").write_text(f"{number}\n")
    with (root / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"between two holes")
        file.truncate(3 << 20)
    os.setxattr(root / "with blank", "user.test", b"\0value\xff")
    os.setxattr(root / "package", "user.directory", b"")
    os.utime(root / "page", ns=(1, 1_234_567_890_123_456_789))
    os.utime(root / "empty-directory", ns=(1, 987_654_321_000_000_001))
    return root


@contextlib.contextmanager
def shorter_than_its_size(path: Path) -> Iterator[None]:
    """Have a file of ``/sys`` at a path, empty or new, that cannot be read as far as its size."""
    # sysfs gives a file new times when something first asks for its extended attributes, as a
    # scan does: the next scan would find another file, once in the life of a kernel.
    os.listxattr(KERNEL_FILE)
    path.touch()
    subprocess.run(["mount", "--bind", KERNEL_FILE, path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.fixture(scope="session")
def sif() -> Path:
    """The image of images/python.def: built the first time, kept for the next runs."""
    path = CHECKOUT / "build" / "images" / "python.sif"
    image.build(CHECKOUT / "images" / "python.def", path, build_args={"uv": uv.find_uv_bin()})
    return path
