"""The lab: hosts that are apart from each other and from the machine, and leave it as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.testbed import LOGIN, Lab
from tests.testbed.init import mount
from tests.testbed.space import CHECKOUT
from tests.testbed.traces import Traces, seen_outside
from wheelmount.errors import HostError, InputError, UnavailableError, WheelmountError

pytestmark = pytest.mark.lab

PORT = 7000


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as place:
        yield Path(place)


@pytest.fixture(scope="module")
def lab(shared: Path) -> Iterator[Lab]:
    before = Traces()
    with Lab(2, shared=[shared]) as made:
        traces = Traces(besides=before)
        assert len(traces) == 4 * 4, "outside, login and two hosts have namespaces each"
        yield made
    assert traces.left() == []


def _output(lab: Lab, name: str, *argv: str | Path) -> str:
    return lab.run(name, argv, check=True).stdout.strip()


def _listen(lab: Lab, name: str, code: str) -> subprocess.Popen[bytes]:
    """A server on a host: one connection ``c`` after the other is given to ``code``."""
    server = f"""
import socket
server = socket.create_server(("", {PORT}))
print("listens", flush=True)
while True:
    c, _ = server.accept()
    {code}
    c.close()
"""
    process = lab.popen(name, [sys.executable, "-c", server], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listens\n"
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _connect(lab: Lab, name: str, to: str, code: str = "print(c.recv(99).decode())") -> str | None:
    """What a client on a host prints, connected to another host; None if it does not get there."""
    client = f"import socket; c = socket.create_connection(({to!r}, {PORT}), 1); {code}"
    done = lab.run(name, [sys.executable, "-c", client])
    return None if done.returncode else done.stdout.strip()


def test_hosts_have_names_and_addresses_and_reach_each_other(lab: Lab) -> None:
    assert lab.names == [LOGIN, "host0", "host1"]
    for name in lab.names:
        assert _output(lab, name, "hostname") == name
        own = json.loads(_output(lab, name, "ip", "-json", "-4", "address", "show", "eth0"))
        assert own[0]["addr_info"][0]["local"] == lab.address(name)
    server = _listen(lab, "host1", "c.sendall(socket.gethostname().encode())")
    try:
        assert _connect(lab, LOGIN, "host1") == "host1"
        assert _connect(lab, "host0", lab.address("host1")) == "host1"
        assert _connect(lab, "host0", "localhost") is None, "ports are a host's own"
    finally:
        _end(server)


def test_nothing_leads_out_of_the_lab(lab: Lab) -> None:
    assert _output(lab, LOGIN, "ls", "/sys/class/net").split() == ["eth0", "lo"]
    assert "default" not in _output(lab, LOGIN, "ip", "route")
    assert seen_outside(lab) == []


def test_hosts_have_processes_of_their_own(lab: Lab) -> None:
    sleeper = lab.popen("host0", ["sleep", "600"])
    _await(lambda: "sleep" in _running(lab, "host0"))
    assert "sleep" not in _running(lab, "host1")
    _end(sleeper)
    _await(lambda: "sleep" not in _running(lab, "host0"))


def _running(lab: Lab, name: str) -> list[str]:
    return lab.run(name, ["sh", "-c", "cat /proc/[0-9]*/comm"]).stdout.split()


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_hosts_have_files_and_mounts_of_their_own(lab: Lab) -> None:
    name = f"wheelmount-lab-{os.getpid()}"
    paths = [f"/{place}/{name}" for place in ("etc", "mnt", "tmp", "var/tmp", "run", "dev/shm")]
    _output(lab, "host0", "mkdir", *paths)
    _output(lab, "host0", "mount", "-t", "tmpfs", "none", f"/mnt/{name}")
    _output(lab, "host0", "touch", f"/mnt/{name}/file")
    for path in paths:
        assert _output(lab, "host0", "stat", "-c", "%F", path) == "directory"
        assert lab.run("host1", ["test", "-e", path]).returncode == 1
        assert not Path(path).exists()
    assert _output(lab, "host0", "ls", f"/mnt/{name}") == "file"
    assert name not in Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    assert _output(lab, "host1", "ls", "/run") == ""


def test_what_is_shared_is_one_and_the_same(lab: Lab, shared: Path) -> None:
    (shared / "outside").write_text("1")
    _output(lab, "host0", "cp", shared / "outside", shared / "inside")
    assert _output(lab, "host1", "cat", shared / "inside") == "1"
    assert (shared / "inside").read_text() == "1"
    assert _output(lab, "host1", "stat", "-c", "%i", CHECKOUT) == str(CHECKOUT.stat().st_ino)


def test_mounts_that_a_process_serves_are_not_touched_or_held(shared: Path) -> None:
    place = shared / "served"
    place.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR)  # one that never answers: who asks it waits
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    mount("none", place, "fuse", options=options)
    try:
        with Lab(1) as lab:
            for pid in (lab.pid("host0"), lab.outer):
                assert str(place) not in Path(f"/proc/{pid}/mountinfo").read_text(
                    errors="surrogateescape"
                )
    finally:
        os.close(server)
        subprocess.run(["umount", place], check=True)


def test_what_came_of_a_command_is_told(lab: Lab, shared: Path) -> None:
    done = lab.run("host0", ["sh", "-c", "pwd; echo bad >&2; exit 3"], cwd=shared)
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{shared}\n", "bad\n")
    assert lab.run("host0", ["sh", "-c", "kill -9 $$"]).returncode == -signal.SIGKILL
    assert lab.run("host0", ["cat"], stdin=None, input="text").stdout == "text"
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run("host0", ["sleep", "600"], timeout=0.2)
    with pytest.raises(subprocess.CalledProcessError):
        lab.run("host0", ["false"], check=True)


def _segments(lab: Lab, name: str) -> int:
    """Most segments of a packet that a host gives its card."""
    said = _output(lab, name, "ip", "-details", "-json", "link", "show", "eth0")
    return int(json.loads(said)[0]["gso_max_segs"])


def test_connections_share_links_as_by_default_on_linux(lab: Lab) -> None:
    assert "congctl cubic" in _output(lab, "host0", "ip", "route", "show")


def _held_back(lab: Lab, where: str, device: str) -> int:
    """Packets that a device could not send at once, because of its rate."""
    command = ["tc", "-statistics", "-json", "qdisc", "show", "dev", device]
    if where == "bridge":
        outer = lab.outer
        enter = ["nsenter", "--target", str(outer), "--net", "--", *command]
        text = subprocess.run(enter, capture_output=True, text=True, check=True).stdout
    else:
        text = _output(lab, where, *command)
    (found,) = [each for each in json.loads(text) if each.get("root")]
    assert found["kind"] in ("tbf", "noqueue")
    return int(found.get("overlimits", 0)) if found["kind"] == "tbf" else -1


def test_links_are_shaped_in_both_directions(lab: Lab) -> None:
    server = _listen(lab, "host1", "c.sendall(c.recv(1 << 22, socket.MSG_WAITALL))")
    send = "c.settimeout(None); c.sendall(bytes(1 << 22)); print(len(c.recv(1 << 22, 256)))"
    try:
        assert _held_back(lab, "host1", "eth0") == _held_back(lab, "bridge", "host1") == -1
        lab.shape("100mbit", "host1")
        assert _connect(lab, "host0", "host1", send) == str(1 << 22)
        assert _held_back(lab, "host1", "eth0") > 0, "what it sends"
        assert _held_back(lab, "bridge", "host1") > 0, "what it receives"
        assert _held_back(lab, "host0", "eth0") == -1, "no other host"
        assert _segments(lab, "host1") == 1, "as on the wire: the queue of a slow link is short"
        assert _segments(lab, "host0") > 40
    finally:
        lab.shape(None)
        _end(server)
    assert _segments(lab, "host1") == _segments(lab, "host0")
    assert _held_back(lab, "host1", "eth0") == _held_back(lab, "bridge", "host1") == -1


def test_a_cable_can_be_pulled_and_put_in_again(lab: Lab) -> None:
    server = _listen(lab, "host1", "c.sendall(b'here')")
    try:
        lab.unplug("host1")
        assert _connect(lab, "host0", "host1") is None
        lab.plug("host1")
        _await(lambda: _connect(lab, "host0", "host1") == "here")
    finally:
        _end(server)


def test_a_killed_host_is_gone_and_others_stay() -> None:
    with Lab(2, rate="1gbit") as lab:
        assert _held_back(lab, "host1", "eth0") >= 0
        sleeper = lab.popen("host0", ["sleep", "600"])
        _await(lambda: "sleep" in _running(lab, "host0"))
        lab.kill("host0")
        assert sleeper.wait(10) == -signal.SIGKILL
        with pytest.raises(HostError, match="host0 is not there any more"):
            lab.run("host0", ["true"])
        with pytest.raises(HostError, match="host0 is not there any more"):
            lab.shape(None, "host0")
        lab.shape(None)
        assert _output(lab, "host1", "hostname") == "host1"


def test_two_labs_at_once_do_not_see_each_other(lab: Lab) -> None:
    with Lab(1) as other:
        assert other.address("host0") == lab.address("host0")
        server = _listen(other, "host0", "c.sendall(b'other')")
        try:
            assert _connect(other, LOGIN, "host0") == "other"
            assert _connect(lab, LOGIN, "host0") is None
        finally:
            _end(server)


def test_ending_it_ends_what_runs_and_is_mounted() -> None:
    before = Traces()
    with Lab(1) as lab:
        _output(lab, "host0", "mount", "-t", "tmpfs", "none", "/mnt")
        sleeper = lab.popen("host0", ["sh", "-c", "setsid sleep 600 & cd /mnt; exec sleep 600"])
        _await(lambda: _running(lab, "host0").count("sleep") == 2)
        traces = Traces(besides=before)
        assert len(traces) == 3 * 4
    assert sleeper.wait(10) == -signal.SIGKILL
    assert traces.left() == []
    lab.stop()


def test_killing_who_made_it_ends_it() -> None:
    code = """
