"""Hosts of one mount that came to show different trees."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli, mounts_shown
from tests.mount.conformance import assert_same, await_last, mounted_on_two
from wheelmount.config import MEMORY, Settings
from wheelmount.errors import HostError
from wheelmount.hosts import runtime
from wheelmount.mount.client.agents import Agents
from wheelmount.mount.client.delivery import Delivery
from wheelmount.mount.client.remote import RemoteMount

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]


@pytest.fixture(params=["bind", "devfuse"])
def mount(
    source: Path,
    workplace: Path,
    settings: Settings,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[RemoteMount]:
    """A mount of ``source`` on two hosts, complete."""
    monkeypatch.setenv("WHEELMOUNT_ADAPTER", request.param)
    settings = replace(settings, adapter=request.param, store=MEMORY)
    with mounted_on_two(source, workplace, settings) as made:
        yield made


def _edit(source: Path, word: str) -> None:
    """Have files and directories come, go and change, in an order that gives them numbers anew."""
    (source / "page").write_text(word)
    for name in (f"{word}-file", f"{word}-other"):
        (source / name).write_text(f"{name} of {word}")
    (source / f"{word}-directory").mkdir()
    (source / f"{word}-directory" / "below").write_text(word * 1000)


def _everywhere(mount: RemoteMount, source: Path) -> None:
    store = mount._settings.private_store(mounted=True)
    await_last([store / f"{mount.identity}-{name}" for name in mount.mntpoints])
    for path in mount.mntpoints.values():
        assert_same(source, Path(path))


def _alike(source: Path, *shown: Path) -> bool:
    """Whether names and bytes are the same; numbers of links tell of earlier generations too."""
    commands = [["diff", "-r", "--no-dereference", str(source), str(each)] for each in shown]
    return not any(subprocess.run(command, check=False).returncode for command in commands)


@pytest.mark.costly
def test_a_refresh_of_one_host_and_then_of_the_other_and_then_of_both(
    mount: RemoteMount, source: Path, workplace: Path, cli: Cli
) -> None:
    first, second = workplace / "host0", workplace / "host1"
    _edit(source, "early")
    assert mount.refresh()
    _edit(source, "one")
    (source / "early-other").unlink()
    assert cli("refresh", first).returncode == 0
    assert _alike(source, first)
    assert (second / "page").read_text() == "early"
    (source / "one-file").unlink()
    (source / "early-file").rename(source / "moved")
    _edit(source, "two")
    assert cli("refresh", second).returncode == 0
    assert _alike(source, second)
    assert (first / "page").read_text() == "one"
    with (first / "one-file").open() as held, (second / "two-file").open() as other:
        done = cli("refresh", source)
        assert done.returncode == 0, done.stderr
        assert _alike(source, first, second)
        _edit(source, "three")
        assert mount.refresh(), "by a client that knew of none of this"
        assert _alike(source, first, second)
        assert held.read() == "one-file of one"
        assert other.read() == "two-file of two"
    assert not mount.refresh()
    _everywhere(mount, source)
    assert all(not found.damaged for found in mount.verify().values())
    assert len(mounts_shown(cli)) == 2


def test_a_client_that_ends_between_two_hosts(
    mount: RemoteMount, source: Path, workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    _edit(source, "one")
    call, offer, offered = Agents.call, RemoteMount._offer, []

    def note(*arguments: Any, **named: Any) -> Delivery:
        offered.append(offer(*arguments, **named))
        return offered[0]

    def call_first_only(agents: Agents, work: Any, names: Any = None, *rest: Any) -> Any:
        if names is None or "advance" not in work.__code__.co_names:
            return call(agents, work, names, *rest)
        call(agents, work, ["host0"])
        raise HostError("the client ends here")

    with monkeypatch.context() as patch:
        patch.setattr(Agents, "call", call_first_only)
        patch.setattr(RemoteMount, "_offer", note)
        with pytest.raises(HostError, match="ends here"):
            mount.refresh()
    left = mount.handles["host1"].abandon.call_one(offered[0].layout.identity)
    runtime.gather({"host1": left}, 30)  # as its end does
    assert (workplace / "host0" / "page").read_text() == "one"
    assert (workplace / "host1" / "page").read_text() != "one"
    done = cli("refresh", source)
    assert done.returncode == 0, done.stderr
    assert "refreshed" in done.stdout
    _everywhere(mount, source)


@pytest.mark.costly
@pytest.mark.parametrize("reached", [["host0"], ["host0", "host1"]], ids=["one host", "all hosts"])
def test_a_client_that_was_interrupted_while_hosts_changed_over_refreshes_again(
    mount: RemoteMount, source: Path, monkeypatch: pytest.MonkeyPatch, reached: list[str]
) -> None:
    """It does not know that they did."""
    _edit(source, "one")
    call = Agents.call

    def interrupted(agents: Agents, work: Any, names: Any = None, *rest: Any) -> Any:
        if names is None or "advance" not in work.__code__.co_names:
            return call(agents, work, names, *rest)
        call(agents, work, reached)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Agents, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mount.refresh()
    _edit(source, "two")
    (source / "one-other").rename(source / "moved")
    assert mount.refresh()
    _everywhere(mount, source)
    assert not mount.refresh()
