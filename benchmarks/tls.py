"""What encryption of blocks costs: ``python -m benchmarks.tls``, from the checkout.

One process sends blocks of 1 MiB to another over loopback: as they are, over TLS as a
``BlockServer`` sends them, over TLS whose records are read in batches through memory, and sealed
one by one with AES-256-GCM. Beside each way: the rate, and the processor seconds of each end for a
GB. The ways take turns; each figure is the median of all rounds.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from statistics import median
from time import perf_counter
from typing import NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from wheelmount.hosts import runtime, sockets
from wheelmount.hosts.credentials import Authority

HERE = "127.0.0.1"
BLOCK = 1 << 20
BATCH = 256 << 10
"""Bytes that the third way takes from the socket at once: 16 records."""

KEY = bytes(32)
TAG = 16
"""Bytes that AES-GCM adds to a block."""

Way = tuple[Callable[[socket.socket, int], None], Callable[[socket.socket, int], None]]
"""Sends, and receives, so many blocks over a connection."""


class Cost(NamedTuple):
    """GB/s, and processor seconds for a GB of the sender and of the receiver."""

    rate: float
    sender: float
    receiver: float


def send_plain(connection: socket.socket, blocks: int) -> None:
    """Send blocks as they are."""
    data = memoryview(os.urandom(BLOCK))
    for _ in range(blocks):
        sockets.send(connection, data)


def receive_plain(connection: socket.socket, blocks: int) -> None:
    """Receive blocks as they are."""
    memory = memoryview(bytearray(BLOCK))
    for _ in range(blocks):
        sockets.receive(connection, memory)


def send_tls(connection: socket.socket, blocks: int) -> None:
    """Send blocks over TLS."""
    context = sockets.trust(ssl.PROTOCOL_TLS_SERVER)
    with context.wrap_socket(connection, server_side=True) as secured:
        send_plain(secured, blocks)


def receive_tls(connection: socket.socket, blocks: int) -> None:
    """Receive blocks over TLS, a record (16 KiB) by each call."""
    context = sockets.trust(ssl.PROTOCOL_TLS_CLIENT)
    with context.wrap_socket(connection, server_hostname=HERE) as secured:
        receive_plain(secured, blocks)


def receive_batches(connection: socket.socket, blocks: int) -> None:
    """Receive blocks over TLS; the socket is read for several records at once."""
    received, replies = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = sockets.trust(ssl.PROTOCOL_TLS_CLIENT)
    secured = context.wrap_bio(received, replies, server_hostname=HERE)
    raw, memory = memoryview(bytearray(BATCH)), memoryview(bytearray(BLOCK))

    def more() -> None:
        if replies.pending:
            connection.sendall(replies.read())
        received.write(raw[: connection.recv_into(raw)])

    while True:
        try:
            secured.do_handshake()
            break
        except ssl.SSLWantReadError:
            more()
    connection.sendall(replies.read())
    left = blocks * BLOCK
    while left:
        try:
            left -= secured.read(BLOCK, memory)
        except ssl.SSLWantReadError:
            more()


def send_sealed(connection: socket.socket, blocks: int) -> None:
    """Seal each block by one call, and send it."""
    cipher, data = AESGCM(KEY), memoryview(os.urandom(BLOCK))
    sealed = memoryview(bytearray(BLOCK + TAG))
    for number in range(blocks):
        cipher.encrypt_into(_nonce(number), data, None, sealed)
        sockets.send(connection, sealed)


def receive_sealed(connection: socket.socket, blocks: int) -> None:
    """Receive blocks, and open each by one call."""
    cipher, memory = AESGCM(KEY), memoryview(bytearray(BLOCK))
    sealed = memoryview(bytearray(BLOCK + TAG))
    for number in range(blocks):
        sockets.receive(connection, sealed)
        cipher.decrypt_into(_nonce(number), sealed, None, memory)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


WAYS: Mapping[str, Way] = {
    "as they are": (send_plain, receive_plain),
    "TLS": (send_tls, receive_tls),
    "TLS, read in batches": (send_tls, receive_batches),
    "sealed blocks": (send_sealed, receive_sealed),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.tls")
    parser.add_argument("--size", type=int, default=512, help="MiB (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", default="1,4", help="at the same time (%(default)s)")
    given = parser.parse_args()
    identity = Authority.make().issue([HERE])
    runtime.identity = lambda: identity
    for connections in map(int, given.connections.split(",")):
        costs: defaultdict[str, list[Cost]] = defaultdict(list)
        for _ in range(given.rounds):
            for name, way in WAYS.items():
                costs[name].append(measure(way, given.size // connections, connections))
        print(f"{given.size} MiB, {connections} connections at the same time")
        print("                         GB/s    sender, s/GB    receiver, s/GB")
        for name, found in costs.items():
            rate, sender, receiver = (median(column) for column in zip(*found, strict=True))
            print(f"{name:22} {rate:6.2f} {sender:15.2f} {receiver:17.2f}")


def measure(way: Way, blocks: int, connections: int) -> Cost:
    """Send so many blocks over each of some connections to another process."""
    send, receive = way
    with closing(socket.create_server((HERE, 0))) as listening:
        pairs = []
        for _ in range(connections):
            near = socket.create_connection(listening.getsockname())
            pairs.append((near, listening.accept()[0]))
    size = connections * blocks * BLOCK / 1e9
    readable, writable = os.pipe()
    start = perf_counter()
    child = os.fork()
    if child == 0:
        used = _used(send, [far for _, far in pairs], blocks)
        os.write(writable, str(used).encode())
        os._exit(0)
    os.close(writable)
    for _, far in pairs:
        far.close()
    receiver = _used(receive, [near for near, _ in pairs], blocks)
    with os.fdopen(readable) as result:
        sender = float(result.read())
    os.waitpid(child, 0)
    seconds = perf_counter() - start
    for near, _ in pairs:
        near.close()
    return Cost(size / seconds, sender / size, receiver / size)


def _used(
    work: Callable[[socket.socket, int], None], connections: list[socket.socket], blocks: int
) -> float:
    """Processor seconds of some work on all connections, each on a thread of its own."""
    before = _processor()
    threads = [threading.Thread(target=work, args=(each, blocks)) for each in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _processor() - before


def _processor() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
