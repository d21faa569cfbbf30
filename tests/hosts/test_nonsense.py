"""Hosts that say something else than they should."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Cli
from wheelmount.errors import HostError


@pytest.mark.parametrize(
    "said",
    ["[]", "{}", "3", '{"address": 3}', '{"address": "tls://"}', '{"error": "x"}', "no JSON"],
)
def test_what_an_ssh_host_says_of_itself(
    cli: Cli, workplace: Path, source: Path, said: str
) -> None:
    done = _up(cli, workplace, f"echo '{said}'; exec sleep 1")
    assert done.returncode == HostError.exit_code
    assert done.stderr.startswith("error: a")
    assert "Traceback" not in done.stderr


def test_a_line_without_an_end(cli: Cli, workplace: Path) -> None:
    done = _up(cli, workplace, "exec cat /dev/zero")
    assert done.returncode == HostError.exit_code
    silent = _up(cli, workplace, "printf x; exec sleep 60", WHEELMOUNT_START_TIMEOUT="1")
    assert (silent.returncode, "a: no worker within 1 s" in silent.stderr) == (68, True)


def _up(
    cli: Cli, workplace: Path, program: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Bring up a host by an ssh that does something else."""
    ssh = workplace / "ssh"
    ssh.write_text(f"#!/bin/sh\n{program}\n")
    ssh.chmod(0o755)
    path = f"{workplace}:{os.environ['PATH']}"
    return cli("up", "--hosts", "ssh:a", "-q", env={**os.environ, "PATH": path, **variables})
