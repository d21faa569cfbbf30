"""Containers on hosts that have nothing of the client's but a network to it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.testbed import LOGIN, Lab
from tests.testbed.service import start_workers, workers_spec

pytestmark = [
    pytest.mark.containers,
    pytest.mark.hosts,
    pytest.mark.fuse,
    pytest.mark.lab,
    pytest.mark.timeout(600),
]


def test_image_and_wheels_come_over_the_network(sif: Path, wheels: Path, shared: Path) -> None:
    shutil.copytree(wheels, shared / "packages")
    shutil.copy(sif, shared / "img.sif")
    with Lab(2) as lab:
        start_workers(lab)
        # To where the client has it and no host does.
        lab.run(LOGIN, ["cp", "-r", str(shared), "/tmp/job"], check=True)
        wheelmount = [sys.executable, "-m", "wheelmount.cli.main"]
        script = "pip install -q greeting && python -c 'import greeting' && hostname; ls /tmp; cat"
        run = [
            *wheelmount,
            "exec",
            "--insecure",
            "--hosts",
            workers_spec(lab),
            "--packages",
            "/tmp/job",
        ]
        # Its home directory is an overlay already, and so this one has to be a file.
        run += ["--overlay", "test", "-q"]
        done = lab.run(LOGIN, [*run, "--", "sh", "-ec", script])
        assert done.returncode == 0, done.stderr
        assert done.stdout == "== host0 ==\nhost0\n== host1 ==\nhost1\n"
        kinds = lab.run("host0", [*wheelmount, "overlay", "ls"]).stdout
        assert "test  host0  image" in kinds
        asked = [*wheelmount, "overlay", "ls", "--insecure", "--hosts", workers_spec(lab)]
        done = lab.run(LOGIN, asked)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert [line for line in lines if "==" in line] == ["== host0 ==", "== host1 =="]
        assert sum("test  host" in line for line in lines) == 2
        shell = shlex.join([*wheelmount, "shell", "--on", "host1", *run[len(wheelmount) + 1 :]])
        keys = "stty size; hostname; exit 3\r"
        # script(1) gives it a terminal; what is typed comes when the shell is there to echo it.
        inner = ["script", "--quiet", "--return", "--command", f"stty rows 33 cols 77; {shell}"]
        done = lab.run(LOGIN, [*inner, "/dev/null"], stdin=None, input=keys)
        assert done.returncode == 3, done.stdout
        assert "33 77" in done.stdout
        assert "\nhost1" in done.stdout.replace("\r", "")
        typed = [*run, "-i", "--on", "host1", "--", "sh", "-c", "cat; hostname"]
        done = lab.run(LOGIN, typed, stdin=None, input="typed\n")
        assert done.stdout == "typed\nhost1\n", done.stderr
