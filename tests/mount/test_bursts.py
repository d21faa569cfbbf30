"""Taking turns among threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from wheelmount.mount.snapshot import bursts
from wheelmount.mount.snapshot.bursts import MANY, BurstLock


def _at_once(files: int, seconds: float) -> int:
    """How many of four threads were at it at the same time, at most."""
    mine = BurstLock()
    lock = threading.Lock()
    now = [0, 0]

    def work(_: int) -> None:
        with mine.hold(files):
            with lock:
                now[0] += 1
                now[1] = max(now)
            time.sleep(seconds)
            with lock:
                now[0] -= 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not mine._lock.locked()
    return now[1]


def test_many_files_are_opened_by_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bursts, "PER_FILE", 0.5 / (MANY + 1))
    monkeypatch.setattr(bursts, "LONGEST", 30)
    assert _at_once(MANY + 1, 0.2) == 1, "all together take longer than one may"


def test_few_files_are_opened_by_all() -> None:
    assert _at_once(MANY, 0.5) == 4


def test_nobody_waits_for_a_disk_that_another_waits_for() -> None:
    assert _at_once(MANY + 1, 1.0) == 4


def test_nobody_waits_for_ever_for_others_who_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bursts, "PER_FILE", 30)
    monkeypatch.setattr(bursts, "LONGEST", 0.1)
    assert _at_once(MANY + 1, 1.0) == 4


def test_a_turn_ends_with_an_error() -> None:
    mine = BurstLock()
    with pytest.raises(OSError, match="gone"), mine.hold(MANY + 1):
        raise OSError("gone")
    with mine.hold(MANY + 1):
        assert mine._lock.locked()
