"""Monarch's processes write nothing where others can put links, and are private at once."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import NOBODY
from tests.testbed import LOGIN, Lab
from wheelmount.config import Settings
from wheelmount.hosts import process
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Commands, Result
from wheelmount.hosts.local import LocalHosts

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

LOG = "/tmp/root/monarch_log.log"

TRAPS = {
    "nothing": "true",
    "link": f"mkdir /tmp/root; ln -s /tmp/victim {LOG}",
    "pipe": f"mkdir /tmp/root; mkfifo {LOG}",
    "file": "touch /tmp/root",
}
"""What another user has put in the way, in words of a shell."""

AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A host whose ``/tmp`` is empty at first."""
    with Lab(1) as made:
        yield made


@pytest.mark.costly
@pytest.mark.parametrize("trap", TRAPS)
def test_nothing_is_written_where_others_can_put_links(lab: Lab, trap: str) -> None:
    prepare = ["sh", "-c", f"umask 0; {TRAPS[trap]}"]
    lab.run(LOGIN, ["sh", "-c", "touch /tmp/victim; mkdir -p /mnt/source"], check=True)
    lab.run(LOGIN, [*AS_NOBODY, *prepare], check=True)
    before = lab.run(LOGIN, ["find", "/tmp"]).stdout
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", "--quiet"]
    without = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    where = ["--hosts", "local:2", "--mntpoint", "/mnt/tree", "/mnt/source", "-"]
    done = lab.run(LOGIN, [*command, *where], stdin=None, input="echo ran", env=without)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("ran\n") == 2
    assert lab.run(LOGIN, ["cat", "/tmp/victim"]).stdout == ""
    after = lab.run(LOGIN, ["find", "/tmp"]).stdout
    left = set(after.split()) - set(before.split())
    assert {path for path in left if not path.startswith("/tmp/wheelmount-0")} == set()
    assert {path for path in left if "hosts-" in path or "worker-" in path} == set()
    lab.run(LOGIN, ["sh", "-c", "rm -rf /tmp/root /tmp/victim /tmp/wheelmount-0"], check=True)


STRANGER = """
import os, socket, sys, time
calls = {}
print("looks", flush=True)
os.set_blocking(0, False)
while True:
    try:
        if os.read(0, 1) == b"":
            break
    except BlockingIOError:
        pass
    with open("/proc/net/unix") as table:
        names = [line.split()[7] for line in table if line.split()[3] == "00010000" and "@" in line]
    for name in set(names) - set(calls):
        calls[name] = caller = socket.socket(socket.AF_UNIX)
        caller.setblocking(False)
        try:
            caller.connect(chr(0) + name[1:])
        except OSError:
            pass
time.sleep(1)
for name, caller in calls.items():
    try:
        print(name, "hung up" if caller.recv(1) == b"" else "in")
    except BlockingIOError:
        print(name, "in")
    except OSError:
        print(name, "hung up")
"""


def test_strangers_are_hung_up_on_from_the_first_moment(settings: Settings) -> None:
    command = [*AS_NOBODY, sys.executable, "-I", "-S", "-c", STRANGER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as stranger:  # type: ignore[call-overload]
        assert stranger.stdout.readline() == "looks\n"
        before = _own_names()
        with (
            LocalHosts(2, settings, namespaces=False) as hosts,
            Commands(list(hosts), 30) as commands,
        ):
            commands.run({"host0": Command(("true",)), "host1": Command(("true",))})
            mine = _own_names() - before
            answers = stranger.communicate("", timeout=60)[0].splitlines()
    seen = dict(line.split(" ", 1) for line in answers)
    assert len(mine) >= 2, "one of each host; the client's own may be older"
    assert {seen.get(name) for name in mine} == {"hung up"}


def _own_names() -> set[str]:
    from tests.hosts.test_socketguard import abstract_sockets

    return {f"@{name}" for name in abstract_sockets()}


def test_what_a_user_runs_has_the_usual_rights_and_its_temporary_files_go(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    script = "umask; cd $TMPDIR; pwd; mktemp; env | grep -c -e WHEELMOUNT_BEFORE -e FB_XAR || true"
    monkeypatch.delenv("TMPDIR", raising=False)
    own = _run(settings, script)
    assert own[0] == "0022"
    assert own[1].startswith(f"{settings.private_runtime()}/hosts-")
    assert own[2].startswith(own[1])
    assert own[3] == "0"
    assert not Path(own[1]).exists()
    monkeypatch.setenv("TMPDIR", str(workplace / "work"))
    before = os.umask(0o027)
    try:
        theirs = _run(settings, script)
    finally:
        os.umask(before)
    assert theirs[:2] == ["0027", str(workplace / "work")]
    assert Path(theirs[2]).exists()


def _run(settings: Settings, script: str) -> list[str]:
    with LocalHosts(1, settings) as hosts, Commands(list(hosts), 30) as commands:
        result = commands.run({"host0": Command(script=script.encode())})["host0"]
        assert isinstance(result, Result)
        assert result.stderr == b""
        return result.stdout.decode().split()


MAKE = (
    "import sys; from pathlib import Path; from wheelmount.hosts import process;"
    "print(process.make_directory(Path(sys.argv[1]), 'worker-'), flush=True);"
    "sys.stdin.read()"
)


def test_the_directory_of_a_worker_that_was_killed_goes_with_the_next(workplace: Path) -> None:
    command = [sys.executable, "-c", MAKE, str(workplace)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as killed:  # type: ignore[call-overload]
        first = Path(killed.stdout.readline().strip())
        second = process.make_directory(workplace, "worker-")
        assert first.is_dir()  # its process runs
        killed.kill()
    third = process.make_directory(workplace, "worker-")
    assert not first.exists()
    assert second.is_dir()
    for path in (second, third):
        path.rmdir()


def test_a_directory_of_another_machine_is_left_alone(workplace: Path) -> None:
    """Whose lock is not seen on a network file system."""
    renamed = ["unshare", "--uts", "sh", "-c", 'hostname another; exec "$@"', "sh"]
    command = [sys.executable, "-c", MAKE, str(workplace)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*renamed, *command], text=True, **pipes) as other:  # type: ignore[call-overload]
        theirs = Path(other.stdout.readline().strip())
        other.kill()
    own = process.make_directory(workplace, "worker-")
    assert theirs.is_dir()
    subprocess.run([*renamed, *command], stdin=subprocess.DEVNULL, check=True)
    assert not theirs.exists()
    own.rmdir()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EMFILE])
def test_a_directory_that_cannot_be_locked_is_made_once(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    place = workplace / "work"
    if number == errno.EMFILE:
        with pytest.raises(OSError, match="Too many open files"):
            process.make_directory(place, "worker-")
        assert not list(place.iterdir())
        return
    first, second = (process.make_directory(place, "worker-") for _ in range(2))
    assert set(place.iterdir()) == {first, second}, "it cannot be known whether one is in use"


def test_directories_are_made_by_many_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from wheelmount.hosts import process\n"
        "for _ in range(60): assert process.make_directory(Path(sys.argv[1]), 'kind-').is_dir()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    making = [subprocess.Popen(command) for _ in range(4)]
    assert [each.wait(60) for each in making] == [0] * 4
    assert not list(tmp_path.iterdir())
