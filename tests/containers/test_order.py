"""Orders: what a host does for a client, besides running the command."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli, SmallDisk
from tests.lockless import without_locks
from wheelmount.config import Settings
from wheelmount.containers import overlay
from wheelmount.containers.order import PROGRAM, Order
from wheelmount.containers.overlay import Overlay
from wheelmount.hosts import collection
from wheelmount.hosts.commands import Commands, Result
from wheelmount.hosts.local import LocalHosts
from wheelmount.operations.image import carry_out

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]


@pytest.fixture
def order(sif: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    """An order to collect ``/results``, into an archive at ``output.tar``."""
    monkeypatch.setenv("WHEELMOUNT_OUTPUT", str(tmp_path / "output"))
    state, runtime = str(tmp_path / "state"), str(tmp_path / "runtime")
    return Order("n1", str(sif), "mine", state, runtime, collect="/results")


def collected(place: Path) -> tuple[list[str], int, str]:
    """Names in the archive that is sent to the client, and what its sender says."""
    sender = [sys.executable, "-m", "wheelmount.hosts.collection", collection.ARCHIVE, "/"]
    done = subprocess.run([*sender, str(place / "output")], capture_output=True, check=False)
    (place / "sent.tar").write_bytes(done.stdout)
    if not done.stdout:
        return [], done.returncode, done.stderr.decode()
    with tarfile.open(place / "sent.tar") as archive:
        return archive.getnames(), done.returncode, done.stderr.decode()


def test_what_tar_could_read_is_collected(order: Order, tmp_path: Path) -> None:
    tar = """#!/bin/sh
    /bin/tar "$@"
    echo "tar: ./one: file changed as we read it" >&2
    exit 1
    """
    script = 'mkdir /results; echo one >/results/one; echo "$0" >/usr/local/bin/tar; cd /usr/local'
    assert order.run(["sh", "-ec", f"{script}; chmod +x bin/tar", tar]) == 0
    names, code, said = collected(tmp_path)
    assert "./one" in names
    assert (code, said) == (1, "tar: ./one: file changed as we read it\n")


def test_that_there_is_nothing_to_collect_is_told(order: Order, tmp_path: Path) -> None:
    assert order.run(["true"]) == 0
    assert collected(tmp_path) == ([], 1, "there is nothing at /results in the container\n")


def test_an_archive_that_takes_too_long_is_ended(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wheelmount.containers.order.ARCHIVING", 2.0)
    script = "echo '#!/bin/sh\n/bin/tar \"$@\"; sleep 1000' >/usr/local/bin/tar; mkdir /results"
    bounded = replace(order, timeout=100.0)
    assert bounded.run(["sh", "-ec", f"{script}; chmod +x /usr/local/bin/tar"]) == 0
    names, code, said = collected(tmp_path)
    assert (names, code) == (["."], 1)
    assert said == "the archive is not whole: the command was ended: it took longer than 2 s\n"


@pytest.mark.hosts
def test_a_bounded_command_ends_although_its_image_hangs(
    order: Order, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wheelmount.containers.order.PREPARATION", 1.0)
    os.mkfifo(tmp_path / "image.sif")  # as a file of a network file system that hangs
    hung = replace(order, collect=None, image=str(tmp_path / "image.sif"), overlay="", timeout=1.0)
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        result = commands.run({"host0": carry_out(hung, ["true"])})["host0"]
    assert isinstance(result, Result)
    assert (result.code, result.stdout) == (124, b"")
    assert b"it took longer than 2 s" in result.stderr


def test_another_container_gets_the_overlay_when_the_files_are_archived(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlay, "LINGER", 60)
    mine = Overlay(tmp_path / "state", "mine", "n1")
    mine.create()
    archived = []

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not mine.user().startswith("mkdir") and time.monotonic() < deadline:
            pass
        with (tmp_path / "state" / "overlays" / "mine" / ".n1.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            archive = tmp_path / "output.tar"
            archived.append(archive.exists() and archive.stat().st_size > 0)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert order.run(["mkdir", "/results"]) == 0
    waiting.join()
    assert archived == [True]
    assert os.listdir(tmp_path / "runtime" / f"wheelmount-{os.getuid()}") == []


def carried_out(order: Order, place: Path, argv: list[str], **options: Any) -> tuple[int, str]:
    """Exit code and output of the program that carries out orders."""
    (place / "note").write_bytes(order.encode(argv))
    command = [sys.executable, *PROGRAM[1:], str(place / "note")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    return done.returncode, done.stdout + done.stderr


def test_overlays_may_be_on_file_systems_without_locks(
    order: Order, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "state").mkdir()
    environment = without_locks(tmp_path / "state", tmp_path)
    alone = replace(order, collect=None)
    assert carried_out(alone, tmp_path, ["touch", "/kept"], env=environment) == (0, "")
    assert carried_out(alone, tmp_path, ["ls", "/kept"], env=environment) == (0, "/kept\n")
    environment["WHEELMOUNT_STATE_DIR"] = str(tmp_path / "state")
    assert "mine" in cli("overlay", "ls", env=environment).stdout
    assert cli("overlay", "rm", "mine", env=environment).returncode == 0


def test_a_full_disk_of_the_host_is_no_failure_of_the_command(
    order: Order, tmp_path: Path, small_disk: Callable[[Path], SmallDisk], workplace: Path
) -> None:
    runtime = small_disk(workplace / "runtime")
    (runtime.path / f"wheelmount-{os.getuid()}").mkdir(mode=0o700)
    runtime.fill()
    alone = replace(order, collect=None, runtime_dir=str(runtime.path))
    code, said = carried_out(alone, tmp_path, ["true"])
    assert code == 74, said
    assert f"no space left for {runtime.path}" in said
    assert "Traceback" not in said
