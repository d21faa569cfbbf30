"""``wheelmount doctor``."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Cli, mounts_shown
from wheelmount import doctor, shared, typed
from wheelmount.config import MEMORY, Settings
from wheelmount.doctor import Report
from wheelmount.hosts import rdma
from wheelmount.hosts.commands import Listener, Output, Result
from wheelmount.hosts.spec import parse
from wheelmount.mount.kernel import points
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task
from wheelmount.operations import each_host, survey
from wheelmount.operations.site import Site
from wheelmount.progress import SILENT
from wheelmount.shared import MACHINE

pytestmark = pytest.mark.fuse


def test_tells_what_this_machine_can_do(cli: Cli) -> None:
    done = cli("doctor")
    assert done.returncode == 0, done.stdout
    assert "ok  fuse: /dev/fuse can be used" in done.stdout
    assert "ok  adapter: bind" in done.stdout
    findings = json.loads(cli("doctor", "--source", ".", "--json").stdout)["findings"]
    looked_at = {finding["what"] for finding in findings}
    assert looked_at >= {"fusermount3", "adapter", "store", "shm", "apptainer", "rdma", "source"}
    assert all(finding["hint"] for finding in findings if finding["state"] != doctor.GOOD)
    assert "ok  sockets: closed to other users" in done.stdout


def test_tells_the_same_of_every_host_and_where_they_differ(cli: Cli) -> None:
    done = cli("doctor", "--hosts", "local:2", "--json")
    found = json.loads(done.stdout)
    assert (list(found["hosts"]), found["differences"]) == (["host0", "host1"], []), done.stderr
    assert all(abs(report["skew"]) < 1 for report in found["hosts"].values())
    first, second = (typed.convert(each, Report) for each in found["hosts"].values())
    python = first.findings[0].text
    other = replace(second.findings[0], text="3.9.1")
    second = replace(second, findings=[other, *second.findings[1:]], skew=-60.0)
    assert survey.differences({"a": first, "b": second, "c": first}) == [
        f"b: python is 3.9.1, elsewhere {python}",
        "b: its clock is -60.0 s off",
    ]


@pytest.mark.parametrize(
    "said",
    [
        *(b"", b"[]", b"{}", b'{"findings": [], "leftovers": [], "cleared": 0, "time": 1}'),
        b'{"findings": [], "leftovers": [{"path": 1, "text": ""}],'
        b' "cleared": false, "free": 1, "time": 1}',
    ],
)
def test_a_host_that_says_something_else_is_named(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result(0, said, b"no doctor here\n", 1.0)  # in place of a host with another program

    def run(_site: Site, _argv: Sequence[str], output: Output) -> dict[str, Result]:
        output("host0", "stdout", said)
        return {"host0": result}

    monkeypatch.setattr(each_host, "run", run)
    found = survey.survey(Site(parse("local:1"), Settings(), SILENT))
    assert str(found["host0"]) == "doctor said no doctor here there"


def test_clocks_are_compared_with_the_time_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_site: Site, _argv: Sequence[str], output: Listener | None = None) -> dict[str, Result]:
        """In place of hosts that start and end slowly, two of them with a wrong clock."""
        time.sleep(0.5)
        if output is not None:
            output.begin(["right", "ahead", "behind"])
        results = {}
        for name, off in {"right": 0, "ahead": 60, "behind": -60}.items():
            report = json.dumps(asdict(Report([], [], False, 0, time.time() + off))).encode()
            results[name] = Result(0, report, b"", 0.01)
            if output is not None:
                output(name, "stdout", report)
        time.sleep(0.5)
        return results

    monkeypatch.setattr(each_host, "run", run)
    found = survey.survey(Site(parse("local:3"), Settings(), SILENT))
    reports = {name: each for name, each in found.items() if isinstance(each, Report)}
    assert reports["right"].skew == 0
    assert reports["ahead"].skew > 50
    assert reports["behind"].skew < -50


def test_tells_which_rdma_devices_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(device: dict[str, str], transport: str) -> tuple[str, str]:
        monkeypatch.setattr(rdma, "devices", lambda: device)  # in place of /sys
        findings = doctor.examine(Settings(transport=transport))
        return next((each.state, each.text) for each in findings if each.what == "rdma")

    real = {"mlx5_0": "mlx5_core"}
    assert said({}, "auto") == (doctor.POOR, "no device: bytes travel by TCP")
    assert "none that Monarch takes" in said({"rxe0": "no hardware"}, "auto")[1]
    assert said({}, "rdma") == (doctor.BAD, "no device: transport is rdma, and deliveries fail")
    assert said({"rxe0": "no hardware"}, "rdma")[0] == doctor.BAD
    assert said(real, "auto")[0] == doctor.GOOD
    assert "by what is faster" in said(real, "auto")[1]
    assert "by nothing else" in said(real, "rdma")[1]
    assert "transport is tcp" in said(real, "tcp")[1]


def test_tells_where_a_directory_has_no_room(source: Path) -> None:
    finding = doctor.fit(source, free=1 << 16)
    assert (finding.state, "0 MiB are free" in finding.text) == (doctor.BAD, True)
    assert "WHEELMOUNT_STORE" in finding.hint


@pytest.mark.costly
def test_what_dead_mounts_left_is_found_and_cleared(
    cli: Cli, source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHEELMOUNT_STORE", MEMORY)
    for name in ("bound", "served", "alive"):
        adapter = {"served": "devfuse"}.get(name, "auto")
        assert cli("mount", "--adapter", adapter, source, workplace / name).returncode == 0
    records = {Path(r["mntpoint"]).name: r for r in mounts_shown(cli)}
    _kill_serving(*(records[name] for name in ("bound", "served")))
    hosts = workplace / "runtime" / f"wheelmount-{os.getuid()}" / "hosts-of-a-dead-client"
    hosts.mkdir()
    time.sleep(doctor.MOMENT)
    done = cli("doctor")
    assert done.stdout.count("left: a mount whose serving process is gone") == 2
    assert f"left: hosts that are gone: {hosts}" in done.stdout
    assert "doctor --fix" in done.stdout
    assert cli("doctor", "--fix").stdout.count("cleared: ") == 3
    assert "left: " not in cli("doctor").stdout
    assert points.mounted(str(workplace / "bound")) is None
    assert points.mounted(str(workplace / "served")) is None
    assert (workplace / "alive" / "page").read_bytes() == b"p" * 4096
    assert cli("umount", "--all").returncode == 0


def _kill_serving(*records: dict[str, Any]) -> None:
    for record in records:
        server = psutil.Process(record["server"])
        os.kill(record["pid"], signal.SIGKILL)
        psutil.wait_procs([server], timeout=60)


@pytest.mark.costly
@pytest.mark.parametrize("adapter", ["bind", "devfuse"])
def test_a_store_of_another_runtime_directory_is_left_only_when_its_mount_is_dead(
    cli: Cli, source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    point = workplace / "w"
    assert cli("mount", "--adapter", adapter, source, point).returncode == 0
    (record,) = mounts_shown(cli)
    elsewhere = {**os.environ, "WHEELMOUNT_RUNTIME_DIR": str(workplace / "elsewhere")}
    (workplace / "elsewhere").mkdir()
    time.sleep(doctor.MOMENT)
    assert "cleared: " not in cli("doctor", "--fix", env=elsewhere).stdout
    assert (point / "page").read_bytes() == b"p" * 4096
    (store,) = (workplace / "store").glob("*/*")
    mine = (store / MACHINE).read_text()
    _kill_serving(record)
    (store / MACHINE).write_text("another machine")
    assert "left: " not in cli("doctor", env=elsewhere).stdout
    (store / MACHINE).write_text(mine)
    said = cli("doctor", "--fix", env=elsewhere).stdout
    assert f"cleared: files of a mount that is gone: {store}" in said
    assert not store.exists()
    assert cli("umount", "--force", point).returncode == 0


def test_what_another_machine_uses_is_left_alone(settings: Settings) -> None:
    mount = processes.directory(settings) / "12345678-host0"
    with processes.making(mount):
        Task("host0", "/source", "/point", "/store", "bind", 1.0, False, 0.0).write(mount)
    hosts = settings.private_runtime() / "hosts-12345678"
    hosts.mkdir(mode=0o700)
    shared.mark(hosts)
    for path in mount, hosts:
        mine = (path / MACHINE).read_text()
        (path / MACHINE).write_text("another machine\n")
        os.utime(path, (1, 1))
        assert path not in [left.path for left in doctor.leftovers(settings)]
        assert path not in processes.find(settings)
        (path / MACHINE).write_text(mine)
        assert path in [left.path for left in doctor.leftovers(settings)]
    assert processes.find(settings) == [mount]
    for left in doctor.leftovers(settings):
        doctor.clear(left)


def test_what_is_in_the_making_is_not_left(settings: Settings, workplace: Path) -> None:
    place = settings.private_store(mounted=False)
    directory = processes.directory(settings) / "mount-host0"
    with processes.making(directory):
        (place / directory.name).mkdir()
        for path in (directory, place / directory.name):
            os.utime(path, (1, 1))
        assert doctor.leftovers(settings) == []
    os.utime(directory, (1, 1))
    (left,) = doctor.leftovers(settings)
    assert left.path == directory
    doctor.clear(left)
    (left,) = doctor.leftovers(settings)
    assert left.path == place / directory.name
    doctor.clear(left)
    assert doctor.leftovers(settings) == []


@pytest.mark.costly
@pytest.mark.parametrize("adapter", ["bind", "devfuse"])
def test_a_mount_takes_the_place_of_a_dead_one(
    cli: Cli,
    source: Path,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    adapter: str,
) -> None:
    monkeypatch.setenv("WHEELMOUNT_STORE", MEMORY)
    command = "mount", "--adapter", adapter, source, workplace / "w"
    assert cli(*command).returncode == 0
    assert cli(*command).returncode == 73, "a mount that lives stays"
    (record,) = mounts_shown(cli)
    _kill_serving(record)
    assert cli(*command).returncode == 0
    assert len(mounts_shown(cli)) == 1
    assert (workplace / "w" / "page").read_bytes() == b"p" * 4096
    assert cli("umount", "--all").returncode == 0
    assert not list((workplace / "runtime").glob("*/stores/*"))


def test_without_fuse_it_says_so_and_ends_with_69(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wheelmount.mount.kernel.points.os.access", lambda *_: False)
    finding = doctor._fuse()
    assert finding.state == doctor.BAD
    assert finding.hint
