"""Counters of what travelled, and what they say of the transport."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from wheelmount.mount import traffic


def test_the_network_is_counted() -> None:
    before = traffic.network_received()
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(), 1 << 20))
        sender.start()
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 16):
                pass
        sender.join()
    assert traffic.network_received() - before >= 1 << 20


def _send(address: tuple[str, int], size: int) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(bytes(size))


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


@pytest.mark.parametrize(
    ("received", "rdma", "network", "transport"),
    [
        (100, 120, 5, "rdma"),
        (100, 20, 130, "tcp"),
        (100, 20, 30, "local"),
        (0, 500, 500, "none"),
    ],
)
def test_the_transport_is_what_counted_the_bytes(
    received: int, rdma: int, network: int, transport: str
) -> None:
    assert traffic.transport(received, rdma, network) == transport
