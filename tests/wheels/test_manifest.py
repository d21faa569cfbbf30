from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wheelmount.errors import WheelError, WheelmountError
from wheelmount.wheels.manifest import MANIFEST_NAME, Manifest
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import TARGET, Index, make_wheel

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from(["../a-1.0-py3-none-any.whl", "a", "-r x", "a==", "b @ x", "3.11", "x86_64"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)  # fmt: skip


@pytest.fixture
def filled(uv_index: Index, tmp_path: Path) -> Wheelhouse:
    make_wheel(uv_index.directory, "a", requires=["b>=1"])
    make_wheel(uv_index.directory, "b")
    house = Wheelhouse(tmp_path / "house")
    house.add(Wanted.of(["a"]), targets=[TARGET])
    return house


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data)
    found = [path] if path else []
    for key, value in inner:
        found += places(value, (*path, key)) if isinstance(value, dict | list) else [(*path, key)]
    return found


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_place_is_named_or_harmless(
    filled: Wheelhouse, data: st.DataObject
) -> None:
    file = filled.directory / MANIFEST_NAME
    whole = file.read_bytes()
    wheels = filled.wheels()
    manifest = json.loads(whole)
    manifest["requests"][0]["located"] = manifest["requests"][0]["pins"]
    changed = copy.deepcopy(manifest)
    for place in data.draw(st.lists(st.sampled_from(places(manifest)), min_size=1, max_size=2)):
        holder = changed
        for key in place[:-1]:
            try:
                holder = holder[key]
            except (LookupError, TypeError):  # another value is in that place by now
                holder = {}
        if isinstance(holder, dict | list) and holder:
            holder[place[-1]] = data.draw(VALUES)
    try:
        file.write_text(json.dumps(changed))
        for act in (
            lambda: Manifest.read(filled.directory).write(filled.directory),
            lambda: filled.check(),
            lambda: filled.check(Wanted.of(["a"]), targets=[TARGET]),
            lambda: filled.add(Wanted.of(["a"]), targets=[TARGET]),
        ):
            try:
                act()
            except WheelmountError as error:
                assert error.exit_code != 70
    finally:
        file.write_bytes(whole)
    assert filled.wheels() == wheels


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 2}', "[" * 100_000, "\xff"])
def test_what_is_no_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(WheelError, match="cannot be understood") as caught:
        Manifest.read(tmp_path)
    assert caught.value.hint
