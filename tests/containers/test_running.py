"""Real containers: what they see, what stays, how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from wheelmount.containers.container import Bind, Container
from wheelmount.containers.instance import Instance
from wheelmount.containers.overlay import Overlay
from wheelmount.errors import ContainerError, WaitError

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]


@pytest.fixture
def container(sif: Path, wheels: Path, tmp_path: Path) -> Iterator[Container]:
    overlay = Overlay(tmp_path / "state", "mine", "n1")
    with Container(sif, tmp_path / "work", overlay, packages=wheels) as made:
        yield made


def output(container: Container, script: str) -> str:
    """What a shell script in the container prints; it has to succeed."""
    with (container.workdir / "output").open("w+") as file:
        code = container.run(["sh", "-ec", script], stdout=file, stderr=subprocess.STDOUT)
        file.seek(0)
        text = file.read()
    assert code == 0, text
    return text


def processes(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = os.fsdecode(entry.read_bytes())  # another command's may be no UTF-8
        except OSError:
            continue
        if mark in line.split("\0"):
            found.append(line)
    return found


def wait_until(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_vanilla_installs_stay_in_the_overlay(container: Container, tmp_path: Path) -> None:
    output(container, "pip install hello && uv pip install greeting")
    show = "python -c 'import hello, greeting; print(hello.version, greeting.version)'"
    assert output(container, show) == "1.0 2.0\n"
    container.cleanup()
    again = Container(container.image, tmp_path / "again", container.overlay)
    with again:
        assert output(again, show) == "1.0 2.0\n"
    fresh = Container(container.image, tmp_path / "fresh", None, packages=container.packages)
    with fresh:
        assert fresh.run(["python", "-c", "import hello"], stderr=subprocess.DEVNULL) == 1
        output(fresh, "uv pip install greeting")
        output(fresh, "python -c 'import hello'")
    assert not fresh.workdir.exists()


def test_what_is_not_in_the_wheelhouse_fails_at_once(container: Container) -> None:
    started = time.monotonic()
    for tool in (["pip"], ["uv", "pip"]):
        assert container.run([*tool, "install", "requests"], stderr=subprocess.DEVNULL)
    assert time.monotonic() - started < 10


def test_no_network(container: Container) -> None:
    devices = output(container, "tail -n +3 /proc/net/dev | cut -d: -f1")
    assert devices.split() == ["lo"]
    assert output(container, "tail -n +2 /proc/net/route") == ""


def test_no_names_of_the_outside_world(container: Container) -> None:
    names = output(container, "cat /etc/resolv.conf /etc/hosts")
    assert "nameserver" not in names
    lookup = "import socket; print(socket.getaddrinfo('{}', 80))"
    for name in ("localhost", socket.gethostname()):
        assert "127.0.0.1" in output(container, f'python -c "{lookup.format(name)}"')
    assert container.run(["python", "-c", lookup.format("pypi.org")], stderr=subprocess.DEVNULL)
    listen = "s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
    output(container, f'python -c "import socket; {listen}"')


def test_users_and_masks(container: Container) -> None:
    umask = os.umask(0o077)
    try:
        assert output(container, "id -u; id -g; umask; pwd").split() == ["0", "0", "0077", "/root"]
    finally:
        os.umask(umask)
    assert output(container, "umask") == f"{umask:04o}\n"
    assert output(container, "stat -c %u:%g /packages/*.whl | sort -u").strip() == "0:0"


@pytest.mark.parametrize(
    "name", ["--help", "-r/etc/passwd", "--index-url=http://x", "a;id", "$(id)"]
)
def test_hostile_names_of_packages_are_no_options(container: Container, name: str) -> None:
    for tool in (["pip"], ["uv", "pip"]):
        with (container.workdir / "output").open("w+") as file:
            code = container.run([*tool, "install", "--", name], stdout=file, stderr=file)
            file.seek(0)
            said = file.read()
        assert code != 0, said
        assert "uid=" not in said
        assert "root:x:0" not in said


def test_packages_are_read_only(container: Container) -> None:
    answer = output(container, "ls /packages; touch /packages/x 2>&1 || true")
    assert "hello-1.0-py3-none-any.whl" in answer
    assert "Read-only file system" in answer


def test_host_is_not_seen(
    container: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://leak")
    monkeypatch.setenv("https_proxy", "http://leak")
    monkeypatch.setenv("APPTAINERENV_LEAK", "leak")
    monkeypatch.setenv("APPTAINER_BIND", "/home:/leak")
    (tmp_path / "file-of-the-host").touch()
    assert "leak" not in output(container, "env; ls /")
    assert output(container, f"ls -d {tmp_path} {Path(__file__).parent} 2>/dev/null || true") == ""
    assert "file-of-the-host" not in output(container, "ls -a /tmp /root $HOME")
    assert len(output(container, "ls -d /proc/[0-9]*").split()) < 10


def test_environment_and_files_arrive_as_they_are(container: Container, tmp_path: Path) -> None:
    value = "a,b $HOME `id` 'q' \"d\" \\n ü\nsecond line"
    (tmp_path / "data").mkdir()
    made = Container(
        container.image,
        tmp_path / "work",
        container.overlay,
        binds=[Bind(tmp_path / "data", "/deep/new/data", writable=True)],
        env={"ODD": value},
        files={"/etc/uv/uv.toml": "# mine\n", "/etc/not/there/yet.conf": "text\n"},
    )
    with made:
        assert output(made, 'printf "%s" "$ODD"') == value
        assert output(made, "cat /etc/uv/uv.toml /etc/not/there/yet.conf") == "# mine\ntext\n"
        assert made.run(["sh", "-c", "echo x >> /etc/uv/uv.toml"], stderr=subprocess.DEVNULL)
        output(made, "echo result > /deep/new/data/file")
    assert (tmp_path / "data" / "file").read_text() == "result\n"


@pytest.mark.parametrize("joins", [False, True], ids=["alone", "in an instance"])
def test_variables_that_apptainer_would_change_arrive_as_they_are(
    joins: bool, container: Container, tmp_path: Path
) -> None:
    wanted = {
        "HOME": "/scratch",
        "PATH": "",
        "LINES": "first\r\nsecond\r\n",
        "BYTES": os.fsdecode(b"\xff%d'\\\n"),
        "PLAIN": "a b",
        "word": "mine",
    }
    instance = Instance(tmp_path / "runtime", "mine", "n1")
    workdir = instance.workdir if joins else tmp_path / "work"
    made = replace(container, workdir=workdir, overlay=None, env=wanted)
    command = ["/usr/bin/env", "-0", os.fsdecode(b"ODD=\xfe")]
    try:
        with (tmp_path / "out").open("wb") as file:
            if joins:
                instance.ensure(made)
                code = instance.run(made, command, stdout=file)
            else:
                with made:
                    code = made.run(command, stdout=file)
    finally:
        instance.stop()
    lines = os.fsdecode((tmp_path / "out").read_bytes()).split("\0")
    got = dict(line.split("=", 1) for line in lines if line)
    assert code == 0
    assert {name: got.get(name) for name in wanted} == wanted
    assert got["ODD"] == os.fsdecode(b"\xfe")
    assert not any("WHEELMOUNT_" in name for name in got)


def test_arguments_are_not_options(container: Container, tmp_path: Path) -> None:
    code = container.run(["--help"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert code != 0
    with (tmp_path / "out").open("w+") as file:
        container.run(["printf", "%s|", "--bind", "$HOME", "a b", ""], stdout=file)
        file.seek(0)
        assert file.read() == "--bind|$HOME|a b||"


def test_exit_codes(container: Container) -> None:
    for code in (0, 3, 255):
        assert container.run(["sh", "-c", f"exit {code}"]) == code
    assert container.run(["sh", "-c", "kill -9 $$"]) == 128 + signal.SIGKILL


def test_container_that_does_not_start(container: Container, tmp_path: Path) -> None:
    (tmp_path / "no.sif").write_text("no image")
    broken = Container(tmp_path / "no.sif", tmp_path / "no")
    with broken, pytest.raises(ContainerError, match="could not start a container") as error:
        broken.run(["true"], stderr=subprocess.DEVNULL)
    assert error.value.hint


def test_two_overlays_at_once(container: Container, tmp_path: Path) -> None:
    other = Container(
        container.image,
        tmp_path / "other",
        Overlay(tmp_path / "state", "mine", "n2"),
        packages=container.packages,
    )
    with other:
        threads = [
            threading.Thread(target=output, args=(c, f"pip install {name}; sleep 1"))
            for c, name in ((container, "hello"), (other, "greeting"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        missing = "python -c 'import greeting' 2>/dev/null && echo yes || echo no"
        assert output(container, missing) == "no\n"
        assert output(other, missing) == "yes\n"


def test_eight_at_once(container: Container, wheels: Path, tmp_path: Path) -> None:
    def one(number: int) -> None:
        overlay = Overlay(tmp_path / "state", "mine", f"h{number}")
        with Container(container.image, tmp_path / f"w{number}", overlay, packages=wheels) as made:
            output(made, f"uv pip install -q greeting; echo {number} >/usr/mine; sleep 1")
            assert output(made, "cat /usr/mine; python -c 'import greeting'") == f"{number}\n"

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(one, number) for number in range(8)]:
            done.result()


def test_second_writer_is_refused(container: Container, tmp_path: Path) -> None:
    assert container.overlay is not None
    reading, writing = os.pipe()
    with open(reading, "rb") as line, open(writing, "wb") as until:
        first = threading.Thread(target=container.run, args=(["cat"],), kwargs={"stdin": line})
        first.start()
        second = Container(container.image, tmp_path / "second", container.overlay)
        with until, second:
            while not container.overlay.user():
                assert first.is_alive()
                time.sleep(0.02)
            with pytest.raises(ContainerError, match="in use by cat"):
                second.run(["true"])
            assert first.is_alive(), "it was not waited for"
        first.join()
    with second:
        assert second.run(["true"]) == 0


def test_time_runs_out(container: Container) -> None:
    mark = "31.4159"
    # The third one ignores the polite signal and is in a session of its own.
    script = f"sleep {mark} & trap '' TERM; setsid sleep {mark} & sleep {mark}; sleep {mark}"
    with pytest.raises(WaitError, match="longer than 1 s"):
        container.run(["sh", "-c", script], timeout=1)
    assert not processes(mark)
    assert container.run(["true"]) == 0, "the overlay is free again"


def test_container_ends_with_its_owner(container: Container) -> None:
    mark = "27.1828"
    program = (
        "from pathlib import Path\n"
        "from wheelmount.containers.container import Container\n"
        f"Container(Path({str(container.image)!r}), Path({str(container.workdir)!r}))"
        f".run(['sleep', '{mark}'])"
    )
    (container.workdir / "temporary").mkdir(exist_ok=True)
    Overlay(container.workdir, "temporary", "here").create()
    owner = subprocess.Popen([sys.executable, "-c", program])
    wait_until(lambda: processes(mark))
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not processes(mark))


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["no-such-program"], 127),
        (["/no/such/program"], 127),
        (["sh", "-c", "exit 255"], 255),
        (["sh", "-c", "kill -TERM $$"], 143),
        ([os.fsdecode(b"no-such-\xff")], 127),
    ],
)
def test_how_a_command_ended_is_told(container: Container, command: list[str], code: int) -> None:
    assert container.run(command, stderr=subprocess.DEVNULL) == code


def test_an_instance_tells_it_too(container: Container, tmp_path: Path) -> None:
    instance = Instance(tmp_path / "runtime", "mine", "n1")
    made = Container(container.image, instance.workdir)
    try:
        instance.ensure(made)
        assert instance.run(made, ["no-such-program"]) == 127
        assert instance.run(made, ["sh", "-c", "exit 255"]) == 255
    finally:
        instance.stop()
