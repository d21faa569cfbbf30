"""What systemd-logind takes from ``/dev/shm``, on machines made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wheelmount import doctor, logind

USER = 4321


def _machine(root: Path, *, main: str = "", part: str = "", tmpfs: bool = False) -> Path:
    for name in ("run/systemd/system", "etc/systemd/logind.conf.d", "proc/self", "var/lib"):
        (root / name).mkdir(parents=True)
    (root / "etc/systemd/logind.conf").write_text(f"[Login]\n{main}\n")
    if part:
        (root / "etc/systemd/logind.conf.d/own.conf").write_text(f"[Login]\n{part}\n")
    kind = "tmpfs" if tmpfs else "ext4"
    (root / "proc/self/mounts").write_text(f"x / ext4 rw 0 0\nx /tmp {kind} rw 0 0\n")
    return root


@pytest.mark.parametrize(
    ("main", "part", "clears"),
    [
        ("", "", True),
        ("#RemoveIPC=no", "", False),
        ("#RemoveIPC=yes", "RemoveIPC=no", False),
        ("RemoveIPC=no", "RemoveIPC=yes", True),
        ("RemoveIPC = off", "", False),
    ],
)
def test_its_settings_are_read(tmp_path: Path, main: str, part: str, clears: bool) -> None:
    root = _machine(tmp_path, main=main, part=part)
    assert logind.clears_memory(USER, root) is clears
    assert not logind.clears_memory(0, root)
    assert not logind.clears_memory(999, root)


def test_memory_that_stays_is_chosen(tmp_path: Path) -> None:
    assert logind.memory_place(USER, _machine(tmp_path / "a", tmpfs=True)) == tmp_path / "a/tmp"
    assert logind.memory_place(USER, _machine(tmp_path / "b")) == tmp_path / "b/dev/shm"
    (tmp_path / "a/etc/login.defs").write_text("# users\nSYS_UID_MAX 5000\n")
    assert logind.memory_place(USER, tmp_path / "a") == tmp_path / "a/dev/shm"


def test_without_systemd_nothing_goes(tmp_path: Path) -> None:
    assert not logind.clears_memory(USER, tmp_path)


def test_doctor_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "logout" not in doctor._shm().text
    monkeypatch.setattr(logind, "clears_memory", lambda *_: True)
    finding = doctor._shm()
    if logind.memory_place(os.getuid()) == Path("/dev/shm"):  # on this machine
        assert (finding.state, "last logout" in finding.text) == (doctor.POOR, True)
        assert "enable-linger" in finding.hint
