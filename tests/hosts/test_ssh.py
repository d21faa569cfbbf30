"""What programs in the place of ssh, and their absence, do to hosts of ssh."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import SmallDisk
from wheelmount.config import Settings
from wheelmount.errors import ConfigError, HostError, StoreError, UnavailableError
from wheelmount.hosts import bundle
from wheelmount.hosts.slurm import SlurmHosts
from wheelmount.hosts.ssh import SshHosts, Target

Place = Callable[[str], None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Have a program of ``sh`` in the place of ssh."""

    def placed(program: str) -> None:
        path = tmp_path / "ssh"
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return placed


def _hosts(settings: Settings, *, guarded: bool) -> SshHosts:
    targets = [Target("host0"), Target("host1")]
    return SshHosts(targets, replace(settings, start_timeout=2), guarded=guarded)


def test_a_host_that_keeps_printing_ends_the_start_in_time(
    settings: Settings, place: Place
) -> None:
    place("exec timeout 20 yes")
    started = time.monotonic()
    with pytest.raises(HostError, match="host0, host1: no worker within 2 s"):
        _hosts(settings, guarded=True).start()
    assert time.monotonic() - started < 7


@pytest.mark.parametrize(("what", "error"), [("inodes", StoreError), ("read-only", ConfigError)])
def test_a_client_without_room_for_what_hosts_lack_says_so(
    settings: Settings,
    place: Place,
    small_disk: Callable[[Path], SmallDisk],
    workplace: Path,
    what: str,
    error: type[Exception],
) -> None:
    cache = small_disk(workplace / "cache")
    (cache.path / "bundles").mkdir(mode=0o700)
    cache.fill(what)
    hosts = _hosts(replace(settings, cache_dir=str(cache.path)), guarded=True)
    place(f"""echo '{hosts._token} {{"lacks": "host0"}}'; exec cat""")
    with pytest.raises(error, match=str(cache.path)):
        hosts.start()


@pytest.mark.parametrize("guarded", [True, False])
def test_where_there_is_no_ssh_it_says_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnavailableError, match="there is no ssh here"):
        _hosts(settings, guarded=guarded).start()


def test_where_there_is_no_srun_it_leaves_no_file_open(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    hosts = SlurmHosts(1, (), settings, guarded=True)
    before = os.listdir("/proc/self/fd")
    deadline = time.monotonic() + 10
    with pytest.raises(UnavailableError, match="there is no srun here"):
        hosts._run(20000, [])
    while (after := os.listdir("/proc/self/fd")) != before:  # a thread closes one
        assert time.monotonic() < deadline, after
        time.sleep(0.01)


def test_hosts_whose_workers_may_be_left_are_named(settings: Settings, place: Place) -> None:
    place('case "$*" in *host1*) exit 0;; *) echo "no route" >&2; exit 255;; esac')
    record = {"targets": ["host0", "host1"], "token": "0123abcd", "names": ["host0", "host1"]}
    hosts = SshHosts.resume(record | {"addresses": []}, replace(settings, start_timeout=60))
    with pytest.raises(HostError, match=r"workers may be left on host0: no route$"):
        hosts.stop()


def test_hosts_that_do_not_answer_are_waited_for_at_the_same_time(
    settings: Settings, place: Place
) -> None:
    place("exec sleep 20")
    hosts = SshHosts.resume(_hosts(settings, guarded=False).record(), settings)
    hosts._settings = replace(settings, start_timeout=8)
    started = time.monotonic()
    with pytest.raises(HostError, match="host0, host1: no answer within 8 s"):
        hosts.stop()
    assert time.monotonic() - started < 15


def test_the_workers_of_a_session_are_ended_by_the_copy_that_started_them(
    settings: Settings, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although this client is another version by now, with another cache."""
    monkeypatch.setattr(sys, "executable", "/no/python")
    place('for last; do :; done; exec sh -c "$last"')
    own = replace(settings, cache_dir=str(tmp_path / "cache"))
    record = SshHosts([Target("host0")], own, guarded=False).record()
    program = tmp_path / "cache/bundles" / bundle.key() / "venv/bin/python"
    program.parent.mkdir(parents=True)
    (tmp_path / "cache/bundles").chmod(0o700)
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/called\n')
    program.chmod(0o700)
    monkeypatch.setattr(bundle, "key", lambda: "0" * 32)
    SshHosts.resume(record, settings).stop()
    assert (tmp_path / "called").read_text().split()[-3:] == ["host0", "0", "ended"]
    shutil.rmtree(program.parent)
    SshHosts.resume(record, settings).stop()  # of an `up` that was killed before it came
    record["addresses"] = ["tls://host0:26600"]
    with pytest.raises(HostError, match="the copy of wheelmount that started them is gone"):
        SshHosts.resume(record, settings).stop()


def test_a_host_that_had_no_worker_yet_has_none_left(
    settings: Settings, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place("exit 255")
    with pytest.raises(HostError, match="ssh ended with code 255"):
        _hosts(settings, guarded=False).start()
    assert caplog.records == []
