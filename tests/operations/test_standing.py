"""Which mounts a command means."""

from __future__ import annotations

import dataclasses

import pytest

from wheelmount.config import Settings
from wheelmount.errors import MountError
from wheelmount.hosts.session import Record, Session
from wheelmount.operations import records, standing
from wheelmount.operations.records import MountNote


def test_each_target_must_be_mounted(settings: Settings) -> None:
    session = Session("one", settings)
    note = MountNote("01234567", "/data/a", "/data/a")
    mounts = {records.key(note.source, note.mntpoint): dataclasses.asdict(note)}
    with session.lock():
        session.write(Record("local:1", "local", ["host0"], {}, notes={records.MOUNTS: mounts}))
    try:
        assert list(standing.find(settings, ["/data/a"])) == [note.identity]
        for targets in ["/data/a", "/data/typo"], ["/data/typo", "/data/a"]:
            with pytest.raises(MountError, match="nothing mounted at /data/typo"):
                standing.find(settings, targets)
    finally:
        with session.lock():
            session.forget()
