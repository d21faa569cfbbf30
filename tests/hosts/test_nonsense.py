"""Hosts that say something else than they should."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from wheelmount.config import Settings
from wheelmount.errors import HostError
from wheelmount.hosts import launcher
from wheelmount.hosts.spec import parse
from wheelmount.progress import SILENT

HostsBy = Callable[..., None]


@pytest.fixture
def hosts_by(workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> HostsBy:
    """Starts a host by an ssh that does something else."""

    def start(program: str, seconds: float = 60) -> None:
        ssh = workplace / "ssh"
        ssh.write_text(f"#!/bin/sh\n{program}\n")
        ssh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{workplace}:{os.environ['PATH']}")
        limited = replace(settings, start_timeout=seconds)
        parse("ssh:a").make(limited, namespaces=False, progress=SILENT).start()

    return start


@pytest.mark.parametrize(
    "said", ["[]", "{}", "3", '{"address": 3}', '{"address": "tls://"}', '{"error": "x"}', "text"]
)
def test_what_an_ssh_host_says_of_itself(hosts_by: HostsBy, said: str) -> None:
    with pytest.raises(HostError, match=r"^a"):
        hosts_by(f"echo '{said}'")


@pytest.mark.slow
def test_a_line_without_an_end(hosts_by: HostsBy) -> None:
    with pytest.raises(HostError, match=r"^a"):
        hosts_by("head -c 1000000 /dev/zero")
    with pytest.raises(HostError, match="a: no worker within 1 s"):
        hosts_by("printf x; exec sleep 3", 1)


def test_lines_of_a_launcher() -> None:
    assert launcher.hear("token", b'token {"error": "no room", "hint": null}') == {
        "error": "no room",
        "hint": None,
    }
    for text in (b"5", b"[]", b'{"error": 5}', b'{"error": "", "hint": []}', b"[" * 100_000):
        assert launcher.hear("token", b"token " + text) is None
