from __future__ import annotations

import subprocess
import sys

import pytest
import uv
from packaging.markers import Marker
from packaging.tags import Tag, sys_tags

from wheelmount.errors import InputError, UnavailableError
from wheelmount.wheels import target as target_module
from wheelmount.wheels.target import GLIBC_MINORS, MACHINES, Target

from .support import ARM, TARGET


def test_here_is_this_interpreter() -> None:
    here = Target.here()
    assert here.python_version == f"{sys.version_info.major}.{sys.version_info.minor}"
    mine = set(sys_tags())
    assert set(here.tags()) <= mine
    interpreter = here.python_version.replace(".", "")
    assert Tag(f"cp{interpreter}", f"cp{interpreter}", f"manylinux_2_17_{here.machine}") in mine


def test_uv_knows_every_platform() -> None:
    text = subprocess.run(
        [uv.find_uv_bin(), "pip", "compile", "--help"], capture_output=True, text=True, check=True
    ).stdout
    known = set(text.replace(",", " ").replace("]", " ").split())
    for machine in set(MACHINES.values()):
        assert {f"{machine}-manylinux_2_{minor}" for minor in GLIBC_MINORS} <= known
        assert f"{machine}-unknown-linux-musl" in known


@pytest.mark.parametrize(
    ("typed", "platform"),
    [
        ("x86_64", "x86_64-manylinux_2_28"),
        ("arm64", "aarch64-manylinux_2_28"),
        ("AMD64", "x86_64-manylinux_2_28"),
        ("aarch64-unknown-linux-gnu", "aarch64-manylinux_2_28"),
        ("linux_aarch64", "aarch64-manylinux_2_28"),
        ("manylinux2014_x86_64", "x86_64-manylinux_2_17"),
        ("x86_64-manylinux2014", "x86_64-manylinux_2_17"),
        ("manylinux_2_28_aarch64", "aarch64-manylinux_2_28"),
        ("manylinux_2_30_x86_64", "x86_64-manylinux_2_28"),
        ("manylinux_2_99_x86_64", "x86_64-manylinux_2_40"),
        ("x86_64-manylinux_2_36", "x86_64-manylinux_2_36"),
        ("musllinux_1_2_x86_64", "x86_64-unknown-linux-musl"),
        ("aarch64-unknown-linux-musl", "aarch64-unknown-linux-musl"),
    ],
)
def test_names_of_platforms(typed: str, platform: str) -> None:
    assert Target.parse("3.12", typed) == Target("3.12", platform)


def test_defaults_are_this_machine() -> None:
    here = Target.here()
    assert Target.parse() == Target.parse(platform="linux") == here
    assert Target.parse(platform="manylinux_2_17").machine == here.machine


@pytest.mark.parametrize(
    "name",
    ["windows", "", "macos", "x86_64-pc-windows-msvc", "manylinux_2_5_x86_64",
     "musllinux_1_1_x86_64", "musllinux_2_0_aarch64", "--help", "manylinux_3_1_x86_64"],
)  # fmt: skip
def test_bad_platform(name: str) -> None:
    with pytest.raises(InputError) as caught:
        Target.parse("3.12", name)
    assert repr(name) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "version",
    ["", "3", "2.7", "3.x", "python3.12", "3.12.1.2", "3.1\n2", "3.12t", "pypy3.13t", "jython3.9"],
)
def test_bad_version(version: str) -> None:
    with pytest.raises(InputError) as caught:
        Target.parse(version, "x86_64")
    assert caught.value.hint


def test_tags_include_every_older_glibc_and_name_of_it() -> None:
    platforms = [tag.platform for tag in TARGET.tags() if tag.abi == "cp311"]
    assert platforms[0] == "manylinux_2_28_x86_64"
    assert {"manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"} <= set(platforms)
    assert "manylinux_2_29_x86_64" not in platforms
    arm = {tag.platform for tag in ARM.tags()}
    assert "manylinux2014_aarch64" in arm
    assert not any("manylinux1_" in platform or "x86_64" in platform for platform in arm)


def test_tags_of_musl() -> None:
    musl = Target.parse("3.12", "musllinux_1_2_aarch64")
    platforms = {tag.platform for tag in musl.tags()}
    assert {"musllinux_1_2_aarch64", "musllinux_1_0_aarch64", "any"} <= platforms
    assert not any("manylinux" in platform for platform in platforms)
    assert str(musl) == "Python 3.12 on aarch64 with musl 1.2"
    assert musl.machine == "aarch64"


def test_several() -> None:
    targets = Target.parse_all(["3.11", "3.12"], ["x86_64", "manylinux_2_28_x86_64", "aarch64"])
    assert [str(target) for target in targets] == [
        f"Python 3.{minor} on {machine} with glibc 2.28"
        for minor in (11, 12)
        for machine in ("x86_64", "aarch64")
    ]
    assert Target.parse_all() == [Target.here()]


def test_own_build_is_preferred_to_abi3_to_pure() -> None:
    tags = [str(tag) for tag in ARM.tags()]
    wanted = ["cp312-cp312-manylinux_2_17_aarch64", "cp312-abi3-manylinux_2_17_aarch64",
              "cp39-abi3-manylinux_2_17_aarch64", "py3-none-any"]  # fmt: skip
    assert sorted(wanted, key=tags.index) == wanted


def test_markers_are_those_of_the_target() -> None:
    environment = {**ARM.environment()}
    assert Marker("platform_machine == 'aarch64' and python_version == '3.12'").evaluate(
        environment  # type: ignore[arg-type]
    )
    assert Target("3.12.4", ARM.platform).environment()["python_full_version"] == "3.12.4"
    assert ARM.environment()["python_full_version"] == "3.12.0"


FREE = Target.parse("3.14t", "x86_64")
PYPY = Target.parse("pypy3.11", "x86_64")


def test_free_threaded_builds() -> None:
    tags = [str(tag) for tag in FREE.tags()]
    wanted = ["cp314-cp314t-manylinux_2_17_x86_64", "cp314-none-any", "py3-none-any"]
    assert sorted(wanted, key=tags.index) == wanted
    # They load nothing that was built for the other ABI, stable or not.
    assert not [tag for tag in tags if "-cp314-" in tag or "-abi3-" in tag]
    assert FREE.environment()["python_full_version"] == "3.14.0"
    assert FREE.environment()["implementation_name"] == "cpython"


def test_pypy() -> None:
    tags = [str(tag) for tag in PYPY.tags()]
    wanted = ["pp311-pypy311_pp73-manylinux_2_17_x86_64", "py3-none-any"]
    assert sorted(wanted, key=tags.index) == wanted
    assert not [tag for tag in tags if tag.startswith("cp")]
    environment = PYPY.environment()
    assert environment["platform_python_implementation"] == "PyPy"
    assert environment["python_version"] == "3.11"


def test_a_machine_without_glibc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "platform_tags", lambda: iter(["musllinux_1_2_x86_64"]))
    with pytest.raises(UnavailableError) as caught:
        Target.here()
    assert "--platform" in (caught.value.hint or "")


def test_reads_well() -> None:
    assert str(ARM) == "Python 3.12 on aarch64 with glibc 2.36"
    assert str(FREE) == "Python 3.14 (free-threaded) on x86_64 with glibc 2.28"
    assert str(PYPY) == "PyPy 3.11 on x86_64 with glibc 2.28"
