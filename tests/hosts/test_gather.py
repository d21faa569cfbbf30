"""Calls to several hosts that are awaited together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from wheelmount.errors import HostError, InputError, WaitError
from wheelmount.hosts import runtime
from wheelmount.hosts.host import Host, Roster


class _Call:
    """As much of a future of Monarch as is awaited.

    Args:
        work: makes what it waits for.
    """

    def __init__(self, work: Callable[[], Awaitable[object]]) -> None:
        self._work = work

    def as_asyncio(self) -> Awaitable[object]:
        return self._work()


def _returns(value: object) -> _Call:
    return _Call(lambda: asyncio.sleep(0.01, value))


def _raises(error: Exception) -> _Call:
    async def work() -> None:
        await asyncio.sleep(0)
        raise error

    return _Call(work)


NEVER = _Call(lambda: asyncio.sleep(1000))


def test_results_and_errors_are_in_the_order_of_the_calls() -> None:
    error, told = InputError("no"), []
    calls = {"a": _returns(1), "b": _raises(error), "c": _returns(None), "d": _raises(OSError("x"))}
    found = runtime.gather(calls, 10, lambda key, _: told.append(key))
    assert list(found) == ["a", "b", "c", "d"]
    assert (found["a"], found["b"], found["c"]) == (1, error, None)
    assert isinstance(found["d"], HostError)
    assert sorted(told) == ["a", "b", "c", "d"]
    assert runtime.gather({}, 10) == {}


def test_what_does_not_come_in_time_is_an_error_and_the_rest_is_kept() -> None:
    found = runtime.gather({"a": NEVER, "b": _returns(2)}, 0.1)
    assert isinstance(found["a"], WaitError)
    assert found["b"] == 2


def test_a_call_to_a_host_that_died_ends_alone(tmp_path: Path) -> None:
    """A host that accepts a connection, or is out of reach, keeps all of its time."""
    paths = [tmp_path / name for name in ("listens", "gone", "refuses")]
    with socket.socket() as port, socket.socket(socket.AF_UNIX) as listens:
        port.bind(("127.0.0.1", 0))  # it refuses, as nothing listens
        listens.bind(str(paths[0]))
        listens.listen()
        with socket.socket(socket.AF_UNIX) as ended:
            ended.bind(str(paths[2]))
        addresses = [
            *(f"ipc://{path}" for path in paths),
            f"tls://127.0.0.1:{port.getsockname()[1]}",
        ]
        roster = Roster(Host(at, None, at) for at in (*addresses, ""))
        found = runtime.gather(dict.fromkeys(roster.hosts, NEVER), 2.5, lost=roster.lost)
    dead = {at for at, error in found.items() if isinstance(error, HostError)}
    assert dead == roster.dead == {*addresses[1:]}
    assert str(found[addresses[-1]]) == f"the host died: {addresses[-1]}: Connection refused"
    assert all(isinstance(error, WaitError) for at, error in found.items() if at not in dead)


def test_a_check_ends_all_calls_that_are_awaited() -> None:
    lost = HostError("the session is gone")

    def check() -> None:
        raise lost

    with runtime.watching(check):
        found = runtime.gather({"a": NEVER, "b": _returns(2), "c": NEVER}, None)
    assert found == {"a": lost, "b": 2, "c": lost}


def test_a_check_holds_in_a_running_loop_too_and_only_in_its_context() -> None:
    lost = HostError("the session is gone")

    def check() -> None:
        raise lost

    async def work() -> dict[str, object]:
        with runtime.watching(check):
            with runtime.watched(()):
                (end,) = runtime.gather({"a": NEVER}, 1.5).values()
                assert isinstance(end, WaitError)
            return runtime.gather({"a": NEVER}, 10)

    assert asyncio.run(work()) == {"a": lost}


def test_in_a_running_loop() -> None:
    async def work() -> dict[str, object]:
        return runtime.gather({"a": _returns(1)}, 10)

    assert asyncio.run(work()) == {"a": 1}
