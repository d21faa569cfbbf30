from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement

from wheelmount.wheels.missing import find_missing

from .support import ARM, TARGET, make_wheel


def missing(directory: Path, *roots: str) -> list[str]:
    wanted = [(Requirement(root), "you") for root in roots]
    return [str(one) for one in find_missing(wanted, sorted(directory.glob("*.whl")), TARGET)]


def test_nothing(tmp_path: Path) -> None:
    make_wheel(tmp_path, "a", requires=["B.c"])
    make_wheel(tmp_path, "b_c", requires=["a"])  # a circle
    assert missing(tmp_path, "a", "A>=1") == []


def test_everything_is_named_with_who_wants_it(tmp_path: Path) -> None:
    make_wheel(tmp_path, "a", requires=["b>=2", "c", "d; extra == 'more'", "w; os_name == 'nt'"])
    make_wheel(tmp_path, "b", "1.0")
    make_wheel(tmp_path, "c", "3.0", requires=["e"])
    make_wheel(tmp_path, "c", "2.0", requires=["old"])
    assert missing(tmp_path, "a[more]", "f; python_version < '3'") == [
        "b>=2 (wanted by a 1.0)",
        "d (wanted by a 1.0)",
        "e (wanted by c 3.0)",
    ]


def test_wheels_of_another_target_do_not_count(tmp_path: Path) -> None:
    make_wheel(tmp_path, "a", tag="cp312-cp312-manylinux_2_17_aarch64")
    assert missing(tmp_path, "a") == ["a (wanted by you)"]
    wanted = [(Requirement("a"), "you")]
    assert find_missing(wanted, list(tmp_path.iterdir()), ARM) == []


def test_unreadable_wheels_have_no_dependencies(tmp_path: Path) -> None:
    (tmp_path / "a-1.0-py3-none-any.whl").write_bytes(b"no zip file")
    (tmp_path / "odd.whl").write_bytes(b"no wheel's name")
    assert missing(tmp_path, "a", "odd") == ["odd (wanted by you)"]
