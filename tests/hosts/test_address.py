"""``tcp://HOST:PORT``."""

from __future__ import annotations

import socket

import pytest

from wheelmount.errors import HostError, InputError
from wheelmount.hosts.address import Address


@pytest.mark.parametrize("text", ["tcp://node-1.cluster:26600", "node-1.cluster:26600"])
def test_reads_an_address(text: str) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == ("node-1.cluster", 26600)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "tcp://", "a", "a:", ":1", "a:0", "a:65536", "a:b", "a:1:2", "a b:1", "a/b:1"]
)
def test_refuses_nonsense_with_a_hint(text: str) -> None:
    with pytest.raises(InputError) as error:
        Address.parse(text)
    assert error.value.hint


def test_says_who_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        address.await_answer(5)
    with pytest.raises(HostError, match=str(address)) as error:
        address.await_answer(5)
    assert f"wheelmount.hosts.worker {address}" in str(error.value.hint)
    with pytest.raises(HostError, match=r"nowhere\.invalid"):
        Address("nowhere.invalid", 1).await_answer(5)
    with pytest.raises(HostError, match=r"nowhere\.invalid"):
        Address("nowhere.invalid", 1).seen_from()


def test_knows_the_way_to_a_host() -> None:
    assert Address("127.0.0.1", 1).seen_from() == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost"])  # noqa: S104 - not bound to
def test_others_must_be_able_to_reach_a_worker(host: str) -> None:
    with pytest.raises(InputError, match="other machines cannot reach"):
        Address(host, 26600).check_own()
    Address("127.0.0.1", 26600).check_own()
