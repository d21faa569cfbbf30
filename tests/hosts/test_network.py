"""Hosts over a network: workers in a lab, and a client on another host of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from tests.hosts.told import assert_only_monarch_is_told, environments
from tests.testbed import LOGIN, Lab
from tests.testbed.service import WORKER_PORT, Service, start_workers
from tests.testbed.traces import Traces
from tests.wheels.support import make_wheel
from wheelmount.errors import HostError, InputError, WaitError
from wheelmount.hosts.address import DANGER, SECURE

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

PATH = "/mnt/tree"

WORKER = "wheelmount.hosts.worker"


@pytest.fixture(scope="module")
def lab(shared_source: Path) -> Iterator[Lab]:
    """Four hosts with a worker each."""
    before = Traces()
    with Lab(4, shared=[shared_source.parent]) as made, pytest.MonkeyPatch.context() as environment:
        # As a home directory would be: what the hosts' credentials lie in is one for all.
        environment.setenv("WHEELMOUNT_STATE_DIR", str(shared_source.parent / "state"))
        for name in made.names:  # as many machines have it: their own name is no address for others
            own = f"127.0.0.1 localhost\n127.0.1.1 {name}\n"
            made.run(name, ["tee", "/etc/hosts"], stdin=None, input=own, check=True)
        workers = start_workers(made, SECURE)
        traces = Traces(besides=before)
        yield made
        ended = [each for each in workers if each.process.poll() is not None]
        assert [(each.host, each.process.returncode, each.output()) for each in ended] == []
    assert traces.left() == []


def _spec(lab: Lab, count: int = 4) -> str:
    """What stands for the first hosts, by their addresses."""
    return ",".join(f"tls://{lab.address(host)}:{WORKER_PORT}" for host in lab.hosts[:count])


CLIENT = """
import sys
from wheelmount import remotemount
from wheelmount import config
from wheelmount.hosts.spec import parse
with parse(sys.argv[1]).make(config.load(), namespaces=False) as hosts:
    with remotemount(hosts, sys.argv[2], sys.argv[3]) as mount:
        mount.wait(60)
        print("stands", flush=True)
        sys.stdin.readline()
print("closed")
"""


@pytest.mark.costly
def test_each_host_shows_the_tree_at_the_same_path(lab: Lab, source: Path) -> None:
    command = [sys.executable, "-c", CLIENT, _spec(lab), str(source), PATH]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with lab.popen(LOGIN, command, **pipes) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"stands\n"
        compare = ["diff", "--recursive", "--no-dereference", str(source), PATH]
        for host in lab.hosts:
            done = lab.run(host, compare)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), host
        assert_only_monarch_is_told(environments(lab, "host0"))
        assert lab.run(LOGIN, ["test", "-e", PATH]).returncode == 1, "hosts only"
        assert not Path(PATH).exists()
        for host in lab.names:
            asked = lab.run(lab.hosts[0], [sys.executable, "-c", STRANGER, *_ports(lab, host)])
            answers = asked.stdout.splitlines()
            assert answers, (host, asked)
            assert set(answers) == {"CERTIFICATE_REQUIRED", "hung up"}, (host, asked.stdout)
        out, errors = client.communicate(b"\n", timeout=60)
    assert (out, errors, client.returncode) == (b"closed\n", b"", 0)
    _assert_clean(lab)


STRANGER = """
import socket, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
for word in sys.argv[1:]:
    host, port = word.split(":")
    for wrap in (context.wrap_socket, lambda plain: plain):
        try:
            with wrap(socket.create_connection((host, int(port)), 5)) as caller:
                caller.sendall(b"GET / HTTP/1.0" + bytes(64))
                while caller.recv(64):  # an alert, and then the end
                    pass
                print("hung up")
        except ssl.SSLError as error:
            print((error.reason or "hung up").removeprefix("TLSV13_ALERT_"))
        except TimeoutError:
            print("in")
        except OSError:  # or it listens no more
            print("hung up")
