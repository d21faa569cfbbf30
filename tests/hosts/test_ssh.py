"""What programs in the place of ssh, and their absence, do to hosts of ssh."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from wheelmount.config import Settings
from wheelmount.errors import HostError
from wheelmount.hosts.ssh import SshHosts, Target

Place = Callable[[str], None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Have a program of ``sh`` in the place of ssh."""

    def placed(program: str) -> None:
        path = tmp_path / "ssh"
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return placed


def _hosts(settings: Settings, *, guarded: bool) -> SshHosts:
    targets = [Target("host0"), Target("host1")]
    return SshHosts(targets, replace(settings, start_timeout=2), guarded=guarded)


def test_a_host_that_keeps_printing_ends_the_start_in_time(
    settings: Settings, place: Place
) -> None:
    place("exec timeout 20 yes")
    started = time.monotonic()
    with pytest.raises(HostError, match="host0, host1: no worker within 2 s"):
        _hosts(settings, guarded=True).start()
    assert time.monotonic() - started < 7
