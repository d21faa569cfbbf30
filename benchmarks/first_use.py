"""How soon a program runs from an environment on its way: ``python -m benchmarks.first_use``.

On a test-bed (``tests/testbed``) whose links have a given rate, a virtual environment is delivered
to new hosts, again and again, and one of them imports modules from it as soon as it is mounted.
From the second time on, wheelmount knows what the import read. Each import is compared with the
time in which the link carries the bytes that it touches. ``monarch.remotemount`` comes last. Needs
root, and an environment on a disk, where the kernel tells what was touched.

``--local`` does without links: two hosts of this machine import at the same time, in turns from a
mount of ``wheelmount run``, of ``monarch.remotemount``, and from copies in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.delivery import bandwidth
from benchmarks.first_read import PATH, once
from tests.testbed import LOGIN, Lab
from tests.testbed.service import WORKER_PORT, start_workers

MODULES = "numpy,pandas,scipy,sklearn,pyarrow"

MONARCH = """
import sys, time
from monarch.actor import attach_to_workers
from monarch.remotemount import remotemount
from wheelmount.hosts import runtime
from wheelmount.hosts.address import OPEN, Address
source, mntpoint, port, *hosts = sys.argv[1:]
runtime.start(Address(OPEN, hosts[0], int(port)).reached_from())
workers = [f"tcp://{host}:{port}" for host in hosts]
mesh = attach_to_workers(ca="trust_all_connections", workers=workers)
mesh.spawn_procs({"procs": 1}).initialized.get(timeout=60)
begun = time.monotonic()
remotemount(mesh, source, mntpoint).open()
print(time.monotonic() - begun, flush=True)
sys.stdin.read()
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.first_use")
    parser.add_argument("venv", type=Path, help="a relocatable virtual environment")
    parser.add_argument("--modules", default=MODULES, help="imported from it (%(default)s)")
    parser.add_argument("--hosts", default="1", help="numbers of hosts (%(default)s)")
    parser.add_argument("--rate", default="200mbit", help="of each host's link (%(default)s)")
    parser.add_argument("--times", type=int, default=3, help="deliveries (%(default)s)")
    parser.add_argument("--no-monarch", action="store_true", help="wheelmount only")
    parser.add_argument("--local", type=int, metavar="ROUNDS", help="on two local hosts instead")
    given = parser.parse_args()
    if given.local:
        _local(given.venv.absolute(), given.modules, given.local)
        return
    venv, rate = given.venv.absolute(), given.rate
    importer = ["bin/python", "-c", f"import {given.modules}"]
    size, seconds = touched(venv, [str(venv / importer[0]), *importer[1:]])
    wire = size / bandwidth(rate)
    print(
        f"import {given.modules}: {seconds:.1f} s at the source, where it is cached;"
        f" it touches {size / 1e6:.0f} MB, {wire:.1f} s of a link of {rate}"
    )
    print("hosts   delivery   import   everything   import / link")
    there = [f"{PATH}/{importer[0]}", *importer[1:]]
    for count in map(int, given.hosts.split(",")):
        with tempfile.TemporaryDirectory(prefix="wm-bench-") as cache:
            os.environ["WHEELMOUNT_CACHE_DIR"] = cache
            for number in range(1, given.times + 1):
                found = once(venv, count, rate, there, Path(cache))
                _line(count, f"{number}", found.seconds, f"{found.all:.1f} s", wire)
        if not given.no_monarch:
            opened, seconds = _monarch(venv, count, rate, there)
            _line(count, "monarch", opened + seconds, f"open {opened:.1f} s", wire)


def _line(count: int, name: str, seconds: float, everything: str, wire: float) -> None:
    print(
        f"{count:5} {name:>10} {seconds:6.1f} s {everything:>12} {seconds / wire:14.2f}", flush=True
    )


def touched(venv: Path, command: list[str]) -> tuple[int, float]:
    """Return bytes of an environment that a command touches, and its seconds where they are cached.

    What the kernel would read ahead does not count.
    """
    files = [path for path in venv.rglob("*") if path.is_file() and not path.is_symlink()]
    subprocess.run(command, check=True)
    begun = time.monotonic()
    subprocess.run(command, check=True)
    seconds = time.monotonic() - begun
    os.sync()  # pages that are to be written stay
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = sum(map(_cached, files))
    with _no_read_ahead(venv):
        subprocess.run(command, check=True)
    return sum(map(_cached, files)) - before, seconds


@contextlib.contextmanager
def _no_read_ahead(path: Path) -> Iterator[None]:
    """Have the disk of a path read nothing ahead in the context."""
    device = path.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    queue = next(each / "queue" for each in (disk, disk.parent) if (each / "queue").is_dir())
    setting = queue / "read_ahead_kb"
    before = setting.read_text()
    setting.write_text("0")
    try:
        yield
    finally:
        setting.write_text(before)


