from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given as always
from hypothesis import strategies as st

from wheelmount.errors import InputError
from wheelmount.urls import public, without_credentials


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("https://me:pass@host/a", "https://host/a"),
        ("https://me:p'w@host/a", "https://host/a"),
        ("https://me:p@ss@host:8443/a", "https://host:8443/a"),
        ('https://me:p"w`@host/a', "https://host/a"),
        ("https://token@host/a", "https://host/a"),
        ("https://me:p/w@host/a", "https://host/a"),
        ("https://me:p#w@host/a", "https://host/a"),
        ("https://me:p?w@host/a", "https://host/a"),
        ("HTTPS://me:pw@host/a", "HTTPS://host/a"),
        ("git+https://me:pw@host/a@v1#subdirectory=b", "git+https://host/a@v1#subdirectory=b"),
        ("git+ssh://git:pw@host/a", "git+ssh://git@host/a"),
        ("https://host/a.whl?token=abc#sha256=00", "https://host/a.whl#sha256=00"),
        ("https://host/a?x=1&X-Amz-Signature=ab&y=2", "https://host/a?x=1&y=2"),
        ("https://host/a?%74oken=abc", "https://host/a"),
        ("https://host/@scope/a@1", "https://host/@scope/a@1"),
        ("a[b] @ https://me:pw@host/a.whl ; x > '1'", "a[b] @ https://host/a.whl ; x > '1'"),
        ("tried `https://me:pw@host/a` and 'b@c'", "tried `https://host/a` and 'b@c'"),
        ("http://[::1]:80/a", "http://[::1]:80/a"),
        ("http://[::1]/a@1", "http://[::1]/a@1"),
        ("me@example.org", "me@example.org"),
    ],
)
def test_what_is_left(given: str, left: str) -> None:
    assert without_credentials(given) == left
    assert without_credentials(left) == left


def test_in_tables() -> None:
    given = {"a": ["https://me:p'w@host/", 1], "b": {"c": ("x", "https://h/?token=1")}}
    assert public(given) == {"a": ["https://host/", 1], "b": {"c": ("x", "https://h/")}}


def test_in_errors() -> None:
    error = InputError("bad https://me:p'w@host/", hint="not https://me:p'w@host/")
    assert (error.message, error.hint) == ("bad https://host/", "not https://host/")


VISIBLE = st.characters(exclude_categories=("Cc", "Cs", "Z"), exclude_characters="/?#")


@always(
    scheme=st.sampled_from(["http", "https", "git+https", "ftp"]),
    user=st.text(VISIBLE, max_size=6),
    password=st.text(VISIBLE, min_size=1, max_size=12),
    path=st.text("abc/._-@'", max_size=8),
    around=st.sampled_from(["{}", "a @ {}", "x = {} y", "`{}`", "({})"]),
)
def test_no_password_stays_whatever_it_is(
    scheme: str, user: str, password: str, path: str, around: str
) -> None:
    hidden = f"<{password}>"  # so that it is found nowhere else
    text = around.format(f"{scheme}://{user}:{hidden}@host.example/{path}")
    left = without_credentials(text)
    assert hidden not in left
    assert left == around.format(f"{scheme}://host.example/{path}")
    parts = urlsplit(left[left.index("://") - len(scheme) :])
    assert parts.username is None
    assert without_credentials(left) == left


NAMES = ["token", "access_token", "private_token", "sig", "X-Amz-Signature", "apikey", "key"]


@always(
    name=st.sampled_from(NAMES),
    value=st.text("abcXYZ019%-_.~'@!$()*+,;:=", min_size=1),
    before=st.sampled_from(["", "v=1&", "a&"]),
)
def test_no_secret_of_a_query_stays(name: str, value: str, before: str) -> None:
    left = without_credentials(f"https://h/a?{before}{name}=<{value}>&z=2")
    assert left == f"https://h/a?{before}z=2"


def test_a_long_text_is_read_once() -> None:
    """Reading it again from each of its letters would take an hour."""
    word = "a" * 1_000_000
    assert without_credentials(word) == word
    assert without_credentials(f"{word}://me:pass@host/a") == f"{word}://host/a"