import sys
from tests.testbed import Lab
lab = Lab(2, rate="1gbit")
lab.start()
lab.popen("host0", ["sleep", "600"])
lab.run("host1", ["mount", "-t", "tmpfs", "none", "/mnt"])
print("stands", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=CHECKOUT
    ) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"stands\n"
        traces = Traces(maker.pid)
        assert len(traces) == 4 * 4
        maker.kill()
    assert traces.left() == []


def test_what_cannot_be_made_is_refused_and_nothing_stays() -> None:
    before = Traces()
    with pytest.raises(InputError):
        Lab(0)
    with pytest.raises(UnavailableError, match="tc failed") as error:
        Lab(1, rate="fast").start()
    assert error.value.hint
    with pytest.raises(WheelmountError, match=r"did not come up.*missing-directory"):
        Lab(1, shared=["/tmp/missing-directory/file"]).start()
    assert len(Traces(besides=before)) == 0


def test_a_machine_that_lacks_programs_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnavailableError, match="not installed: ip, tc"):
        Lab(1).start()


def test_the_command_line_runs_on_the_login_host(shared: Path) -> None:
    script = 'hostname; getent hosts $TESTBED_HOSTS; pwd; cat; touch /etc/left "$1"; exit 7'
    command = ["-m", "tests.testbed", "--hosts", "2", "--share", str(shared), "--", "sh", "-c"]
    done = subprocess.run(
        [sys.executable, *command, script, "sh", shared / "kept"],
        input="given",
        capture_output=True,
        text=True,
        timeout=60,
        cwd=CHECKOUT,
    )
    assert done.stdout.split() == [
        LOGIN, "10.77.0.11", "host0", "10.77.0.12", "host1", str(CHECKOUT), "given",
    ]  # fmt: skip
    assert done.returncode == 7
    assert (shared / "kept").exists()
    assert not Path("/etc/left").exists()


def test_the_command_line_says_what_is_wrong() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.testbed", "--rate", "fast", "--", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=CHECKOUT,
    )
    assert done.returncode == UnavailableError.exit_code
    assert "error: tc failed" in done.stderr