def _cached(path: Path) -> int:
    """Return bytes of a file in the page cache."""
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as mapped:
        first = (ctypes.c_char * size).from_buffer(mapped)
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        where, length = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size)
        failed = ctypes.CDLL(None, use_errno=True).mincore(where, length, pages)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return min(sum(page & 1 for page in pages.raw) * mmap.PAGESIZE, size)


def _local(venv: Path, modules: str, rounds: int) -> None:
    """Print when an import has ended on two local hosts, since the start of the command."""
    statement = f"import {modules}; print('done', flush=True)"
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/dev/shm") as place:
        os.environ["WHEELMOUNT_RUNTIME_DIR"] = f"{place}/runtime"
        os.environ["WHEELMOUNT_CACHE_DIR"] = f"{place}/cache"
        script = Path(place) / "script"
        script.write_text(f'exec "$WHEELMOUNT_MOUNT/bin/python" -c "{statement}"\n')
        run = [sys.executable, "-m", "wheelmount.cli.main", "run", "--quiet", "--live"]
        copies = [Path(place) / f"host{number}" for number in range(2)]
        steps: dict[str, Callable[[], float]] = {
            "wheelmount run": lambda: _run([*run, "--hosts", "local:2", str(venv), str(script)]),
            "monarch.remotemount": lambda: _mounted(venv, Path(place) / "mounted", statement),
            "cp -a": lambda: _copied(["cp", "-a", f"{venv}/."], copies, statement),
            "rsync -a": lambda: _copied(["rsync", "-a", f"{venv}/"], copies, statement),
        }
        for _ in range(rounds):
            for name, step in steps.items():
                found.setdefault(name, []).append(step())
    print("| two local hosts | import ends, s | wheelmount = 1 |\n|---|---|---|")
    ours = found["wheelmount run"]
    for name, times in found.items():
        ratio = median(a / b for a, b in zip(times, ours, strict=True))
        print(f"| {name} | {median(times):.1f} | {ratio:.2f} |")


def _run(command: Sequence[str]) -> float:
    """Return the seconds from the start of a command to its second line of output."""
    begun = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        lines = process.stdout or ()
        for _ in zip(range(2), lines, strict=False):
            seconds = time.monotonic() - begun
        if process.wait():
            raise SystemExit(f"{command} ended with {process.returncode}")
    return seconds


def _mounted(venv: Path, mntpoint: Path, statement: str) -> float:
    """As ``_run``, by ``monarch.remotemount`` on this host: two processes import from one mount."""
    mntpoint.mkdir(exist_ok=True)
    peer = [sys.executable, "-m", "benchmarks.monarch_peer", str(venv), str(mntpoint)]
    begun = time.monotonic()
    with subprocess.Popen(peer, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if process.stdout is None or not process.stdout.readline():
            raise SystemExit("monarch.remotemount does not open")
        _import([mntpoint, mntpoint], statement)
        seconds = time.monotonic() - begun
        process.communicate()
    return seconds


def _copied(command: Sequence[str], places: Sequence[Path], statement: str) -> float:
    """As ``_run``, from copies that a command makes one after the other."""
    begun = time.monotonic()
    for place in places:
        subprocess.run([*command, f"{place}/"], check=True)
    _import(places, statement)
    seconds = time.monotonic() - begun
    for place in places:
        shutil.rmtree(place)
    return seconds


def _import(places: Sequence[Path], statement: str) -> None:
    pythons = [[f"{place}/bin/python", "-c", statement] for place in places]
    started = [subprocess.Popen(each, stdout=subprocess.DEVNULL) for each in pythons]
    if any(process.wait() for process in started):
        raise SystemExit(f"{statement} fails")


def _monarch(venv: Path, count: int, rate: str, command: list[str]) -> tuple[float, float]:
    """Return seconds until ``monarch.remotemount`` is open, and of the command after that."""
    with Lab(count, rate, [venv.parent]) as lab:
        start_workers(lab)
        for host in lab.hosts:
            lab.run(host, ["mkdir", "-p", PATH], check=True)
        mounting = [sys.executable, "-c", MONARCH, str(venv), PATH, str(WORKER_PORT), *lab.hosts]
        client = lab.popen(
            LOGIN, mounting, env=dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0,
        )  # fmt: skip
        try:
            opened = float(json.loads(next(iter(client.stdout or ()))))
            begun = time.monotonic()
            lab.run(lab.hosts[-1], command, timeout=900, check=True)
            seconds = time.monotonic() - begun
        finally:
            client.kill()
            client.wait()
    return opened, seconds


if __name__ == "__main__":
    main()
