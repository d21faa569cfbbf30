"""Which RDMA devices are of use."""

from __future__ import annotations

from pathlib import Path

import pytest

from wheelmount.hosts import rdma


def _device(sys: Path, name: str, driver: str | None) -> None:
    device = sys / "class" / "infiniband" / name / "device"
    device.mkdir(parents=True)
    if driver is not None:
        made = sys / "bus" / "pci" / "drivers" / driver
        made.mkdir(parents=True)
        (device / "driver").symlink_to(made)


def test_devices_are_of_use_whose_drivers_monarch_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "missing", list)
    none, software, real = (tmp_path / name for name in ("none", "software", "real"))
    _device(software, "rxe0", None)
    _device(real, "rocep1", "bnxt_re")
    _device(real, "mlx5_0", "mlx5_core")
    assert rdma.devices(none) == {}
    assert rdma.devices(software) == {"rxe0": "no hardware"}
    assert rdma.devices(real) == {"mlx5_0": "mlx5_core", "rocep1": "bnxt_re"}
    assert [rdma.usable(each) for each in (none, software, real)] == [False, False, True]


def test_a_device_without_its_library_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _device(tmp_path, "mlx5_0", "mlx5_core")
    monkeypatch.setattr(rdma, "LIBRARIES", ("libc.so.6", "libnothing.so.1"))
    assert rdma.missing() == ["libnothing.so.1"]
    assert not rdma.usable(tmp_path)