"""


def _ports(lab: Lab, host: str) -> list[str]:
    """Where a host listens to the network."""
    table = Path(f"/proc/{lab.pid(host)}/net/tcp").read_text().splitlines()[1:]
    ports = [line.split()[1] for line in table if line.split()[3] == "0A"]
    return [f"{lab.address(host)}:{int(port.partition(':')[2], 16)}" for port in ports]


def test_without_certificates_a_warning_says_so(lab: Lab, source: Path) -> None:
    open_to_all = f"tcp://{lab.address('host0')}:26601"
    worker = Service(lab, "host0", [sys.executable, "-m", WORKER, open_to_all], 26601)
    worker.await_port()
    assert DANGER in worker.output()
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), "--quiet"]
    where = ["--insecure", "--hosts", open_to_all, "--mntpoint", PATH]
    done = lab.run(LOGIN, [*command, *where, "-"], stdin=None, input="pwd")
    assert (done.returncode, done.stdout) == (0, f"{PATH}\n")
    assert DANGER in done.stderr
    lab.run("host0", ["pkill", "-KILL", "-f", open_to_all], check=True)
    worker.process.wait(10)
    _assert_clean(lab)


def test_hosts_without_certificates_are_to_be_asked_for_each_time(lab: Lab) -> None:
    address = f"tcp://{lab.address('host0')}:26601"
    for words in (["run", "--hosts", address, "/mnt", "-"], ["worker", address]):
        done = lab.run("host0", [sys.executable, "-m", "wheelmount.cli.main", *words])
        assert done.returncode == InputError.exit_code
        assert DANGER in done.stderr
        assert "--insecure" in done.stderr


def test_a_worker_elsewhere_is_given_a_certificate_and_no_authority(lab: Lab, source: Path) -> None:
    address = f"tls://{lab.address('host0')}:26602"
    tool = [sys.executable, "-m", "wheelmount.cli.main"]
    file = source.parent / "host0.pem"
    lab.run(LOGIN, [*tool, "worker", "--issue", address, "--output", str(file)], check=True)
    assert file.stat().st_mode & 0o777 == 0o600
    given = file.read_text()
    assert given.count("BEGIN CERTIFICATE") == 2
    certificate = x509.load_pem_x509_certificates(given.encode())[1]
    with pytest.raises(x509.ExtensionNotFound):
        certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    elsewhere = {**os.environ, "WHEELMOUNT_STATE_DIR": "/tmp/none"}
    command = [*tool, "worker", address, "--credentials", str(file)]
    worker = Service(lab, "host0", command, 26602, env=elsewhere)
    worker.await_port()
    where = ["--hosts", address, "--mntpoint", PATH]
    done = lab.run(LOGIN, [*tool, "run", *where, source, "-"], stdin=None, input="pwd")
    assert done.returncode == 0, (done.stderr, worker.output())
    assert done.stdout.splitlines()[-1] == PATH
    assert lab.run("host0", ["ls", "/tmp/none"]).returncode != 0
    lab.run("host0", ["pkill", "-KILL", "-f", address], check=True)
    worker.process.wait(10)
    _assert_clean(lab)


def test_who_has_other_credentials_is_refused(lab: Lab, source: Path) -> None:
    environment = {**os.environ, "WHEELMOUNT_STATE_DIR": "/tmp/other"}
    environment["WHEELMOUNT_START_TIMEOUT"] = "5"
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), "--quiet"]
    done = lab.run(LOGIN, [*command, "--hosts", _spec(lab, 1), "-"], env=environment)
    assert done.returncode in (HostError.exit_code, WaitError.exit_code), done.stderr
    assert "credentials" in done.stderr
    _assert_clean(lab)


def test_the_command_line_runs_on_workers(lab: Lab, source: Path) -> None:
    script = 'ip -4 -oneline address show eth0; pwd; cat .hidden; exit "$WHEELMOUNT_RANK"'
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), "--quiet"]
    where = ["--hosts", _spec(lab, 2), "--mntpoint", PATH]
    done = lab.run(LOGIN, [*command, *where, "-"], stdin=None, input=script)
    assert (done.returncode, done.stderr) == (1, "")
    for host in lab.hosts[:2]:
        address = lab.address(host)
        section = done.stdout.partition(f"== {address} ==\n")[2].splitlines()
        assert f"inet {address}/24" in section[0]
        assert section[1:3] == [PATH, "hidden"]
    _assert_clean(lab)


COUNTED = """
import sys
from wheelmount.cli.main import main
from wheelmount.hosts import conduit
call = conduit.call
def counted(ticket, key, way, limit):
    connection = call(ticket, key, way, limit)
    print("called", way, connection.version(), file=sys.stderr)
    return connection
