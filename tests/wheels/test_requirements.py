from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from wheelmount.errors import InputError, SourceError
from wheelmount.wheels.requirements import existing_files, parse_requirements, without_url


def test_requirements_are_kept_as_meant() -> None:
    text = "pandas[performance]>=2; python_version > '3.10'"
    assert parse_requirements([text]) == [Requirement(text)]


@pytest.mark.parametrize(
    "text",
    ["--index-url=http://x", "-r other.txt", "  -e .", "numpy\n--pre", "numpy\r--pre", "", "a=1",
     "./wheel.whl", "numpy --hash=sha256:00", "numpy # why"],
)  # fmt: skip
def test_what_is_no_requirement_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_requirements(["fine", text])
    assert repr(text) in caught.value.message
    assert caught.value.hint


def test_a_url_is_taken_off() -> None:
    with_url = Requirement("a[x] @ https://example.org/a-1-py3-none-any.whl ; os_name == 'posix'")
    assert without_url(with_url) == Requirement("a[x]; os_name == 'posix'")
    assert with_url.url


def test_files_become_absolute(tmp_path: Path) -> None:
    Path("-r.txt").write_text("")
    assert existing_files([Path("-r.txt")]) == [tmp_path / "-r.txt"]
    with pytest.raises(SourceError, match=r"no\.txt is not a file"):
        existing_files([Path("no.txt")])
