"""``tls://HOST:PORT``."""

from __future__ import annotations

import socket

import pytest

from wheelmount.errors import HostError, InputError
from wheelmount.hosts import runtime
from wheelmount.hosts.address import OPEN, SECURE, Address, called


@pytest.mark.parametrize("scheme", [SECURE, OPEN])
def test_reads_an_address(scheme: str) -> None:
    address = Address.parse(f"{scheme}://node-1.cluster:26600")
    assert address == Address(scheme, "node-1.cluster", 26600)
    assert Address.parse(str(address)) == address
    assert Address.parse("node-1.cluster:26600", scheme) == address


@pytest.mark.parametrize("scheme", [SECURE, OPEN])
@pytest.mark.parametrize("host", ["::1", "fd00::2", "fd00:0:0:1::10.1.2.3"])
def test_reads_an_address_of_ipv6(scheme: str, host: str) -> None:
    address = Address.parse(f"{scheme}://[{host}]:26600")
    assert address == Address(scheme, host, 26600)
    assert str(address) == f"{scheme}://[{host}]:26600"
    assert Address.parse(str(address)) == address
    assert address.names()[0] == host


@pytest.mark.parametrize(
    "text",
    [
        "[::1]",
        "::1:1",
        "[::1:1",
        "[abc]:1",
        "[10.0.0.1]:1",
        "[:::1]:1",
        "",
        "tls://",
        "a",
        "a:",
        ":1",
        "a:0",
        "a:65536",
        "a:b",
        "a:1:2",
        "a b:1",
        "a/b:1",
        "udp://a:1",
    ],
)
def test_refuses_nonsense_with_a_hint(text: str) -> None:
    with pytest.raises(InputError) as error:
        Address.parse(text, SECURE)
    assert error.value.hint


def test_needs_a_scheme() -> None:
    with pytest.raises(InputError):
        Address.parse("a:1")


def test_says_who_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(SECURE, "127.0.0.1", server.getsockname()[1])
        address.await_answer(5)
    with pytest.raises(HostError, match=str(address)) as error:
        address.await_answer(5)
    assert f"wheelmount worker {address}" in str(error.value.hint)
    with pytest.raises(HostError, match=r"nowhere\.invalid"):
        Address(SECURE, "nowhere.invalid", 1).await_answer(5)
    with pytest.raises(HostError, match=r"nowhere\.invalid"):
        Address(SECURE, "nowhere.invalid", 1).reached_from()


def test_reaches_and_is_reached_by_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        address = Address(SECURE, "::1", server.getsockname()[1])
        address.await_answer(5)
    with pytest.raises(HostError, match=r"tls://\[::1\]:\d+ cannot be reached"):
        address.await_answer(5)
    assert address.reached_from() == Address(SECURE, "::1", 0)
    address.check_own()  # asked for, as hosts of one machine are
    with pytest.raises(InputError, match="which other machines cannot reach"):
        Address(SECURE, "::", 1).check_own()


def test_hosts_are_called_by_addresses_that_paths_may_have() -> None:
    assert called("fd00::2") == "fd00--2"
    assert called("node-1") == "node-1"


def test_knows_the_way_to_a_host() -> None:
    assert Address(SECURE, "127.0.0.1", 1).reached_from() == Address(SECURE, "127.0.0.1", 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost"])  # noqa: S104 - not bound to
def test_others_must_be_able_to_reach_a_worker(host: str) -> None:
    with pytest.raises(InputError, match="other machines cannot reach"):
        Address(SECURE, host, 26600).check_own()
    Address(SECURE, "127.0.0.1", 26600).check_own()


def test_a_process_knows_where_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_address", None)
    for text, expected in (
        ("tls://node1:0", Address(SECURE, "node1", 0)),
        ("tcp://10.0.0.1:0", Address(OPEN, "10.0.0.1", 0)),
        ("unix", None),
        ("", None),
    ):
        monkeypatch.setenv(runtime.ADDRESS, text)
        assert runtime.address() == expected
