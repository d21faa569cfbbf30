"""Setting a machine up: what it lacks is named, and root gets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wheelmount import machine
from wheelmount.errors import UnavailableError

SETUP = [sys.executable, "-m", "wheelmount.cli.main", "setup"]

BARE = """
cp -a /etc "$1/etc"
mount --bind "$1/etc" /etc
printf '# no settings, and no newline at the end' >/etc/fuse.conf
: >/etc/subuid
mount -t tmpfs none /dev
mknod -m 666 /dev/null c 1 3
mknod -m 666 /dev/urandom c 1 9
mknod -m 600 /dev/fuse c 10 229
ln -s /proc/self/fd /dev/fd
shift
"$@"
stat -c 'fuse %a' /dev/fuse
sed 's/^/config /' /etc/fuse.conf
sed 's/^/ids /' /etc/subuid
"""
"""Runs a command with the settings of a new machine, and prints what they are afterwards."""


def on_bare_machine(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", BARE, "sh"]
    return subprocess.run(
        [*unshare, str(folder), *command], capture_output=True, text=True, timeout=90, check=False
    )


@pytest.mark.containers
def test_root_gets_what_is_missing(tmp_path: Path) -> None:
    done = on_bare_machine(tmp_path, *SETUP)
    assert not done.stderr.startswith("error"), done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "nothing is missing", done
    assert "fuse 666" in lines
    assert lines[-3:-1] == ["config # no settings, and no newline at the end",
                            "config user_allow_other"]  # fmt: skip
    assert lines[-1].startswith(("ids root:", "ids 0:"))


@pytest.mark.containers
def test_a_check_changes_nothing(tmp_path: Path) -> None:
    done = on_bare_machine(tmp_path, *SETUP, "--check", "--json")
    first, *state = done.stdout.splitlines()
    assert [lack["name"] for lack in json.loads(first)["missing"]] == [
        "access to /dev/fuse", "user_allow_other in /etc/fuse.conf", "root in /etc/subuid",
    ]  # fmt: skip
    assert state == ["fuse 600", "config # no settings, and no newline at the end"]


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PROGRAMS_OF_ROOT", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    packages = [lack.package for lack in machine.lacks() if lack.package]
    assert packages == ["fuse3", "apptainer", "debootstrap"]
    with pytest.raises(UnavailableError, match="not a Debian, and lacks fuse3, apptainer"):
        machine.set_up()
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(UnavailableError, match="only root can install fusermount3") as error:
        machine.set_up()
    assert "setup" in str(error.value.hint)


def test_no_package_is_needed_to_set_up_a_machine(tmp_path: Path) -> None:
    """``examples/setup.sh`` runs it before there is an environment."""
    root = Path(machine.__file__).parents[1]
    command = [sys.executable, "-I", "-S", "-c"]
    program = f"import sys; sys.path.insert(0, {str(root)!r}); from wheelmount.machine import main"
    done = subprocess.run(
        [*command, f"{program}; main()", "--check"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
