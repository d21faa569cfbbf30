"""Some seeds; more by ``python -m tests.simulation``."""

from __future__ import annotations

import time

import pytest

from tests.simulation.clock import Loop, StuckError
from tests.simulation.world import play

SEEDS, SECONDS = 400, 8.0
"""At most as many, in so much time; a machine that is busy plays fewer."""


@pytest.mark.slow
def test_whatever_happens_only_right_bytes_are_shown_and_every_wait_ends() -> None:
    until, played = time.monotonic() + SECONDS, 0
    for seed in range(SEEDS):
        try:
            play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        played += 1
        if time.monotonic() > until:
            break
    assert played > 10


def test_time_jumps_to_what_comes_next_and_calls_of_one_time_are_in_order() -> None:
    loop, happened = Loop(), []
    for name, when in (("later", 7.0), ("first", 5.0), ("cancelled", 5.0), ("second", 5.0)):
        call = loop.call_at(when, lambda name=name: happened.append((name, loop.time())))
        if name == "cancelled":
            call.cancel()
    loop.call_at(9.0, loop.stop)
    loop.run_forever()
    loop.close()
    assert happened == [("first", 5.0), ("second", 5.0), ("later", 7.0)]


def test_a_wait_for_nothing_is_noticed() -> None:
    loop = Loop()
    with pytest.raises(StuckError):
        loop.run_until_complete(loop.create_future())
    loop.close()