conduit.call = counted
sys.argv[0] = "wheelmount"
sys.exit(main())
"""


def test_much_output_comes_by_tls(lab: Lab, source: Path) -> None:
    script = "head -c 20000000 /dev/zero | tr '\\0' x"
    command = [sys.executable, "-c", COUNTED, "run", "-q", "--hosts", _spec(lab, 1)]
    done = lab.run(
        LOGIN, [*command, "--mntpoint", PATH, str(source), "-"], stdin=None, input=script
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == done.stdout.count("x") == 20_000_000
    assert "called 1 TLSv1.3" in done.stderr


def test_an_environment_is_mounted_on_workers(lab: Lab, source: Path) -> None:
    place = source.parent  # which the hosts of the lab see as well
    make_wheel(place / "wheels", "small")
    environment = {"UV_OFFLINE": "1", "UV_NO_CONFIG": "1", "UV_CACHE_DIR": f"{place}/uv"}
    assign = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", *assign, f"WHEELMOUNT_CACHE_DIR={place}/cache", sys.executable]
    command += ["-m", "wheelmount.cli.main", "run", "--with", "small", "--find-links"]
    command += [f"{place}/wheels", "--hosts", _spec(lab, 2), "-"]
    code = "import small, sys; print(small.VALUE, sys.prefix)"
    done = lab.run(LOGIN, command, stdin=None, input=code)
    assert done.returncode == 0, done.stderr
    said = {line for line in done.stdout.splitlines() if line.startswith("1.0 ")}
    assert done.stdout.count("1.0 ") == 2, done.stdout
    assert len(said) == 1  # one path
    _assert_clean(lab)


def test_a_mount_can_be_left_standing_and_taken_down_there(lab: Lab, source: Path) -> None:
    command = [sys.executable, "-m", "wheelmount.cli.main"]
    done = lab.run(LOGIN, [*command, "mount", str(source), PATH, "--hosts", _spec(lab, 1)])
    assert (done.returncode, done.stdout) == (0, f"{lab.address('host0')} {PATH}\n"), done.stderr
    status = lab.run("host0", [*command, "status"]).stdout
    assert f"{source} at {PATH}" in status
    assert "complete" in status
    assert lab.run("host0", ["cat", f"{PATH}/.hidden"]).stdout == "hidden\n"
    done = lab.run("host0", [*command, "umount", PATH])
    assert (done.returncode, done.stderr) == (0, "")
    _assert_clean(lab)


def test_a_session_leaves_workers_as_they_were(lab: Lab, source: Path) -> None:
    command = [sys.executable, "-m", "wheelmount.cli.main"]
    run = [*command, "run", str(source), "--mntpoint", PATH, "--quiet", "-"]
    with _session(lab, LOGIN):
        for _ in range(2):
            done = lab.run(LOGIN, run, stdin=None, input="cat .hidden")
            assert done.stdout.count("hidden\n") == 2, done.stderr
    _assert_clean(lab)


def test_an_interrupted_client_leaves_workers_as_they_were(lab: Lab, source: Path) -> None:
    started, script = source.parent / "started", source.parent / "script"
    script.write_text(f"touch {started}; sleep 100")
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), str(script)]
    command += ["--hosts", _spec(lab, 2), "--mntpoint", PATH]
    for number in (signal.SIGINT, signal.SIGKILL):
        started.unlink(missing_ok=True)
        # In a session of its own, as what nsenter started is asked and not nsenter.
        with lab.popen(LOGIN, ["setsid", "--wait", *command], stderr=subprocess.PIPE) as client:
            while not started.exists():
                assert client.poll() is None, client.communicate()[1]
                time.sleep(0.05)
            signalled = ["pkill", f"-{number}", "--full", "--oldest", "cli.main run"]
            lab.run(LOGIN, signalled, check=True)
            client.communicate(timeout=60)
        _assert_clean(lab)


def test_a_mount_on_this_machine_is_shown_once_though_its_session_shows_it_too(
    lab: Lab, source: Path
) -> None:
    command = [sys.executable, "-m", "wheelmount.cli.main"]
    with _session(lab, "host0"):
        done = lab.run("host0", [*command, "mount", str(source), PATH])
        assert done.returncode == 0, (done.stderr, [_log(lab, host) for host in lab.hosts[:2]])
        mounts = json.loads(lab.run("host0", [*command, "status", "--json"]).stdout)["mounts"]
        assert sorted(mount["host"] for mount in mounts) == sorted(
            lab.address(name) for name in ("host0", "host1")
        )
    _assert_clean(lab)


def _log(lab: Lab, host: str) -> str:
    """What a host's worker printed."""
    return lab.run(host, ["cat", f"/var/log/service-{WORKER_PORT}"]).stdout


