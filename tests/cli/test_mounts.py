"""``wheelmount mount | umount | status | run``, as a user has them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.conftest import Cli, mounts_shown, shorter_than_its_size
from tests.mount.conformance import assert_same, await_last
from wheelmount import Cluster, config, doctor
from wheelmount.config import Settings
from wheelmount.hosts.session import Session
from wheelmount.mount.kernel import points
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task
from wheelmount.operations import pools

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]


def test_mount_stays_until_umount(cli: Cli, source: Path, workplace: Path) -> None:
    done = cli("mount", source, f"{workplace}/w-{{host}}", "--hosts", "local:2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"host0 {workplace}/w-host0\nhost1 {workplace}/w-host1\n"
    assert_same(source, workplace / "w-host1")
    records = mounts_shown(cli)
    assert [r["host"] for r in records] == ["host0", "host1"]
    assert all(r["held"] == r["size"] and r["visible"] for r in records)
    assert "complete" in cli("status").stdout
    assert cli("umount", workplace / "w-host0").returncode == 0
    assert points.mounted(f"{workplace}/w-host0") is None
    assert cli("umount", source).returncode == 0
    assert cli("status").stdout == "nothing is mounted\n"


def test_one_host_mounts_where_the_caller_sees_it(cli: Cli, source: Path, workplace: Path) -> None:
    assert cli("mount", source, "../here", "--hosts", "local:1").returncode == 0
    assert_same(source, workplace / "here")
    assert cli("umount", "../here").returncode == 0
    assert not (workplace / "here").exists()


def test_without_host_in_the_path_each_host_has_a_namespace(
    cli: Cli, source: Path, workplace: Path
) -> None:
    done = cli("mount", source, "--hosts", "local:2")
    assert done.stdout == f"host0 {source}\nhost1 {source}\n"
    assert points.mounted(str(source)) is None
    records = mounts_shown(cli)
    assert not any(r["visible"] for r in records)
    assert "in a namespace of its own" in cli("status").stdout
    inside = ["nsenter", "-m", "-t", str(records[1]["pid"]), "cat", str(source / "page")]
    assert subprocess.run(inside, capture_output=True, check=True).stdout == b"p" * 4096
    assert cli("umount", "--all").returncode == 0


@pytest.mark.parametrize("where", ["{host}", None])
def test_refresh_shows_what_changed_since(
    cli: Cli, source: Path, workplace: Path, where: str | None
) -> None:
    places = [] if where is None else [f"{workplace}/w-{where}"]
    cli("mount", source, *places, "--hosts", "local:2")
    (source / "page").write_text("changed")
    (source / "new").mkdir()
    mntpoints = [str(source) if where is None else f"{workplace}/w-host{n}" for n in (0, 1)]
    done = cli("refresh", source)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"host{n} {p} refreshed\n" for n, p in enumerate(mntpoints))
    assert cli("refresh", source).stdout.count("unchanged") == 2
    for record, mntpoint in zip(mounts_shown(cli), mntpoints, strict=True):
        assert record["generation"] == 2
        root = Path(f"/proc/{record['pid']}/root{mntpoint}")
        assert (root / "page").read_text() == "changed"
        assert (root / "new").is_dir()
    assert cli("refresh", "nowhere").returncode == 73
    assert cli("umount", source).returncode == 0


@pytest.fixture
def torn(source: Path) -> Iterator[str]:
    """Name of a file in ``source`` that has fewer bytes than its size says."""
    with shorter_than_its_size(source / "torn"):
        yield "torn"


@pytest.mark.costly
def test_files_that_could_not_be_read_are_named(
    cli: Cli, source: Path, workplace: Path, torn: str
) -> None:
    done = cli("mount", source, workplace / "w")
    assert done.returncode == 74
    assert done.stdout == f"host0 {workplace}/w\n", "the others can be read"
    assert f"1 file of {source} cannot be read on the hosts: {torn};" in done.stderr
    assert done.stderr.count(torn) == 1
    assert cli("umount", workplace / "w").returncode == 0
    script = "cat page odd blocks .hidden >/dev/null && echo fine"
    done = cli("run", source, "--hosts", "local:2", "-", stdin=None, input=script)
    assert done.stdout == "== host0 ==\nfine\n== host1 ==\nfine\n"
    assert done.returncode == 74
    assert f"cannot be read on the hosts: {torn};" in done.stderr
    done = cli("run", source, "-", stdin=None, input="sleep 1; exit 3")
    assert done.returncode == 3, "the script's own code"
    assert torn in done.stderr


@pytest.mark.costly
@pytest.mark.parametrize("where", ["{host}", None])
def test_refresh_starts_hosts_only_where_this_process_cannot_do_their_work(
    cli: Cli, source: Path, workplace: Path, where: str | None
) -> None:
    def changes() -> bool:
        told = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
        done = cli("refresh", source, env=told)
        assert done.returncode == 0, done.stderr
        states = {line.split()[-1] for line in done.stdout.splitlines()}
        assert states <= {"refreshed", "unchanged"}
        changed = states == {"refreshed"}
        assert ("monarch" in done.stderr) == (changed and where is None)
        return changed

    places = [] if where is None else [f"{workplace}/w-{where}"]
    hosts = 1 if places else 2  # one alone would hide the source
    cli("mount", source, *places, "--hosts", f"local:{hosts}")
    assert not changes()
    page = source / "page"
    times = page.stat()
    page.write_bytes(b"q" * times.st_size)
    os.utime(page, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert changes(), "its mtime is as it was"
    (source / "package").chmod(0o711)
    (source / "package" / "sub").rename(source / "sub")
    (source / "sub" / "module.py").rename(source / "sub" / "moved.py")
    os.link(page, source / "another name of page")
    (source / "empty-file").unlink()
    (source / ".hidden").chmod(0o600)
    (source / "new").write_bytes(os.urandom(3 << 20))
    assert changes()
    assert not changes()
    for directory in processes.find(config.load(), str(source)):
        status, task = processes.status(directory), Task.read(directory)
        assert status["delivery"]["ways"]["local"] >= 3 << 20
        root = f"/proc/{status['pid']}/root"
        await_last([Path(root + task.store)])
        assert_same(source, Path(root + task.mntpoint))
    other = workplace / "other"
    other.mkdir()
    (other / "file").touch()
    cli("mount", other, workplace / "o")
    page.write_bytes(b"r")
    done = cli("refresh", source, other)
    states = [line.split()[-1] for line in done.stdout.splitlines()]
    assert states == [*hosts * ["refreshed"], "unchanged"]
    done = cli("refresh", other, source)
    assert done.stdout.count("unchanged") == hosts + 1
    (other / "file").unlink()
    other.rmdir()
    page.write_bytes(b"s")
    done = cli("refresh", other, source)
    assert done.returncode == 66
    assert f"there is no directory {other}" in done.stderr
    assert not changes(), "the others were refreshed"
    assert cli("umount", "--all").returncode == 0


def test_refresh_brings_what_hosts_lack_though_nothing_changed(
    cli: Cli, source: Path, workplace: Path, torn: str
) -> None:
    assert cli("mount", source, workplace / "w").returncode == 74
    done = cli("refresh", source)
    assert done.returncode == 74, "it is still not readable"
    assert torn in done.stderr
    subprocess.run(["umount", source / torn], check=True)
    subprocess.run(["mount", "--bind", source / "page", source / torn], check=True)
    done = cli("refresh", source)
    assert done.returncode == 0, done.stderr
    assert (workplace / "w" / torn).read_bytes() == b"p" * 4096
    (source / "new").touch()
    with shorter_than_its_size(source / "torn again"):
        done = cli("refresh", source)
        assert done.returncode == 74
        assert "torn again" in done.stderr
    assert (workplace / "w" / "new").exists(), "all others are there"
    assert cli("umount", source).returncode == 0


def test_a_busy_mount_is_named_and_can_be_forced(cli: Cli, source: Path, workplace: Path) -> None:
    cli("mount", source, workplace / "w")
    holder = subprocess.Popen(["sleep", "60"], cwd=workplace / "w")
    try:
        done = cli("umount", workplace / "w")
        assert done.returncode == 73
        assert f"in use by sleep ({holder.pid})" in done.stderr
        assert "hint:" in done.stderr
        assert cli("umount", "--force", workplace / "w").returncode == 0
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.costly
def test_busy_mounts_keep_no_other_from_being_unmounted(
    cli: Cli, source: Path, workplace: Path
) -> None:
    busy, free = [workplace / "a", workplace / "b"], workplace / "c"
    for place in *busy, free:
        cli("mount", source, place)
    identity = {Path(mount["mntpoint"]): mount["identity"] for mount in mounts_shown(cli)}
    holders = [subprocess.Popen(["sleep", "60"], cwd=place) for place in busy]
    try:
        done = cli("umount", "--json", *sorted(identity.values(), key=identity[free].__eq__))
        assert json.loads(done.stdout) == [identity[free]]
        errors = list(map(json.loads, done.stderr.splitlines()))
        assert sorted(error["message"].split()[0] for error in errors) == list(map(str, busy))
        assert done.returncode == 73
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
    assert len(json.loads(cli("umount", "--all", "--json").stdout)) == 2


def test_what_a_killed_server_left_is_shown_and_cleared(
    cli: Cli, source: Path, workplace: Path
) -> None:
    cli("mount", source, workplace / "w")
    (record,) = mounts_shown(cli)
    os.kill(record["pid"], signal.SIGKILL)
    while points.mounted(str(workplace / "w")) and "dead" not in cli("status").stdout:
        time.sleep(0.1)
    assert cli("umount", workplace / "w").returncode == 0
    assert cli("status").stdout == "nothing is mounted\n"


def test_run_prints_host_by_host_and_ends_with_the_worst_code(cli: Cli, source: Path) -> None:
    script = (
        'cat .hidden; echo "$1 $WHEELMOUNT_MOUNT"; echo oops >&2; exit $((WHEELMOUNT_RANK * 7))'
    )
    (source.parent / "script.sh").write_text(script)
    done = cli("run", source, "--hosts", "local:2", source.parent / "script.sh", "-x")
    assert done.stdout == "".join(f"== host{n} ==\nhidden\n-x {source}\n" for n in (0, 1))
    assert done.returncode == 7
    assert "== host1 stderr ==\noops\n" in done.stderr


def test_run_takes_its_script_from_standard_input(cli: Cli, source: Path) -> None:
    done = cli("run", source, "--json", "-", stdin=None, input="pwd; exit 3")
    (record,) = json.loads(done.stdout)
    assert (record["host"], record["rank"], record["code"]) == ("host0", 0, 3)
    assert record["stdout"] == f"{source}\n"
    assert done.returncode == 3


def test_run_sees_the_mount_and_not_the_directory_below_it(cli: Cli, source: Path) -> None:
    script = "stat -f -c %T .; touch x || true"
    done = cli("run", "--adapter", "pyfuse3", source, "-", stdin=None, input=script)
    assert done.stdout == "fuseblk\n"
    assert "Read-only file system" in done.stderr


def test_a_script_begins_where_its_directory_stays(
    source: Path, workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = ["stat", "-f", "-c", "%T"]
    kind = subprocess.run([*look, workplace / "store"], capture_output=True, text=True, check=True)
    monkeypatch.setattr(pools, "ARRIVAL", 60)  # a machine may be slow, and is then not waited for
    with Cluster("local:1", settings=replace(settings, adapter="bind")) as cluster:
        texts = cluster.run([*look, "."], mount=source).texts
    assert texts == {"host0": kind.stdout}, "the kernel shows the store by itself"


def test_a_host_that_dies_is_an_error_and_the_others_results_are_shown(
    cli: Cli, source: Path
) -> None:
    script = "if [ $WHEELMOUNT_RANK = 1 ]; then kill -9 $PPID; sleep 47; fi; echo fine"
    done = cli("run", source, "--hosts", "local:2", "-", stdin=None, input=script)
    assert done.stdout == "== host0 ==\nfine\n"
    running = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "47"] not in running
    assert "error: host1: " in done.stderr
    assert done.returncode == 68


@pytest.mark.costly
@pytest.mark.parametrize("standing", [1, 4])
def test_a_killed_mount_leaves_nothing_mounted(
    cli: Cli, workplace: Path, settings: Settings, standing: int
) -> None:
    source = workplace / "large"
    source.mkdir()
    (source / "file").write_bytes(os.urandom(64 << 20))
    places = [str(workplace / f"w-host{number}") for number in range(4)]
    command = [sys.executable, "-m", "wheelmount.cli.main", "mount", "--hosts", "local:4"]
    with subprocess.Popen([*command, str(source), f"{workplace}/w-{{host}}"]) as client:
        while client.poll() is None and sum(map(bool, map(points.mounted, places))) < standing:
            time.sleep(0.01)
        client.kill()
    assert client.returncode == -signal.SIGKILL, "it must be on the way"
    deadline = time.monotonic() + 60
    while any(map(points.mounted, places)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(points.mounted, places))
    time.sleep(doctor.MOMENT)
    for left in doctor.leftovers(settings):  # stores that were being made
        doctor.clear(left)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_it_cleans_up(source: Path, workplace: Path, number: int) -> None:
    mark = workplace / "mark"
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", "--hosts", "local:1"]
    command += [str(source), "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as client:
        assert client.stdin is not None
        client.stdin.write(f"touch {mark}; sleep 60".encode())
        client.stdin.close()
        while not mark.exists() and client.poll() is None:
            time.sleep(0.05)
        client.send_signal(number)
        assert client.wait(30) == 128 + number
        assert client.stderr is not None
        assert b"interrupted" in client.stderr.read()


def test_progress_is_plain_lines_without_a_terminal_and_can_be_silenced(
    cli: Cli, source: Path
) -> None:
    lines = cli("run", source, "-", stdin=None, input="true").stderr.splitlines()
    assert [line.partition(":")[0] for line in lines][:1] == ["scan"]
    assert any(line.startswith("run: 1 host in") for line in lines)
    assert not any("\x1b" in line for line in lines)
    assert cli("run", "-q", source, "-", stdin=None, input="true").stderr == ""


def test_a_session_that_cannot_be_read_hinders_no_other(
    cli: Cli, source: Path, workplace: Path
) -> None:
    assert cli("mount", source, f"{workplace}/w-{{host}}", "--hosts", "local:1").returncode == 0
    folder = Session("bad", config.load()).directory
    folder.mkdir(mode=0o700)
    (folder / "session.json").write_text("{")
    kept = workplace / "cache" / "wheelhouses" / "session-bad-1"
    gone = workplace / "cache" / "wheelhouses" / "another"
    for each in (kept, gone):
        each.mkdir(parents=True)
    file = folder / "session.json"
    try:
        for words, said in {
            ("status",): f"{source} at {workplace}/w-host0",
            ("refresh", source): "unchanged",
            ("verify",): "verified",
            ("cache", "clean"): "1 removed",
            ("umount", "--all"): "",
        }.items():
            done = cli(*words)
            assert done.returncode == 68, done.stderr
            assert said in done.stdout
            assert f"the record of session bad is damaged: {file}" in done.stderr
            assert f"delete {folder}" in done.stderr
        assert kept.exists()
        assert not gone.exists()
        assert points.mounted(f"{workplace}/w-host0") is None
        # It may be the one that has this mount.
        done = cli("umount", workplace / "w-host0")
        assert done.returncode == 68, done.stderr
        assert json.loads(cli("status", "--json").stdout)["sessions"][0]["session"] == "bad"
    finally:
        file.unlink()
        folder.rmdir()
    assert cli("status").stdout == "nothing is mounted\n"
