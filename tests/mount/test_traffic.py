"""Counters of what travelled, and by which way."""

from __future__ import annotations

from pathlib import Path

from wheelmount.mount.serve import traffic


def test_ports_of_rdma_devices_are_counted(tmp_path: Path) -> None:
    assert traffic.rdma_received(tmp_path) == 0
    for port, words in (("mlx5_0/ports/1", "1000\n"), ("mlx5_1/ports/1", "24\n")):
        folder = tmp_path / "class/infiniband" / port / "counters"
        folder.mkdir(parents=True)
        (folder / "port_rcv_data").write_text(words)
    silent = tmp_path / "class/infiniband/rxe0/ports/1/counters"
    silent.mkdir(parents=True)
    (silent / "port_rcv_data").write_text("N/A (no PMA)\n")
    efa = tmp_path / "class/infiniband/efa_0/ports/1/hw_counters"
    efa.mkdir(parents=True)
    (efa / "rx_bytes").write_text("4\n")
    assert traffic.rdma_received(tmp_path) == 4 * 1024 + 4


def test_each_block_is_counted_by_its_way() -> None:
    found = traffic.Traffic()
    assert found.summary()["transport"] == "none"
    found.note("host1", 10, traffic.LOCAL)
    found.note(traffic.CLIENT, 20, traffic.TLS)
    found.note("host1", 5, traffic.LOCAL)
    summary = found.summary()
    assert summary["transport"] == "tls"
    assert summary["ways"] == {"local": 15, "tls": 20}
    assert summary["received"] == {"host1": 15, "client": 20}
    assert traffic.describe(summary) == "tls and local"


def test_rdma_that_no_device_counted_is_doubted() -> None:
    doubted = {"ways": {"rdma": 10, "tcp": 3}, "devices": 9}
    assert "Monarch may use TCP and tcp" in traffic.describe(doubted)
    assert traffic.describe(doubted | {"devices": 10}) == "rdma and tcp"