@contextlib.contextmanager
def _session(lab: Lab, host: str) -> Iterator[None]:
    """A session of the first two hosts, started on a host; later tests find nothing of it."""
    command = [sys.executable, "-m", "wheelmount.cli.main"]
    try:
        done = lab.run(host, [*command, "up", "--hosts", _spec(lab, 2)])
        assert done.returncode == 0, (done.stderr, [_log(lab, each) for each in lab.hosts[:2]])
        yield
        assert lab.run(host, [*command, "down"]).returncode == 0
    except BaseException:
        lab.run(host, [*command, "down"], timeout=200)
        raise


def _assert_clean(lab: Lab) -> None:
    """Nothing is left on the hosts but the worker; what was told to end may take a moment."""
    python = Path(sys.executable).name
    look = "cat /proc/[0-9]*/comm; cat /proc/self/mountinfo; ls -d /mnt/* /tmp/wheelmount-0/[!w]*/*"
    for host in lab.hosts:
        deadline = time.monotonic() + 90  # mounts of killed clients stay for a minute
        while True:
            seen = lab.run(host, ["sh", "-c", look]).stdout
            left = [word for word in ("wheelmount-0", PATH) if word in seen]
            if (seen.split().count(python) <= 3 and not left) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        assert (seen.split().count(python), left) == (3, []), (seen, _log(lab, host))


def test_a_host_without_a_worker_is_named(lab: Lab, source: Path) -> None:
    spec = f"{_spec(lab)},{lab.address(LOGIN)}:{WORKER_PORT}"
    command = [
        sys.executable,
        "-m",
        "wheelmount.cli.main",
        "run",
        str(source),
        "--hosts",
        spec,
        "-",
    ]
    done = lab.run(LOGIN, command)
    *_, error, hint = done.stderr.splitlines()
    assert done.returncode == HostError.exit_code
    assert error.startswith(f"error: tls://{lab.address(LOGIN)}:{WORKER_PORT} cannot be reached")
    assert hint.startswith("hint: run there: ")
    _assert_clean(lab)


NONSENSE = """
import os, socket
server = socket.create_server(("", 26603))
while True:
    caller, _ = server.accept()
    with caller:
        caller.sendall(b"HTTP/1.1 400 Bad Request" + os.urandom(5000))
"""


def test_what_is_no_worker_is_an_error(lab: Lab, source: Path) -> None:
    server = Service(lab, "host0", [sys.executable, "-c", NONSENSE], 26603)
    server.await_port()
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), "--quiet"]
    impatient = {**os.environ, "WHEELMOUNT_START_TIMEOUT": "5"}
    where = ["--hosts", f"tls://{lab.address('host0')}:26603", "-"]
    done = lab.run(LOGIN, [*command, *where], env=impatient)
    lab.run("host0", ["pkill", "-KILL", "-f", "26603"], check=True)
    server.process.wait(10)
    assert done.returncode in (HostError.exit_code, WaitError.exit_code), done.stderr
    assert done.stderr.startswith("error: ")
    assert lab.address("host0") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "host0"])  # noqa: S104 - refused
