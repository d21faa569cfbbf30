"""Which RDMA devices are of use."""

from __future__ import annotations

from pathlib import Path

import monarch.rdma
import pytest

from wheelmount.hosts import rdma


def _device(sys: Path, name: str, driver: str | None) -> None:
    device = sys / "class" / "infiniband" / name / "device"
    device.mkdir(parents=True)
    if driver is not None:
        made = sys / "bus" / "pci" / "drivers" / driver
        made.mkdir(parents=True)
        (device / "driver").symlink_to(made)


def test_devices_have_drivers(tmp_path: Path) -> None:
    none, software, real = (tmp_path / name for name in ("none", "software", "real"))
    _device(software, "rxe0", None)
    _device(real, "rocep1", "bnxt_re")
    _device(real, "mlx5_0", "mlx5_core")
    assert rdma.devices(none) == {}
    assert rdma.devices(software) == {"rxe0": "no hardware"}
    assert rdma.devices(real) == {"mlx5_0": "mlx5_core", "rocep1": "bnxt_re"}


def test_monarch_says_whether_it_takes_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def usable(there: dict[str, str], taken: bool) -> bool:
        monkeypatch.setattr(rdma, "devices", lambda: there)
        monkeypatch.setattr(monarch.rdma, "is_ibverbs_available", lambda: taken)
        return rdma.usable.__wrapped__()

    assert not usable({}, True), "it is not asked, as to ask takes long"
    assert not usable({"rxe0": "no hardware"}, False)
    assert usable({"mlx5_0": "mlx5_core"}, True)
