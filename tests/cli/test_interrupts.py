"""^C at moments when nothing catches it by itself."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import read_terminal
from wheelmount.cli.main import INTERRUPTED

AT_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


OF_COMMANDS = "click", "wheelmount.cli.console", "wheelmount.errors", "wheelmount.cli.settings"

OF_HOSTS = "wheelmount.mount.client.remote", "monarch.actor", "monarch._src.actor.actor_mesh"

MARKS = pytest.mark.hosts, pytest.mark.fuse


@pytest.mark.parametrize(
    "module",
    [*OF_COMMANDS, "platformdirs.unix", *(pytest.param(each, marks=MARKS) for each in OF_HOSTS)],
)
def test_while_modules_are_imported(source: Path, workplace: Path, module: str) -> None:
    mount = ["run", "--hosts", "local:1", "--mntpoint", f"{workplace}/mnt", str(source), "-"]
    words = mount if module in OF_HOSTS else ["config"]
    place = workplace / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text(AT_IMPORT)
    done = subprocess.run(
        [sys.executable, "-m", "wheelmount.cli.main", *words],
        input="pwd",
        env={**os.environ, "PYTHONPATH": str(place), "AT": module},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == INTERRUPTED, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.fuse
@pytest.mark.hosts
@pytest.mark.parametrize("code", [0, 3])
def test_a_process_with_threads_of_monarch_s_ends_without_a_clean_up(
    code: int, source: Path, workplace: Path
) -> None:
    """A thread that calls Python in the clean-up would abort the process: seen once in hundreds."""
    program = """
    import atexit, sys
    from wheelmount.cli.main import main
    class CleanUp:
        def __del__(self):
            print("clean-up", file=sys.__stderr__)
    atexit.register(print, "at exit")
    sys.kept = CleanUp()
    main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), "run", "-q", source, "-"],
        input=f"echo hello; exit {code}", capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "hello\nat exit\n"), done.stderr
    assert "clean-up" not in done.stderr


@pytest.mark.costly
@pytest.mark.hosts
def test_a_shell_on_a_terminal_while_its_hosts_start(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ssh = workplace / "begun", workplace / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\ntouch {begun}; exec sleep 600\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("WHEELMOUNT_START_TIMEOUT", "10")
    image = workplace / "image.sif"
    image.touch()
    leader, follower = pty.openpty()
    words = ["shell", "--image", str(image), "--hosts", "ssh:elsewhere"]
    command = ["setsid", "--ctty", sys.executable, "-m", "wheelmount.cli.main", *words]
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower) as shell:
        os.close(follower)
        shown = threading.Thread(target=read_terminal, args=[leader])  # or it could write no more
        shown.start()
        try:
            while not begun.exists():
                assert shell.poll() is None
                time.sleep(0.05)
            os.write(leader, b"\x03")
            assert shell.wait(60) == INTERRUPTED
        finally:
            shell.kill()
            shown.join()