def test_a_worker_that_others_could_not_reach_is_refused(lab: Lab, host: str) -> None:
    worker = [sys.executable, "-m", "wheelmount.hosts.worker", f"tls://{host}:1234"]
    done = lab.run("host0", worker)
    assert done.returncode == 2
    assert "which other machines cannot reach" in done.stderr


OTHERS = """
import sys
from wheelmount.errors import HostError
from wheelmount.hosts.local import LocalHosts
from wheelmount.hosts.spec import parse
from wheelmount import config
with LocalHosts(1):
    try:
        parse(sys.argv[1]).make(config.load(), namespaces=False).start()
    except HostError as error:
        print(error.message)
"""


def test_hosts_of_two_kinds_do_not_go_together(lab: Lab) -> None:
    done = lab.run(LOGIN, [sys.executable, "-c", OTHERS, _spec(lab)])
    assert "this process has hosts already" in done.stdout, done.stderr


IMPATIENT = """
import sys
from wheelmount import config
from wheelmount.hosts import host
from wheelmount.hosts.spec import parse
host.FIRST_WAIT = 0.001
with parse(sys.argv[1]).make(config.load(), namespaces=False) as hosts:
    print(len(hosts._unanswered) > 0)
"""


def test_hosts_that_are_called_more_than_once_go_on(lab: Lab) -> None:
    for _ in range(3):  # the same hosts
        done = lab.run(LOGIN, [sys.executable, "-c", IMPATIENT, _spec(lab)])
        assert done.stdout == "True\n", done.stderr


@pytest.fixture
def own_worker(lab: Lab) -> Iterator[Service]:
    """A worker of the first host that people started, which no other test uses."""
    address = f"tls://{lab.address('host0')}:26604"
    command = [sys.executable, "-m", "wheelmount.cli.main", "worker", address]
    worker = Service(lab, "host0", command, 26604)
    worker.await_port()
    yield worker
    assert worker.process.poll() is None, worker.output()
    lab.run("host0", ["pkill", "-KILL", "-f", address], check=True)
    worker.process.wait(10)
    _assert_clean(lab)


def _cat(lab: Lab, source: Path, address: str) -> subprocess.CompletedProcess[str]:
    """Print a file of the tree on the host at an address."""
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), "--quiet"]
    where = ["--hosts", address, "--mntpoint", PATH, "-"]
    return lab.run(LOGIN, [*command, *where], stdin=None, input="cat .hidden")


def _assert_takes_a_client(lab: Lab, source: Path) -> None:
    done = _cat(lab, source, f"tls://{lab.address('host0')}:26604")
    assert (done.returncode, done.stdout) == (0, "hidden\n"), done.stderr


def test_a_worker_whose_monarch_ends_says_so_and_takes_the_next_client(
    lab: Lab, source: Path, own_worker: Service
) -> None:
    # As Monarch ends it, too, where a client is gone that its host has something to tell.
    for times in (1, 2):
        lab.run("host0", ["pkill", "-KILL", "--newest", "-f", "26604"], check=True)
        deadline = time.monotonic() + 60
        while own_worker.output().count("The worker is started again") < times:
            assert time.monotonic() < deadline, own_worker.output()
            time.sleep(0.05)
        own_worker.await_port()
        _assert_takes_a_client(lab, source)
    assert "(signal 9)" in own_worker.output()


