"""``run``: on which hosts, where, for how long, and what runs a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Cli

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]


@pytest.fixture
def session(cli: Cli) -> Iterator[None]:
    """Three hosts that stay."""
    assert cli("up", "--hosts", "local:3").returncode == 0
    yield
    assert cli("down").returncode == 0


def _left(mark: str) -> list[str]:
    lines = (" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))
    return [line for line in lines if mark in line and "pytest" not in line]


@pytest.mark.costly
@pytest.mark.usefixtures("session")
def test_on_some_hosts(cli: Cli, source: Path) -> None:
    script = 'echo "$WHEELMOUNT_HOST $WHEELMOUNT_RANK of $WHEELMOUNT_SIZE"'
    done = cli("run", "-q", "--on", "host2,host1", source, "-", input=script, stdin=None)
    expected = "== host1 ==\nhost1 0 of 2\n== host2 ==\nhost2 1 of 2\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
    done = cli("run", "-q", source, "-", input=script, stdin=None)
    assert done.stdout.count(" of 3\n") == 3, "the mount is on all hosts"
    done = cli("run", "--on", "host0,host7", source, "-", input=script, stdin=None)
    assert done.returncode == 64
    assert "there is no host host7" in done.stderr
    assert "hint: hosts are host0, host1, host2" in done.stderr
    # In the mount, and elsewhere on the host.
    one = ["run", "-q", "--on", "host1"]
    done = cli(*one, "--cwd", "package/sub", source, "-", input="pwd; ls", stdin=None)
    assert done.stdout == f"{source}/package/sub\nmodule.py\n", done.stderr
    assert cli(*one, "--cwd", "/", source, "-", input="pwd", stdin=None).stdout == "/\n"
    done = cli(*one, "--cwd", "nowhere", source, "-", input="pwd", stdin=None)
    assert done.returncode == 68
    assert f"cannot run in {source}/nowhere: No such file" in done.stderr


def test_several_on_each_host(cli: Cli, source: Path, workplace: Path) -> None:
    script = """
        echo "$WHEELMOUNT_HOST $WHEELMOUNT_LOCAL_RANK, $WHEELMOUNT_RANK of $WHEELMOUNT_SIZE"
        [ $WHEELMOUNT_RANK != 3 ] || exit 5
        echo $WHEELMOUNT_RANK >$WHEELMOUNT_OUTPUT/rank
    """
    given = ["--hosts", "local:2", "--per-host", "2", "--collect", "", "out"]
    done = cli("run", "-q", *given, source, "-", input=script, stdin=None)
    places = [(host, copy) for host in (0, 1) for copy in (0, 1)]
    assert done.stdout == "".join(
        f"== host{host}:{copy} ==\nhost{host} {copy}, {rank} of 4\n"
        for rank, (host, copy) in enumerate(places)
    )
    assert done.returncode == 5, done.stderr
    left = {path.parent.name: path.read_text() for path in workplace.glob("work/out/*/rank")}
    assert left == {"host0:0": "0\n", "host0:1": "1\n", "host1:0": "2\n"}
    done = cli("run", "--image", "x.sif", "--per-host", "2", source, "-", input="", stdin=None)
    assert done.returncode == 64
    assert "to one overlay together" in done.stderr


def test_hosts_that_are_not_there_are_said_before_any_starts(cli: Cli, source: Path) -> None:
    done = cli("run", "--hosts", "local:2", "--on", "host2", source, "-", input="", stdin=None)
    assert done.returncode == 64
    assert "there is no host host2\nhint: hosts are host0, host1" in done.stderr
    done = cli("run", "--hosts", "local:2", "--on", "host1", source, "-", input="id", stdin=None)
    assert "send: " in done.stderr
    assert " to 1 host" in done.stderr


@pytest.mark.timeout(120)
def test_what_takes_too_long_is_ended_with_all_that_it_started(cli: Cli, source: Path) -> None:
    mark = "27182.8182"
    deaf = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep({mark})"
    script = f"""
        [ $WHEELMOUNT_RANK = 0 ] && exit 3
        setsid {sys.executable} -c '{deaf}' &
        (setsid sh -c 'setsid sleep {mark} & sleep {mark} & wait' &)
        sleep {mark}
    """
    given = ["run", "--hosts", "local:2", "--timeout", "2", "--json", source, "-"]
    done = cli(*given, input=script, stdin=None)
    first, second = json.loads(done.stdout)
    assert (first["code"], first["stderr"]) == (3, ""), done.stderr
    said = "error: the command was ended: it took longer than 2 s\n"
    assert second["code"] == 124
    assert second["stderr"].endswith(said)  # bash may tell of its own processes before
    assert done.returncode == 124
    assert _left(mark) == []


def test_a_module(cli: Cli, source: Path) -> None:
    (source / "greet.py").write_text("import sys; print(sys.argv[1:], __name__)")
    done = cli("run", "-q", source, "-m", "greet", "--json", "-q")
    assert done.stdout == "['--json', '-q'] __main__\n", done.stderr
    done = cli("run", "-m", "greet")
    assert done.returncode == 64
    assert "hint: wheelmount run . -m greet" in done.stderr


@pytest.mark.costly
def test_python_of_an_environment_that_is_mounted(cli: Cli, workplace: Path) -> None:
    venv = workplace / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (place,) = venv.glob("lib/python*/site-packages")
    (place / "inside.py").write_text("import sys; print(sys.prefix == sys.argv[1], sys.argv[2:])")
    script = workplace / "work" / "s.py"
    run = ["run", "-q", venv]
    for text in ("import inside", "#!/usr/bin/python3\nimport inside"):
        script.write_text(text)
        done = cli(*run, script, venv, "-x")
        assert done.stdout == "True ['-x']\n", done.stderr
    done = cli(*run, "-m", "inside", venv)
    assert done.stdout == "True []\n", done.stderr
    done = cli(*run, "-", input=f"python -m inside {venv}", stdin=None)
    assert done.stdout == "True []\n", done.stderr


def test_a_python_file_needs_no_first_line(cli: Cli, source: Path, workplace: Path) -> None:
    script = workplace / "work" / "s.py"
    script.write_text("import os; print(os.getcwd())")
    done = cli("run", "-q", source, script)
    assert done.stdout == f"{source}\n", done.stderr
    script = workplace / "work" / "s.awk"
    script.write_text('#!/usr/bin/awk -f\nBEGIN { printf "%s", ARGV[1]; exit 5 }\n')
    done = cli("run", source, script, "word")
    assert (done.returncode, done.stdout) == (5, "word"), done.stderr


@pytest.mark.costly
def test_what_commands_leave_comes_back(cli: Cli, source: Path, workplace: Path) -> None:
    work = workplace / "work"
    script = """
        mkdir "$WHEELMOUNT_OUTPUT/sub"
        stat -c '%a %n' "$WHEELMOUNT_OUTPUT"
        echo "$WHEELMOUNT_HOST" >"$WHEELMOUNT_OUTPUT/sub/name"
        ln -s /etc "$WHEELMOUNT_OUTPUT/sub/link$WHEELMOUNT_RANK"
        [ $WHEELMOUNT_RANK = 0 ] && rm "$WHEELMOUNT_OUTPUT/sub/link0" && exit 3
        sleep 1000
    """
    run = ["run", "-q", "--hosts", "local:2"]
    given = [*run, "--collect", "$WHEELMOUNT_OUTPUT", "out", "--timeout", "4"]
    done = cli(*given, "--json", source, "-", input=script, stdin=None)
    first, second = json.loads(done.stdout)
    assert (first["code"], second["code"], done.returncode) == (3, 124, 124), done.stderr
    assert "error" not in first
    refused = "not all that was sent is taken: 'sub/link1' (it leads out)"
    assert second["error"] == refused
    assert f'"message": "host1: {refused}"' in done.stderr
    for host in ("host0", "host1"):
        assert [path.name for path in work.glob(f"out/{host}/sub/*")] == ["name"]
        assert (work / "out" / host / "sub" / "name").read_text() == f"{host}\n"
    mode, place = first["stdout"].split()
    assert mode == "700"
    assert not Path(place).exists()
    # There is something now.
    done = cli(*given, source, "-", input="touch ran", stdin=None)
    assert done.returncode == 64
    assert "error: out/host0 has something in it already\nhint: " in done.stderr
    # A path of the host, relative to where the command starts; over what is there.
    run = ["run", "-q", "--cwd", str(work), "--overwrite"]
    done = cli(*run, "--collect", "made", "out", source, "-", input="echo two >made", stdin=None)
    assert done.returncode == 0, done.stderr
    assert (work / "out" / "host0" / "made").read_text() == "two\n"
    assert (work / "out" / "host0" / "sub" / "name").exists()
    done = cli(*run, "--collect", "nothing", "out", source, "-", input="true", stdin=None)
    assert done.returncode == 66
    assert "error: host0: there is nothing at nothing" in done.stderr


def test_a_host_that_is_lost_while_it_sends_is_said(
    cli: Cli, source: Path, workplace: Path
) -> None:
    script = """
        echo here >"$WHEELMOUNT_OUTPUT/first"
        [ $WHEELMOUNT_RANK = 0 ] && exit
        truncate -s 1G "$WHEELMOUNT_OUTPUT/large"
        (until ps -o args= --ppid $PPID | grep -q hosts.collection; do kill -0 $PPID || exit; done
         kill -9 $PPID) >/dev/null 2>&1 &
    """
    collect = ["--collect", "$WHEELMOUNT_OUTPUT", "out"]
    done = cli("run", "-q", "--hosts", "local:2", *collect, source, "-", input=script, stdin=None)
    assert done.returncode == 68
    assert "error: host1: " in done.stderr
    assert (workplace / "work" / "out" / "host0" / "first").read_text() == "here\n"


def test_much_of_it_takes_no_memory_of_the_client(source: Path, workplace: Path) -> None:
    (source / "s.sh").write_text("truncate -s 400M $WHEELMOUNT_OUTPUT/large")
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", "-q", "--hosts", "local:1"]
    command += ["--collect", "$WHEELMOUNT_OUTPUT", "out", str(source), str(source / "s.sh")]
    # By a process that is small itself: the kernel counts what a process was before it was another.
    measure = (
        "import os, subprocess, sys; client = subprocess.Popen(sys.argv[1:]); "
        "_, status, usage = os.wait4(client.pid, 0); print(status, usage.ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", measure, *command],
        cwd=workplace / "work",
        env={**os.environ, "RUST_BACKTRACE": "1"},  # by which Monarch's end would take 50 MiB
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    status, most = map(int, done.stdout.splitlines()[-1].split())
    assert status == 0
    assert (workplace / "work" / "out" / "host0" / "large").stat().st_size == 400 << 20
    assert most < 200 << 10  # KiB


LATE = """
import os, pathlib, time
if "PAR_MAIN_OVERRIDE" in os.environ:  # a process that Monarch starts
    for number in range(NUMBER):
        try:
            pathlib.Path(__file__).with_name(f"late{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        time.sleep(60)
        break
"""


def _start_late(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, number: int, seconds: int
) -> Path:
    """Have so many processes start later than Monarch waits; return where each leaves a file."""
    (workplace / "slow").mkdir()
    (workplace / "slow" / "sitecustomize.py").write_text(LATE.replace("NUMBER", f"{number}"))
    monkeypatch.setenv("PYTHONPATH", str(workplace / "slow"))
    monkeypatch.setenv("HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE", f"{seconds}s")
    return workplace / "slow"


@pytest.mark.costly
def test_a_process_that_starts_late_is_started_again(
    cli: Cli, source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Python lies on a slow file system: of the mount, and of commands."""
    slow = _start_late(workplace, monkeypatch, number=2, seconds=12)
    done = cli("run", "--hosts", "local:1", source, "-", input="echo ran", stdin=None)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert "a process did not start on host0; starting another" in done.stderr
    assert (slow / "late1").exists()


def test_a_process_that_does_not_start_is_said(
    cli: Cli, source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _start_late(workplace, monkeypatch, number=9, seconds=3)
    done = cli("run", "--hosts", "local:1", source, "-", input="echo ran", stdin=None)
    assert (done.returncode, done.stdout) == (75, ""), done.stderr
    assert "a process did not start within 3 s" in done.stderr
    assert "hint: the host may be overloaded or lost, or slow" in done.stderr


DYING = """
import os, signal
if "PAR_MAIN_OVERRIDE" in os.environ and os.environ["WHEELMOUNT_LOCAL_HOST"].endswith("host1"):
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)
"""


@pytest.mark.costly
@pytest.mark.parametrize(
    "words", [("run", "--hosts=local:2", ".", "-"), ("doctor", "--hosts=local:2")]
)
def test_a_host_that_dies_while_its_processes_start_is_said(
    words: tuple[str, ...], cli: Cli, source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that it gave no answer, which is said after the time for one."""
    (workplace / "sitecustomize.py").write_text(DYING)
    monkeypatch.setenv("PYTHONPATH", str(workplace))
    done = cli(*words, cwd=source, input="true", stdin=None)
    assert done.returncode == 68, done.stderr
    assert "host1: the host died: ipc://" in done.stderr
