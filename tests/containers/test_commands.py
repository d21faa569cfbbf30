"""``exec``, ``shell``, ``run --image``, ``overlay`` and ``instance`` as a user has them."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cli.test_launcher import ODD
from tests.conftest import Cli
from tests.containers.conftest import make_wheel
from tests.containers.test_running import processes, wait_until
from wheelmount import config
from wheelmount.containers.overlay import name_for
from wheelmount.hosts.address import Address
from wheelmount.hosts.session import Session

pytestmark = [pytest.mark.containers, pytest.mark.hosts, pytest.mark.timeout(600)]

COMMAND = [sys.executable, "-m", "wheelmount.cli.main"]


@pytest.fixture
def job(workplace: Path, sif: Path, wheels: Path) -> Path:
    """A directory with an image beside its packages."""
    folder = workplace / "work" / "job"
    folder.mkdir()
    (folder / "img.sif").hardlink_to(sif) if _same_disk(folder, sif) else (
        folder / "img.sif"
    ).write_bytes(sif.read_bytes())
    (folder / "packages").mkdir()
    for wheel in wheels.iterdir():
        (folder / "packages" / wheel.name).write_bytes(wheel.read_bytes())
    return folder


def _same_disk(one: Path, other: Path) -> bool:
    return one.stat().st_dev == other.stat().st_dev


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.costly
@pytest.mark.fuse
def test_the_image_comes_with_the_mount(cli: Cli, job: Path, sif: Path) -> None:
    who = 'echo "$APPTAINER_CONTAINER $WHEELMOUNT_HOST $WHEELMOUNT_RANK"; pip install -q greeting'
    hosts = ["--packages", job, "--hosts", "local:2", "--json"]
    for rank, record in enumerate(records(cli("exec", *hosts, "--", "sh", "-c", who))):
        assert record["code"] == 0, record
        assert str(record["stdout"]).endswith(f"-host{rank}/img.sif host{rank} {rank}\n")
    mixed = cli("exec", *hosts, "--image", f"host0=img.sif,host1={sif}", "--", "sh", "-c", who)
    images = [str(record["stdout"]).split()[0] for record in records(mixed)]
    assert images[0].endswith("-host0/img.sif")
    assert images[1] == str(sif)


@pytest.mark.fuse
@pytest.mark.network
@pytest.mark.parametrize("image", [[], ["--image", "img.sif"]], ids=["beside", "by its name"])
def test_an_environment_for_the_image_that_comes_with_the_mount(
    cli: Cli, job: Path, image: list[str]
) -> None:
    needed = ["--with", "greeting", "--find-links", job / "packages"]
    done = cli("exec", "--packages", job, *image, *needed, "--", "python", "-c", "import greeting")
    assert done.returncode == 0, done.stderr


def test_a_command_in_a_container_gets_its_words_byte_for_byte(cli: Cli, sif: Path) -> None:
    show = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    done = cli("exec", "-i", "-q", "--image", sif, "python3", "-c", show, *ODD)
    assert (done.returncode, done.stdout) == (0, "\0".join(ODD)), done.stderr
    assert "Usage: /usr/bin/df" in cli("exec", "-i", "--image", sif, "df", "--help").stdout


@pytest.mark.fuse
def _call(*words: object, data: bytes = b"") -> tuple[int, bytes, int]:
    """Exit code and output of a command, by a pipe, and the number of the pipe."""
    reading, writing = os.pipe()
    command = [*COMMAND, *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writing) as client:
        pipe = os.fstat(writing).st_ino
        os.close(writing)
        feeder = threading.Thread(target=client.communicate, args=(data,))
        feeder.start()
        with open(reading, "rb") as file:
            said = file.read()
        feeder.join(60)
        return client.wait(60), said, pipe


@pytest.mark.costly
@pytest.mark.parametrize("interactive", [["-i"], []], ids=["interactive", "plain"])
def test_a_container_has_the_streams_of_its_client(sif: Path, interactive: list[str]) -> None:
    """Nothing is between its command and a pipe, and so nothing is slower or lost."""
    container = ["exec", "-q", *interactive, "--image", sif]
    code, said, pipe = _call(*container, "sh", "-c", "readlink /proc/self/fd/1; exit 3")
    assert (code, said) == (3, b"pipe:[%d]\n" % pipe)
    data = os.urandom(20_000_000)
    assert _call(*container, "cat", data=data)[:2] == (0, data)
    code, said, _ = _call(*container, "--timeout", "1", "sh", "-c", "echo begun; sleep 100")
    assert (code, said) == (124, b"begun\n")


@pytest.mark.parametrize("interactive", [["-i"], []], ids=["interactive", "plain"])
def test_a_reader_that_goes_ends_the_command(sif: Path, interactive: list[str]) -> None:
    words = ["exec", "-q", *interactive, "--image", str(sif), "yes", "no reader"]
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"no reader\n"
        client.stdout.close()
        assert client.wait(60) != 0
    assert not processes("no reader")


def test_what_an_instance_goes_on_with_keeps_no_reader_waiting(cli: Cli, sif: Path) -> None:
    work = ["exec", "-q", "-i", "--instance", "stays", "--image", sif, "sh", "-c"]
    try:
        stays = (
            "setsid sh -c 'echo >/tmp/up; exec sleep 1357' & until [ -e /tmp/up ]; do sleep .1; "
        )
        assert _call(*work, f"{stays} done; echo begun")[:2] == (0, b"begun\n")
        assert processes("1357")
    finally:
        assert cli("instance", "stop", "stays").returncode == 0


@pytest.mark.costly
def test_what_an_instance_says_is_shown_and_followed(cli: Cli, sif: Path, workplace: Path) -> None:
    program, go = workplace / "startscript", workplace / "go"
    go.mkdir()
    program.write_text(
        "#!/bin/sh\necho first; until [ -e /go/now ]; do sleep 0.1; done\n"
        "echo second >&2; sleep 1000\n"
    )
    program.chmod(0o755)
    binds = ["--bind", f"{program}:/.singularity.d/startscript", "--bind", f"{go}:/go"]
    try:
        start = ["exec", "-q", "--instance", "talks", "--image", sif, *binds, "--", "true"]
        assert cli(*start).returncode == 0
        wait_until(lambda: "first" in cli("instance", "logs", "talks").stdout)
        (record,) = map(json.loads, cli("instance", "logs", "talks", "--json").stdout.splitlines())
        assert (record["owner"], record["line"]) == ("instance talks host0", "first")
        for words in (["logs", "talks"], ["instance", "logs", "talks"]):
            assert cli(*words).stdout == "instance talks host0: first\n"
        there = cli("instance", "logs", "talks", "--hosts", "local:1")
        assert there.stdout == "== host0 ==\ninstance talks host0: first\n", there.stderr
        follow = [*COMMAND, "instance", "logs", "--follow", "talks"]
        with subprocess.Popen(follow, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            assert following.stdout.readline() == "instance talks host0: first\n"
            (go / "now").touch()
            assert following.stdout.readline() == "instance talks host0: second\n"
            assert cli("instance", "stop", "talks").returncode == 0
            assert (following.stdout.read(), following.wait(60)) == ("", 0), "it ends with it"
        missing = cli("instance", "logs", "talks")
        assert (missing.returncode, missing.stdout) == (71, "")
        assert "there is no instance talks on this machine" in missing.stderr
    finally:
        cli("instance", "stop", "talks")


def test_variables_are_set_in_a_container(
    cli: Cli, sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN", "of here\nand more")
    given = ["--image", sif, "--env", "PLAIN", "--env", "GIVEN=a='b' $(id)", "--hosts", "local:1"]
    done = cli("exec", "-q", *given, "--", "sh", "-c", 'printf "%s|%s" "$PLAIN" "$GIVEN"')
    assert (done.returncode, done.stdout) == (0, "of here\nand more|a='b' $(id)"), done.stderr


@pytest.mark.fuse
def test_where_and_for_how_long_a_container_runs(cli: Cli, sif: Path) -> None:
    mark = "14142.1356"
    given = ["--image", sif, "--hosts", "local:2", "--on", "host1", "--cwd", "/usr/lib"]
    script = "pwd; echo $WHEELMOUNT_HOST $WHEELMOUNT_RANK of $WHEELMOUNT_SIZE"
    done = cli("exec", *given, "--", "sh", "-c", script)
    assert done.stdout == "/usr/lib\nhost1 0 of 1\n", done.stderr
    script = f"setsid sleep {mark} & sleep {mark}"
    done = cli("exec", "-q", *given, "--timeout", "3", "--", "sh", "-c", script)
    assert done.returncode == 124
    assert done.stderr.endswith("error: the command was ended: it took longer than 3 s\n")
    assert not processes(mark)


def test_a_container_without_its_bounds_does_not_start(cli: Cli, sif: Path) -> None:
    script = "print(len(bytearray(1 << 30)))"
    given = ["--image", sif, "--memory", "200M", "--cpus", "1.5", "--", "python3", "-c", script]
    done = cli("exec", "-q", *given)
    if Path("/run/systemd/system").is_dir():  # where it can be bounded, it is
        assert done.returncode == 128 + signal.SIGKILL
    else:
        assert (done.returncode, done.stdout) == (71, ""), done.stderr
        assert "leave --memory and --cpus out" in done.stderr


@pytest.mark.fuse
def test_programs_read_why_a_container_does_not_start(cli: Cli, sif: Path, workplace: Path) -> None:
    other = workplace / "other.sif"
    image = sif.read_bytes()
    other.write_bytes(image[:48] + bytes(16) + image[64:])  # its own number
    run = ["exec", "--hosts", "local:2", "--overlay", "mine", "--image"]
    assert cli(*run, sif, "true").returncode == 0
    done = cli(*run, other, "--json", "true")
    error = json.loads(done.stderr.splitlines()[-1])
    assert (done.returncode, error["code"]) == (64, 64)
    for record in records(done):
        host = record["host"]
        assert record["code"] == 64
        assert f"overlay mine of {host} goes with another image: " in str(record["error"])
        assert "wheelmount overlay rm mine" in str(record["hint"])
    plain = cli(*run, other, "--on", "host1", "true")
    assert "error: host1: overlay mine of host1 goes with another image: " in plain.stderr
    assert (plain.returncode, plain.stdout) == (64, "")


@pytest.mark.costly
def test_what_containers_leave_comes_back(cli: Cli, sif: Path, workplace: Path) -> None:
    out = workplace / "work" / "out"

    def leave(path: str, script: str, *given: str) -> subprocess.CompletedProcess[str]:
        collect = ["--collect", path, "out", "--overwrite", "--image", sif, *given]
        return cli("exec", "-q", *collect, "--", "sh", "-c", script)

    done = leave("results", "mkdir results; echo one >results/one; exit 3", "--hosts", "local:2")
    assert done.returncode == 3, done.stderr
    assert [(out / host / "one").read_text() for host in ("host0", "host1")] == ["one\n"] * 2
    assert leave("/tmp/two", "echo two >/tmp/two; sleep 1000", "--timeout", "4").returncode == 124
    assert (out / "host0" / "two").read_text() == "two\n"
    script = 'cd "$WHEELMOUNT_OUTPUT"; echo three >three; ln -s /etc etc; pwd'
    done = leave("$WHEELMOUNT_OUTPUT", script)
    assert done.returncode == 74
    assert "'etc' (it leads out)" in done.stderr
    assert (out / "host0" / "three").read_text() == "three\n"
    done = leave("$WHEELMOUNT_OUTPUT/etc/passwd", script)
    assert done.returncode == 66
    assert "there is nothing at $WHEELMOUNT_OUTPUT/etc/passwd" in done.stderr
    # What is there on the host only is not in the container.
    done = leave(str(workplace), "true")
    assert done.returncode == 66
    assert f"there is nothing at {workplace} in the container" in done.stderr
    assert sorted(path.name for path in (out / "host0").iterdir()) == ["one", "three", "two"]
    try:
        done = leave("/tmp/four", "echo four >/tmp/four", "--instance", "one")
        assert done.returncode == 0, done.stderr
        assert (out / "host0" / "four").read_text() == "four\n"
    finally:
        cli("instance", "stop", "one")


@pytest.mark.fuse
def test_a_script_runs_in_a_container_that_shows_the_directory(
    cli: Cli, job: Path, workplace: Path
) -> None:
    (job / "data").write_text("data\n")
    (workplace / "work" / "script").write_text(
        'cat data; echo "$1 $WHEELMOUNT_RANK"; uv pip install -q hello && python -c "import hello"'
        '\n[ "$PWD" = "$WHEELMOUNT_MOUNT" ] && ! touch data 2>&1; '
        "[ $(wc -l </proc/net/dev) = 3 ] && exit 4"
    )
    done = cli("run", job, "--image", "img.sif", "--hosts", "local:2", "script", "--an-argument")
    assert done.returncode == 4, done.stderr
    for rank in (0, 1):
        assert f"== host{rank} ==\ndata\n--an-argument {rank}\n" in done.stdout
    assert done.stdout.count("Read-only file system") == 2


@pytest.mark.costly
@pytest.mark.parametrize("chosen", [True, False], ids=["of the client", "of the host"])
def test_overlays_and_instances_of_hosts_are_found_there(
    chosen: bool, cli: Cli, sif: Path, workplace: Path
) -> None:
    """On a host with another home directory, whose worker this client did not start."""
    here, there = dict(os.environ), {**os.environ, "HOME": str(workplace / "home")}
    for name in ("WHEELMOUNT_STATE_DIR", "XDG_STATE_HOME"):
        there.pop(name, None)
        if not chosen:
            here.pop(name, None)
    if chosen:
        there["WHEELMOUNT_RUNTIME_DIR"] = str(workplace / "home")
    else:
        here["HOME"] = str(workplace / "client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    worker = [sys.executable, "-m", "wheelmount.hosts.worker", address]
    hosts = ["--insecure", "--hosts", address]
    with subprocess.Popen(worker, env=there) as service:
        try:
            Address.parse(address).await_answer(30, patience=60)
            run = ["exec", *hosts, "--image", sif, "--instance", "one", "--overlay", "mine"]
            done = cli(*run, "--", "true", env=here)
            assert done.returncode == 0, done.stderr
            assert "mine" in cli("overlay", "ls", *hosts, env=here).stdout
            assert "one  " in cli("instance", "ls", *hosts, env=here).stdout
        finally:
            assert cli("instance", "stop", "one", *hosts, env=here).returncode == 0
            service.terminate()
    found = [each.parent for each in workplace.rglob("overlays")]
    default = workplace / "home" / ".local" / "state" / "wheelmount"
    assert found == [workplace / "state" if chosen else default]


@pytest.mark.costly
@pytest.mark.fuse
def test_an_instance_keeps_its_packages(cli: Cli, job: Path, sif: Path) -> None:
    both = ["--hosts", "local:2"]
    start = ["exec", *both, "--instance", "one", "--packages", job]
    assert cli(*start, "--", "pip", "install", "greeting").returncode == 0
    up = records(cli("instance", "ls", "--json"))
    assert [(each["host"], each["running"]) for each in up] == [("host0", True), ("host1", True)]
    again = cli("exec", *both, "--instance", "one", "--", "sh", "-c", "ls /packages; id -u")
    assert again.stdout.count("greeting-2.0") == 2
    assert cli(*start, "--", "true").returncode == 0
    typed = cli(
        "exec", "-i", *both, "--on", "host1", "--instance", "one", "--", "cat", stdin=None,
        input="typed\n",
    )  # fmt: skip
    assert typed.stdout == "typed\n"
    used = records(cli("overlay", "ls", "--json"))
    assert all("instance one" in str(each["user"]) for each in used)
    refused = cli("overlay", "rm", name_for(job / "img.sif"))
    assert refused.returncode == 71
    assert "in use by instance one" in refused.stderr
    assert cli("instance", "stop", "one").stdout == "one host0 stopped\none host1 stopped\n"
    assert _mounts(cli) == []
    assert cli("exec", "--instance", "one", "--", "true").returncode == 71
    assert cli("instance", "stop", "one").returncode == 71
    assert cli("overlay", "rm", name_for(job / "img.sif")).stdout.count("removed") == 2


@pytest.mark.costly
@pytest.mark.fuse
@pytest.mark.parametrize("hosts", [["--hosts", "local:1"], []])
def test_an_instance_shows_packages_as_they_are_now(
    hosts: list[str], cli: Cli, job: Path, sif: Path
) -> None:
    if not hosts:
        assert cli("up", "--hosts", "local:1").returncode == 0
    other = Session("other", config.load()).directory
    wheel = job / "packages" / "hello-1.0-py3-none-any.whl"
    command = ["exec", *hosts, "--instance", "one", "--packages", job, "--image", sif, "-q", "--"]
    look = [*command, "sh", "-c", f"sha256sum </packages/{wheel.name}"]
    try:
        assert cli(*command, "true").returncode == 0
        wheel.unlink()
        make_wheel(wheel.parent, "hello", "1.0", requires="greeting")
        made = f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  -\n"
        if hosts:  # another session, whose mounts are unknown, is none of the instance's business
            other.mkdir(parents=True, mode=0o700)
            (other / "session.json").write_text("{")
        assert cli(*look).stdout == made
        assert cli(*look).stdout == made
    finally:
        shutil.rmtree(other, ignore_errors=True)
        assert cli("instance", "stop", "one").returncode == 0
        if not hosts:
            assert cli("down").returncode == 0


@pytest.mark.costly
@pytest.mark.fuse
def test_a_session_sends_packages_once(cli: Cli, job: Path) -> None:
    assert cli("up", "--hosts", "local:2").returncode == 0
    try:
        install = ["exec", "--packages", job, "--", "pip", "install", "-q"]
        assert cli(*install, "hello").returncode == 0
        assert cli(*install, "greeting").returncode == 0
        assert cli("exec", "--packages", job, "--instance", "one", "--", "true").returncode == 0
        (mounted,) = {each["mntpoint"] for each in _mounts(cli) if each["host"] == "host0"}
        assert cli("instance", "stop", "one").returncode == 0
        assert mounted in {each["mntpoint"] for each in _mounts(cli)}, "it is the session's"
        status = cli("status", "--each").stdout
        assert f"overlay {name_for(job / 'img.sif')}  host1  directory  " in status
    finally:
        assert cli("down").returncode == 0


def _mounts(cli: Cli) -> list[dict[str, str]]:
    return json.loads(cli("status", "--json").stdout)["mounts"]  # type: ignore[no-any-return]


def test_a_full_overlay_is_named(cli: Cli, sif: Path) -> None:
    size = ["--image", sif, "--overlay", "small", "--overlay-size", "64M"]
    done = cli("exec", *size, "--", "sh", "-c", "head -c 100M /dev/zero > /usr/large")
    assert done.returncode == 1
    assert "hint: overlay small is full on host0" in done.stderr
    assert "hint:" in cli("exec", "--overlay-size", "64", "--image", sif, "--", "true").stderr


def test_interrupt_ends_the_containers(sif: Path, workplace: Path) -> None:
    mark = "16.1803"
    command = [*COMMAND, "exec", "--image", str(sif), "--hosts", "local:2", "--", "sleep", mark]
    with subprocess.Popen(command, cwd=workplace / "work") as running:
        wait_until(
            lambda: sum(line.split("\0")[0].endswith("/sleep") for line in processes(mark)) == 2
        )
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    wait_until(lambda: not processes(mark))


def test_shell_has_a_real_terminal(sif: Path, workplace: Path) -> None:
    command = [*COMMAND, "shell", "--image", str(sif), "--hosts", "local:2", "--on", "host1"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(workplace / "work")
        os.execv(command[0], command)  # noqa: S606
    said = bytearray()

    def expect(text: bytes) -> None:
        deadline = time.monotonic() + 60
        while text not in said:
            assert time.monotonic() < deadline, said
            if select.select([terminal], [], [], 1)[0]:
                said.extend(os.read(terminal, 4096))

    try:
        # Split, so that what is typed, which a terminal shows too, is not taken for the answer.
        ranks = b"$WHEELMOUNT_RANK/$WHEELMOUNT_LOCAL_RANK/$WHEELMOUNT_SIZE"
        os.write(terminal, b"stty size; tty; echo $WHEELMOUNT_HOST %b re''ady\n" % ranks)
        expect(b"host1 0/0/1 ready")
        assert b"not a tty" not in said
        assert b"no job control" not in said
        os.write(terminal, b"sleep 100 & fg\n")
        wait_until(lambda: processes("100"))
        os.write(terminal, b"\x03")  # ^C ends the command and not the shell
        os.write(terminal, b"echo st''ill here; exit 3\n")
        expect(b"still here")
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)  # ends it in any case
    assert os.waitstatus_to_exitcode(status) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["exec", "--instance", "a/b", "--", "true"], "no name for an instance"),
        (["exec", "--image", "host9=x.sif", "--", "true"], "there is no host host9"),
        (["exec", "--image", "host0=x.sif", "--hosts", "local:2", "--", "true"], "for host1"),
        (["exec", "--image", "x.sif,y.sif", "--", "true"], "invalid --image"),
        (["exec", "--image", "x.sif", "--bind", ":/x", "--", "true"], "cannot be shown"),
        (["exec", "--image", "x.sif", "--on", "host1", "--", "true"], "there is no host host1"),
        (["exec", "--image", "x.sif", "--on", "host0,", "--", "true"], "an empty name of a host"),
        (["exec", "--image", "x.sif", "--cwd", "here", "--", "true"], "is relative"),
        (["shell", "--image", "x.sif", "--hosts", "local:2"], "one host only"),
        (["exec", "--instance", "one", "--cpus", "1", "true"], "gets no bounds"),
        (["exec", "--image", "x.sif", "--memory", "much", "true"], "is not a size"),
        (["shell"], "no image"),
        (["run", ".", "--image", "x.sif", "--instance", "one", "-"], "to an instance"),
        (["exec", "-i", "--json", "--image", "x.sif", "--", "true"], "as it is"),
        (
            ["exec", "--instance", "one", "--collect", "", "out", "--", "true"],
            "sees no directory for output",
        ),
        (
            ["exec", "-i", "--image", "x.sif", "--collect", "x", "y", "true"],
            "cannot be combined with --collect",
        ),
        (["run", ".", "--memory", "1G", "-"], "--memory is for a container"),
        (["run", ".", "--bind", "/etc", "-"], "--bind is for a container"),
        (["install", "--overlay", "one", "numpy"], "--overlay is for a container"),
        (["install", "--nv", "numpy"], "--nv is for a container"),
        (["overlay", "rm", "none"], "there is no overlay none"),
        (["instance", "stop"], "nothing to stop"),
    ],
)
def test_bad_input(cli: Cli, arguments: list[str], said: str) -> None:
    done = cli(*arguments)
    assert done.returncode in (64, 71), done.stderr
    assert said in done.stderr
    assert ('"hint": ' if "--json" in arguments else "hint:") in done.stderr


def test_no_gpu_is_said(cli: Cli, sif: Path) -> None:
    from wheelmount.containers.container import GPU

    done = cli("exec", "--nv", "--image", sif, "--", "ls", "/dev/nvidiactl")
    if GPU.exists():
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 69
        assert "has no NVIDIA device" in done.stderr
