"""Orders: what a host does for a client, besides running the command."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from wheelmount.containers import overlay
from wheelmount.containers.order import Order
from wheelmount.containers.overlay import Overlay
from wheelmount.hosts import collection

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


def test_another_container_gets_the_overlay_when_the_files_are_archived(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlay, "LINGER", 60)
    mine = Overlay(tmp_path / "state", "mine", "n1")
    mine.create()
    archived = []

    def wait() -> None:
        while not mine.user():
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
