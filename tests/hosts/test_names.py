"""Folded names of hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wheelmount.errors import InputError
from wheelmount.hosts.names import alike, expand, fold, natural


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([f"host{n}" for n in range(16)], "host[0-15]"),
        (["node10", "node9", "login", "node11"], "login,node[9-11]"),
        (["node08", "node09", "node10", "node12"], "node[08-10,12]"),
        (["n8", "n08", "n10"], "n[08,10],n8"),
        (["r1n1.example", "r1n2.example", "r2n1.example"], "r1n[1-2].example,r2n1.example"),
        (["host0:0", "host0:1"], "host0:[0-1]"),
        (["a"], "a"),
        ([], ""),
    ],
)
def test_names_are_folded(names: list[str], folded: str) -> None:
    assert fold(names) == folded
    if names:
        assert set(expand(folded)) == set(names)


@pytest.mark.slow
@given(st.lists(st.from_regex(r"[a-c]{0,2}[0-9]{1,3}[a-b.]?", fullmatch=True), min_size=1))
def test_folded_names_stand_for_all_of_them(names: list[str]) -> None:
    assert sorted(expand(fold(names))) == sorted(set(names))


def test_natural_order() -> None:
    assert sorted(["h10", "h9", "a", "h"], key=natural) == ["a", "h", "h9", "h10"]


@pytest.mark.parametrize("text", ["", "a,", "a[", "a[1-2", "a[2-1]", "a[x]", "a[]", "a[0-99999]"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        expand(text)


def test_hosts_that_say_the_same() -> None:
    said = [("h1", "yes"), ("h0", "yes"), ("h2", "no")]
    assert alike(said) == [("h[0-1]", "yes"), ("h2", "no")]
