"""What starts ends: however the owner of a container ends, and whenever."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.containers.test_running import wait_until
from wheelmount.config import Settings
from wheelmount.containers import guard, leftovers
from wheelmount.containers.order import PROGRAM, Order
from wheelmount.containers.overlay import Overlay
from wheelmount.errors import ContainerError

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

COMMAND = [sys.executable, "-m", "wheelmount.cli.main"]


def running(mark: str) -> list[str]:
    """Processes that have ``mark`` among their arguments and are no zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_text(errors="replace")
        except OSError:
            continue
        if mark in line.split("\0"):
            found.append(line)
    return found


def nothing_stays(mark: str, settings: Settings) -> None:
    runtime = settings.private_runtime()
    wait_until(lambda: not running(mark))
    wait_until(lambda: not list(runtime.glob(f"{leftovers.PREFIX}*")))
    for overlay in Overlay.all(Path(settings.state_dir)):
        with overlay.lock("it is free"):
            pass


@pytest.mark.parametrize("how", ["twice", "hang-up", "kill"])
def test_a_shell_that_is_ended_leaves_nothing(
    how: str, sif: Path, workplace: Path, settings: Settings
) -> None:
    mark = {"twice": "31.4159", "hang-up": "31.4160", "kill": "31.4161"}[how]
    command = [*COMMAND, "shell", "--image", str(sif), "--hosts", "local:1", "--"]
    # Something that goes on, and something that left it and heeds no signal.
    command += ["sh", "-c", f"(trap '' TERM HUP INT; setsid sleep {mark} &); exec sleep {mark}"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(workplace / "work")
        os.execv(command[0], command)  # noqa: S606
    # By the name that it has inside: the words of the command are also those of its owners.
    wait_until(lambda: sum(each.startswith("sleep\0") for each in running(mark)) == 2)
    if how == "twice":
        os.kill(pid, signal.SIGINT)
        time.sleep(0.15)
        os.kill(pid, signal.SIGINT)
    elif how == "kill":
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    os.waitpid(pid, 0)
    nothing_stays(mark, settings)


def test_one_that_is_killed_while_it_starts_leaves_nothing(
    sif: Path, workplace: Path, settings: Settings
) -> None:
    mark = "27.1828"
    runtime = settings.private_runtime()
    order = Order("n1", str(sif), "mine", settings.state_dir, settings.runtime_dir)
    (workplace / "note").write_bytes(order.encode(["sleep", mark]))
    command = [sys.executable, *PROGRAM[1:], str(workplace / "note")]
    for delay in (0, 0.01, 0.03, 0.06, 0.1, 0.2):
        with subprocess.Popen(command) as owner:
            wait_until(lambda: list(runtime.glob(f"{leftovers.PREFIX}*/env")))
            time.sleep(delay)
            owner.kill()
        wait_until(lambda: not running(mark))
        wait_until(lambda: not [p for p in runtime.glob(f"{leftovers.PREFIX}*") if _used(p)])
        wait_until(lambda: _free(Overlay(Path(settings.state_dir), "mine", "n1")))
        for left in leftovers.find(runtime):  # it had no guard yet
            leftovers.remove(left)


def _free(overlay: Overlay) -> bool:
    try:
        with overlay.lock("it is free"):
            return True
    except ContainerError:  # of a guard that has not begun
        return False


def _used(workdir: Path) -> bool:
    return workdir.exists() and leftovers.in_use(workdir)


def test_a_guard_ends_what_left_the_session(tmp_path: Path) -> None:
    mark = "14.1421"
    reading, writing = os.pipe()
    script = f"(setsid sh -c 'sleep {mark} & exec sleep {mark}' &); echo up; sleep {mark}"
    command = [sys.executable, "-I", "-S", guard.__file__, str(reading), "ends", "none"]
    command += ["free", "", "", ""]
    with subprocess.Popen(
        [*command, "sh", "-c", script], pass_fds=[reading], stdout=subprocess.PIPE
    ) as guarded:
        assert guarded.stdout is not None
        assert guarded.stdout.readline() == b"up\n"
        os.close(reading)
        wait_until(lambda: len(running(mark)) >= 3)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            guarded.send_signal(number)
        assert guarded.poll() is None
        os.close(writing)
        guarded.wait(20)
        assert not running(mark)


def test_a_guard_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    private, planted = tmp_path / "private", tmp_path / "planted"
    (planted / "wheelmount").mkdir(parents=True)
    (planted / "wheelmount" / "__init__.py").write_text("open('caught', 'w')\n")
    private.mkdir()
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", guard.__file__, str(reading), "ends", "none"]
    unnoted = "999"  # no descriptor, as if the file system of a lock failed
    command += ["free", str(private), "", unnoted, "sh", "-c", "echo up; exec sleep 60"]
    with subprocess.Popen(
        command, pass_fds=[reading], stdout=subprocess.PIPE, cwd=planted
    ) as guarded:
        assert guarded.stdout is not None
        assert guarded.stdout.readline() == b"up\n"
        os.close(reading)
        os.close(writing)
        guarded.wait(60)
    assert not (planted / "caught").exists()
    assert not private.exists()


def test_a_guard_notes_until_when_an_overlay_was_used(tmp_path: Path) -> None:
    overlay = Overlay(tmp_path / "state", "mine", "n1")
    overlay.create()
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", guard.__file__, str(reading), "ends", "none"]
    with overlay.lock("a container") as lock:
        command += ["free", "", "", str(lock), "sh", "-c", "echo up; exec sleep 60"]
        guarded = subprocess.Popen(command, pass_fds=[reading, lock], stdout=subprocess.PIPE)
    with guarded:
        assert guarded.stdout is not None
        assert guarded.stdout.readline() == b"up\n"
        os.utime(overlay.path.with_name(".n1.lock"), (1, 1))
        os.close(reading)
        os.close(writing)  # as if its owner were killed
        guarded.wait(60)
    assert overlay.last_used() > time.time() - 3600


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -KILL $$", 137), ("true", 0)])
def test_a_guard_passes_the_code_on(script: str, code: int) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", guard.__file__, str(reading), "ends", "none"]
    command += ["free", "", "", ""]
    done = subprocess.run([*command, "sh", "-c", script], pass_fds=[reading], check=False)
    os.close(reading)
    os.close(writing)
    assert done.returncode == code
