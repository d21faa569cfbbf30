"""``--hosts SPEC``."""

from __future__ import annotations

import pytest

from wheelmount.errors import InputError
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
    "text", ["", "local:", "local:0", "local:-1", "local:65", "local:x", "nonsense", "local:1;ls"]
)
def test_refuses_nonsense_with_a_hint(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse(text)
    assert error.value.hint