@pytest.mark.costly
def test_a_worker_takes_the_next_client_when_one_has_left_with_calls_outstanding(
    lab: Lab, source: Path, own_worker: Service
) -> None:
    address = f"tls://{lab.address('host0')}:26604"
    command = [sys.executable, "-c", CLIENT, address, str(source), PATH]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for _ in range(2):
        with lab.popen(LOGIN, command, **pipes) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"stands\n"
            lab.run("host0", ["pkill", "-STOP", "-f", "26604"], check=True)
            client.communicate(b"\n", timeout=60)  # it gives up
            lab.run("host0", ["pkill", "-CONT", "-f", "26604"], check=True)
            os.kill(own_worker.process.pid, signal.SIGCONT)  # nsenter stops with its child
        _assert_unmounted(lab)
        _assert_takes_a_client(lab, source)


def _assert_unmounted(lab: Lab) -> None:
    deadline = time.monotonic() + 90  # what a client left goes after a minute
    while PATH in lab.run("host0", ["cat", "/proc/self/mountinfo"]).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.costly
def test_a_worker_survives_clients_that_are_killed_at_any_moment(
    lab: Lab, source: Path, own_worker: Service
) -> None:
    address = f"tls://{lab.address('host0')}:26604"
    for number in range(20):
        path = f"{PATH}{number}"  # a killed client's mount stays for a minute
        command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(source), "--quiet"]
        command += ["--hosts", address, "--mntpoint", path, "-"]
        with lab.popen(LOGIN, ["setsid", "--wait", *command], stdin=subprocess.PIPE) as client:
            assert client.stdin is not None
            client.stdin.write(b"sleep 100" if number % 2 else b"seq 100000 >&2")
            client.stdin.close()
            time.sleep(0.2 + 0.15 * number)
            lab.run(LOGIN, ["pkill", "-KILL", "--full", f"cli.main run.*{path}"])
            client.wait(60)
    _assert_takes_a_client(lab, source)


def test_a_worker_whose_port_is_in_use_says_so_and_ends(lab: Lab, own_worker: Service) -> None:
    address = f"tls://{lab.address('host0')}:26604"
    for words in (["wheelmount.cli.main", "worker"], ["wheelmount.hosts.worker"]):
        done = lab.run("host0", [sys.executable, "-m", *words, address])
        assert done.returncode != 0
        assert f"nothing can be served at {address}: " in done.stderr
        assert "Traceback" not in done.stderr


def test_a_worker_ends_with_the_signal_that_it_is_sent(lab: Lab) -> None:
    address = f"tls://{lab.address('host0')}:26605"
    for number in (signal.SIGTERM, signal.SIGINT):
        command = [sys.executable, "-m", "wheelmount.cli.main", "worker", address]
        worker = Service(lab, "host0", command, 26605)
        worker.await_port()
        # Only the first of its two processes is told.
        lab.run("host0", ["pkill", f"-{number}", "--oldest", "-f", address], check=True)
        assert worker.process.wait(30) == 128 + number, worker.output()
        assert lab.run("host0", ["pgrep", "-f", address]).returncode == 1
    _assert_clean(lab)


def test_a_worker_is_reached_by_another_name_than_its_own(lab: Lab, source: Path) -> None:
    named = "tls://host0:26606"
    ip = lab.address("host0")
    known = f"127.0.0.1 localhost\n{ip} host0\n"
    before = {host: lab.run(host, ["cat", "/etc/hosts"]).stdout for host in ("host0", LOGIN)}

    def know(host: str, text: str) -> None:
        lab.run(host, ["tee", "/etc/hosts"], stdin=None, input=text, check=True)

    try:
        know("host0", known)
        know(LOGIN, known)
        worker = Service(lab, "host0", [sys.executable, "-m", WORKER, named], 26606)
        worker.await_port()
        done = _cat(lab, source, f"tls://{ip}:26606")
        assert (done.returncode, done.stdout) == (0, "hidden\n"), done.stderr
        know(LOGIN, "127.0.0.1 localhost\n")
        done = _cat(lab, source, f"tls://{ip}:26606")
        assert done.returncode == HostError.exit_code
        assert f"the worker at tls://{ip}:26606 calls itself {named}" in done.stderr
        lab.run("host0", ["pkill", "-KILL", "-f", named], check=True)
        worker.process.wait(10)
    finally:
        for host, text in before.items():
            know(host, text)
    _assert_clean(lab)
