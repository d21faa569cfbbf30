"""The same as an ordinary user, who may mount through fusermount3 only."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import NOBODY, make_source
from tests.mount.conformance import assert_read_only, assert_same
from tests.mount.test_server import Served
from wheelmount.config import Settings
from wheelmount.errors import InputError, MountError, UnavailableError
from wheelmount.mount.kernel import points
from wheelmount.mount.serve import adapters, processes, server
from wheelmount.mount.serve.fuse import pyfuse  # noqa: F401 - the user may not read its files

pytestmark = pytest.mark.fuse


def as_nobody(work: Callable[[Path], None]) -> None:
    """Run something as an ordinary user, in a process of its own, in a directory of theirs.

    By fork alone: where this checkout and its Python lie is not for everybody to read.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as place:
                work(Path(place))
            code = 0
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, errors="replace") as failure:
        text = failure.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, text


def _start_by_fork(directory: Path, _timeout: float) -> None:
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        os.setsid()
        sys.argv = ["server", str(directory), str(write)]
        try:
            server.main()
        finally:
            os._exit(0)
    os.close(write)
    word = os.read(read, 4096)
    os.close(read)
    if word != b"ok":
        raise UnavailableError(word.decode())


@pytest.fixture(autouse=True)
def started_by_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "start", _start_by_fork)
    # A command line that names the directory is what a living server is known by.
    monkeypatch.setattr(processes, "_alive", lambda _pid, directory: directory.exists())


def _settings(place: Path) -> Settings:
    for name in ("runtime", "store"):
        (place / name).mkdir()
    settings = Settings(runtime_dir=str(place / "runtime"), store=str(place / "store"))
    return replace(settings, block_size=64 << 10, read_timeout=5)


@pytest.mark.parametrize("name", ["devfuse", "pyfuse3"])
def test_a_mount_does_what_it_does_for_root(name: str) -> None:
    def work(place: Path) -> None:
        source = make_source(place / "source")
        served = Served(source, place, _settings(place), name)
        try:
            for block in range(served.layout.blocks):
                served.arrive(block)
            assert_same(source, served.mount)
            assert_read_only(served.mount)
            assert processes.status(served.directory)["adapter"] == name
        finally:
            served.end()
        assert points.mounted(str(served.mount)) is None

    as_nobody(work)


def test_the_reason_of_fusermount_is_passed_on() -> None:
    def work(_place: Path) -> None:
        with pytest.raises(MountError, match="cannot unmount /proc: fusermount3: entry for /proc"):
            points.unmount("/proc", force=False)

    as_nobody(work)


def test_it_is_told_what_cannot_be_had() -> None:
    def work(_place: Path) -> None:
        assert adapters.choose("auto") == "devfuse"
        with pytest.raises(InputError, match="mounting is for root"):
            adapters.choose("bind")

    as_nobody(work)
