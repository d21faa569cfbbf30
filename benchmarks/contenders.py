"""Ways to bring a directory to hosts: ``python -m benchmarks.contenders NAME SOURCE HOST…``.

Run on the host that has the directory; the others run what ``benchmarks.delivery`` starts there.
Prints the seconds it took until every host had every byte, and the most memory that it had, bytes.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.testbed.service import WORKER_PORT

MOUNT = "/mnt/tree"
"""Where hosts show it."""

SINK_PORT, RSYNC_PORT = 26700, 26800
BLOCK = 4 << 20


def files(source: Path) -> list[Path]:
    """Files of a directory, in order."""
    return sorted(path for path in source.rglob("*") if path.is_file())


def held(source: Path) -> int:
    """Bytes of a directory's files."""
    return sum(path.stat().st_size for path in files(source))


def _attached(hosts: Sequence[str]) -> Any:
    """The workers on hosts, not attached to yet."""
    from wheelmount.config import load
    from wheelmount.hosts.address import OPEN, Address
    from wheelmount.hosts.network import NetworkHosts

    return NetworkHosts([Address(OPEN, host, WORKER_PORT) for host in hosts], load())


def sink() -> None:
    """On a host: keep the bytes of one connection after the other in memory."""
    buffer = memoryview(bytearray(1 << 20))
    with socket.create_server(("", SINK_PORT)) as server:
        while True:
            connection, _ = server.accept()
            with connection, Path("/dev/shm/sink").open("wb", buffering=0) as file:  # noqa: S108
                while length := connection.recv_into(buffer):
                    file.write(buffer[:length])
                connection.sendall(b".")


def sockets(source: Path, hosts: Sequence[str]) -> float:
    """A connection to each host at the same time, and nothing but ``sendfile``."""
    paths = files(source)

    def send(host: str) -> None:
        with socket.create_connection((host, SINK_PORT)) as connection:
            for path in paths:
                with path.open("rb") as file:
                    connection.sendfile(file)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)

    return _at_once(send, hosts)


def rsync(source: Path, hosts: Sequence[str]) -> float:
    """A transfer to each host at the same time, to a server of its own protocol in memory there."""

    def send(host: str) -> None:
        where = f"rsync://{host}:{RSYNC_PORT}/tree/"
        subprocess.run(
            ["rsync", "-a", "--whole-file", "--inplace", f"{source}/", where], check=True
        )

    return _at_once(send, hosts)


def sbcast(source: Path, hosts: Sequence[str]) -> float:
    """Slurm's broadcast of one file, on nodes that are allocated already.

    A directory is made one with ``tar``, and unpacked again: that is how it is used for such.
    """
    nodes, name = str(len(hosts)), f"bench-{os.getpid()}"
    waiting = ["salloc", "--quiet", "--no-shell", "--exclusive", "-N", nodes, "-J", name]
    subprocess.run(waiting, check=True)
    job = subprocess.run(
        ["squeue", "--noheader", "--name", name, "--format", "%A"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    paths = files(source)
    whole, there = paths[0], "/dev/shm/sbcast"  # noqa: S108 - the lab's own
    started = time.perf_counter()
    if len(paths) > 1:
        whole = Path("/dev/shm/sbcast.tar")  # noqa: S108
        subprocess.run(["tar", "-C", source, "-cf", whole, "."], check=True)
    subprocess.run(["sbcast", "--force", f"--jobid={job}", whole, there], check=True)
    if len(paths) > 1:
        unpack = f"mkdir /dev/shm/tree && tar -C /dev/shm/tree -xf {there}"
        run = ["srun", f"--jobid={job}", "-N", nodes, "--ntasks-per-node=1"]
        subprocess.run([*run, "sh", "-c", unpack], check=True)
    seconds = time.perf_counter() - started
    subprocess.run(["scancel", job], check=True)
    return seconds


def wheelmount(source: Path, hosts: Sequence[str], compress: str = "auto") -> float:
    """``remotemount`` until all bytes are on all hosts."""
    from wheelmount import remotemount
    from wheelmount.config import load

    settings = replace(load(), compress=compress)
    with _attached(hosts) as made:
        started = time.perf_counter()
        with remotemount(made, source, MOUNT, settings=settings) as mount:
            mount.wait()
            return time.perf_counter() - started


def plain(source: Path, hosts: Sequence[str]) -> float:
    """The same with nothing compressed."""
    return wheelmount(source, hosts, compress="never")


def rdma(source: Path, hosts: Sequence[str]) -> float:
    """All bytes, in memory at once, read by every host with ``RDMABuffer.read_into``; no more."""
    import mmap

    from monarch.rdma import RDMABuffer

    from benchmarks.puller import Puller
    from wheelmount.hosts import runtime

    with _attached(hosts) as made, runtime.quiet():
        size = held(source)
        memory, end = memoryview(mmap.mmap(-1, size)), 0
        for path in files(source):
            with path.open("rb", buffering=0) as file:
                while length := file.readinto(memory[end:]):
                    end += length
        pieces = [memory[at : at + BLOCK] for at in range(0, size, BLOCK)]
        buffers = [(RDMABuffer(piece), len(piece)) for piece in pieces]
        pullers = {
            host.name: host.mesh.spawn_procs({"procs": 1}).spawn("puller", Puller) for host in made
        }
        runtime.raise_first(
            runtime.gather({n: p.pull.call_one([]) for n, p in pullers.items()}, 60)
        )
        started = time.perf_counter()
        calls = {name: puller.pull.call_one(buffers) for name, puller in pullers.items()}
        runtime.raise_first(runtime.gather(calls, 600))
        return time.perf_counter() - started


def monarch(source: Path, hosts: Sequence[str]) -> float:
    """``monarch.remotemount``; its large files come when they are read, so all are read."""
    from monarch.actor import attach_to_workers
    from monarch.remotemount import remotemount

    from benchmarks.puller import Reader
    from wheelmount.hosts import runtime
    from wheelmount.hosts.address import OPEN, Address

    runtime.start(Address(OPEN, hosts[0], WORKER_PORT).reached_from())
    workers = [f"tcp://{host}:{WORKER_PORT}" for host in hosts]
    mesh = attach_to_workers(ca="trust_all_connections", workers=workers)
    readers = mesh.spawn_procs({"procs": 1}).spawn("reader", Reader)
    readers.read.call("/dev/null").get(timeout=60)
    started = time.perf_counter()
    made = remotemount(mesh, str(source), MOUNT)
    made.open()
    readers.read.call(MOUNT).get(timeout=900)
    seconds = time.perf_counter() - started
    made.close()
    return seconds


def _at_once(work: Callable[[str], Any], hosts: Sequence[str]) -> float:
    failed: list[BaseException] = []

    def one(host: str) -> None:
        try:
            work(host)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(host,)) for host in hosts]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return time.perf_counter() - started


CONTENDERS: dict[str, Callable[[Path, Sequence[str]], float]] = {
    "sockets": sockets,
    "rdma": rdma,
    "wheelmount": wheelmount,
    "plain": plain,
    "monarch": monarch,
    "rsync": rsync,
    "sbcast": sbcast,
}


def main(name: str, *arguments: str) -> None:
    """Run one, or ``sink``."""
    if name == "sink":
        sink()
        return
    source, *hosts = arguments
    seconds = CONTENDERS[name](Path(source), hosts)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # getrusage(2): KiB
    print(json.dumps({"seconds": seconds, "memory": memory}), flush=True)
    sys.stderr.flush()
    os._exit(0)  # what Monarch has left to say is of no interest


if __name__ == "__main__":
    main(*sys.argv[1:])
