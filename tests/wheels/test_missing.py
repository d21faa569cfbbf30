from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import uv
from packaging.requirements import Requirement

from wheelmount.wheels.install import clean_environment
from wheelmount.wheels.missing import absent, find_missing

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


def test_markers_without_a_meaning_do_not_count(tmp_path: Path) -> None:
    make_wheel(tmp_path, "a", requires=["b; os_name ~= 'posix'", "c; 'x' in extras", "d"])
    assert missing(tmp_path, "a") == ["d (wanted by a 1.0)"]


def test_wheels_of_another_target_do_not_count(tmp_path: Path) -> None:
    make_wheel(tmp_path, "a", tag="cp312-cp312-manylinux_2_17_aarch64")
    assert missing(tmp_path, "a") == ["a (wanted by you)"]
    wanted = [(Requirement("a"), "you")]
    assert find_missing(wanted, list(tmp_path.iterdir()), ARM) == []


def test_unreadable_wheels_have_no_dependencies(tmp_path: Path) -> None:
    (tmp_path / "a-1.0-py3-none-any.whl").write_bytes(b"no zip file")
    (tmp_path / "odd.whl").write_bytes(b"no wheel's name")
    assert missing(tmp_path, "a", "odd") == ["odd (wanted by you)"]


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize(
    ("requirement", "absent_one"),
    [("nosuch", "nosuch"), ("own>2", "own>2"), ("own[x]>=3", "own"), ("top", "under")],
)
def test_what_the_tools_did_not_find(
    tmp_path: Path, tool: str, requirement: str, absent_one: str
) -> None:
    make_wheel(tmp_path, "own", headers="Provides-Extra: x\n")
    make_wheel(tmp_path, "top", requires=["under>=2"])
    install = {"pip": [sys.executable, "-m", "pip"], "uv": [uv.find_uv_bin(), "pip"]}[tool]
    done = subprocess.run(
        [*install, "install", "--no-index", "--find-links", tmp_path, "--target", "x", requirement],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    (found,) = absent(done.stderr)
    assert found.startswith(absent_one)


def test_other_failures() -> None:
    assert absent("error: no space left\nNo matching distribution found for ???\n") == []


def test_what_newer_versions_of_pip_say() -> None:
    said = (
        "ERROR: Could not find a version that satisfies the requirement under>=2 (from top) "
        "(from versions: none)\nERROR: No matching distribution found for under>=2 (from top)\n"
    )
    assert absent(said) == ["under>=2"]
