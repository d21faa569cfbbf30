"""The whole way with the real index."""

from __future__ import annotations

from pathlib import Path

import pytest

from wheelmount.errors import ResolveError, WheelError
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

pytestmark = pytest.mark.network

WANTED = ["requests", "numpy", "pandas"]


@pytest.mark.parametrize(
    "target", [Target.here(), Target("3.12", "aarch64-manylinux_2_36")], ids=str
)
def test_requests_numpy_pandas(target: Target, tmp_path: Path) -> None:
    house = Wheelhouse(tmp_path / "house")
    report = house.add(Wanted.of(WANTED), targets=[target])
    assert len(report.fetched) == len(report.wheels) >= 8
    assert any(
        name.startswith("numpy-") and f"_{target.machine}.whl" in name for name in report.wheels
    )
    house.check().raise_if_any()
    house.check(Wanted.of(["pandas"]), targets=[target]).raise_if_any()
    assert house.add(Wanted.of(WANTED), targets=[target]).fetched == ()
    numpy = next(house.directory.glob("numpy-*.whl"))
    numpy.unlink()
    with pytest.raises(WheelError, match=r"numpy\S* \(wanted by pandas "):
        house.check(Wanted.of(["pandas"]), targets=[target]).raise_if_any()


def test_other_pythons_and_platforms(tmp_path: Path) -> None:
    house = Wheelhouse(tmp_path / "house")
    expected = {
        ("3.14t", "x86_64"): "cp314-cp314t-manylinux",
        ("3.14t", "musllinux_1_2_aarch64"): "cp314-cp314t-musllinux",
        ("pypy3.11", "x86_64"): "pp311-pypy311_pp73-manylinux",
        ("3.12", "aarch64"): "cp312-cp312-manylinux",
        ("3.11", "manylinux2014_x86_64"): "cp311-cp311-manylinux_2_17",
    }
    targets = [Target.parse(*names) for names in expected]
    house.add(Wanted.of(["pydantic-core==2.41.5"]), targets=targets)
    wheels = [wheel.name for wheel in house.wheels() if wheel.name.startswith("pydantic_core-")]
    assert len(wheels) == len(targets)
    for (_, platform), tags in expected.items():
        machine = "aarch64" if "aarch64" in platform else "x86_64"
        assert [wheel for wheel in wheels if f"-{tags}" in wheel and machine in wheel], tags
    house.check().raise_if_any()


def test_refusals(tmp_path: Path) -> None:
    target = Target("3.12", "aarch64-manylinux_2_36")
    house = Wheelhouse(tmp_path / "house")
    with pytest.raises(ResolveError, match=r"no wheel of pyfuse3 for Python 3\.12 on aarch64"):
        house.add(Wanted.of(["pyfuse3==3.4.0"]), targets=[target])
    with pytest.raises(ResolveError, match="no package named wheelmount-no-such-package in the"):
        house.add(Wanted.of(["wheelmount-no-such-package"]), targets=[target])
    with pytest.raises(ResolveError, match=r"no solution .* numpy>=1\.26"):
        house.add(Wanted.of(["pandas==2.2.3", "numpy<1.21"]), targets=[target])
