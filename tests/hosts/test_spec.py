"""``--hosts SPEC``."""

from __future__ import annotations

import pytest

from wheelmount.config import Settings
from wheelmount.errors import InputError
from wheelmount.hosts.network import called
from wheelmount.hosts.spec import parse


@pytest.mark.parametrize(
    ("text", "count"), [("local", 1), ("local:1", 1), ("local:2", 2), (" local:64 ", 64)]
)
def test_counts_hosts(text: str, count: int) -> None:
    spec = parse(text)
    assert (spec.kind, spec.count) == ("local", count)
    assert spec.shared == (count > 1)
    assert parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "local:",
        "local:0",
        "local:-1",
        "local:65",
        "local:x",
        "nonsense",
        "local:1;ls",
        "tcp://",
        "tcp://a",
        "tcp://a:1,",
        "tcp://a:1,a:1",
        "tls://a:1,tcp://b:1",
    ],
)
def test_refuses_nonsense_with_a_hint(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse(text)
    assert error.value.hint


@pytest.mark.parametrize(
    ("text", "count", "shared"),
    [
        ("tcp://a:1", 1, False),
        ("tls://a:1,b:1", 2, False),
        ("tls://a:1,tls://b:1", 2, False),
        ("tls://a:1,a:2", 2, True),
    ],
)
def test_reads_addresses(text: str, count: int, shared: bool) -> None:
    spec = parse(text)
    assert (spec.kind, spec.count, spec.shared) == (text[:3], count, shared)
    assert parse(str(spec)) == spec


def test_hosts_are_named_as_in_their_addresses() -> None:
    addresses = parse("tls://a:1,b:1,b:2").addresses
    assert called(addresses) == ["a", "b-1", "b-2"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("tls://a:1,a:2,a-1:5", ["a-1-0", "a-2", "a-1-2"]),
        ("tls://[fd00::1]:1,fd00--1:1", ["fd00--1-1-0", "fd00--1-1-1"]),
        ("ssh:node,node,node-1", ["node-0", "node-1-1", "node-1-2"]),
        ("ssh:[fd00::1],fd00--1", ["fd00--1-0", "fd00--1-1"]),
        ("ssh:b,a@b,c", ["b-0", "b-1", "c"]),
    ],
)
def test_all_hosts_have_names_of_their_own(settings: Settings, text: str, names: list[str]) -> None:
    assert parse(text).make(settings, namespaces=False).names == names


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("2,nodelist=a,b,partition=gpu", ("nodelist=a,b", "partition=gpu")),
        ("2,exclusive,nodelist=n[1-3,5],time=1", ("exclusive", "nodelist=n[1-3,5]", "time=1")),
        ("2,partition=a,b,exclusive,mem=1", ("partition=a,b", "exclusive", "mem=1")),
    ],
)
def test_values_of_slurm_may_have_commas(text: str, options: tuple[str, ...]) -> None:
    assert parse(f"slurm:{text}").options == options


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("array=1-3", "it would be many jobs"),
        ("job-name=x", "a name of its own"),
        ("job-n=x", "a name of its own"),
        ("clusters=other", "only the cluster of this machine"),
        ("nodes=3", "N of slurm:N"),
        ("ntasks=4", "one worker"),
        ("ntasks-per-node=2", "one worker"),
    ],
)
def test_options_that_slurm_is_given_already_are_refused(option: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as error:
        parse(f"slurm:2,time=10,{option}")
    assert repr(option) in error.value.message
