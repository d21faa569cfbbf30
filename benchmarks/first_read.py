"""How long a read waits that a delivery has not come to yet: ``python -m benchmarks.first_read``.

On a test-bed (``tests/testbed``) whose links have a given rate, one file is delivered; meanwhile a
process on one of the hosts reads 4 KiB of it here and there, one after another, where nothing has
arrived yet. What a delivery has on its way is all that such a read has to wait for. With ``--venv``
a virtual environment is delivered, and one of the hosts imports modules from it as soon as it is
mounted. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.delivery import bandwidth, make
from benchmarks.trees import MIB
from tests.testbed import LOGIN, Lab
from tests.testbed.service import start_workers, workers_spec

PATH = "/mnt/tree"

CLIENT = """
import json, os, sys, time
from wheelmount import config, remotemount
from wheelmount.hosts.spec import parse
hosts = parse(sys.argv[1]).make(config.load(), namespaces=False)
hosts.start()
mount = remotemount(hosts, sys.argv[2], sys.argv[3])
mount.open()
opened = time.monotonic()
print(json.dumps({}), flush=True)
mount.wait(900)
print(json.dumps({"all": time.monotonic() - opened}), flush=True)
sys.stdin.readline()
mount.close(force=True)
"""

READER = """
import json, os, sys, time
path, reads = sys.argv[1], int(sys.argv[2])
file = os.open(path, os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
size, taken = os.fstat(file).st_size, []
time.sleep(1)
for number in range(1, reads + 1):  # from the end on, to the middle
    begun = time.monotonic()
    assert len(os.pread(file, 4096, (size - number * size // (2 * reads + 2)) & -4096)) == 4096
    taken.append(time.monotonic() - begun)
print(json.dumps(taken))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.first_read")
    parser.add_argument("--hosts", default="1", help="numbers of hosts (%(default)s)")
    parser.add_argument("--size", type=int, default=48, help="MiB of the file (%(default)s)")
    parser.add_argument("--rate", default="20mbit", help="of each host's link (%(default)s)")
    parser.add_argument("--reads", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--venv", type=Path, help="a relocatable one, instead of a file")
    parser.add_argument("--modules", default="numpy", help="imported from it (%(default)s)")
    given = parser.parse_args()
    counts = list(map(int, given.hosts.split(",")))
    if given.venv is not None:
        _import(given.venv.absolute(), given.modules, counts, given.rate)
    else:
        _read(given.size, given.reads, counts, given.rate)


def _read(size: int, reads: int, counts: list[int], rate: str) -> None:
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as place:
        source = make(Path(place) / "file", "file", size * MIB)
        print(f"{size} MiB, links of {rate}")
        print("hosts   first read   median   longest   everything   longest / everything")
        reader = [sys.executable, "-S", "-c", READER, f"{PATH}/file", str(reads)]
        for count in counts:
            found = once(source, count, rate, reader)
            taken, whole = json.loads(found.output), found.all
            print(
                f"{count:5} {taken[0]:10.2f} s {median(taken):6.2f} s {max(taken):7.2f} s"
                f" {whole:10.1f} s {max(taken) / whole:22.3f}"
                f"   (wire: {size * MIB / bandwidth(rate):.1f} s)",
                flush=True,
            )


def _import(venv: Path, modules: str, counts: list[int], rate: str) -> None:
    importer = ["bin/python", "-c", f"import {modules}"]
    begun = time.monotonic()
    subprocess.run([str(venv / importer[0]), *importer[1:]], check=True)
    print(f"import {modules} at the source: {time.monotonic() - begun:.1f} s; links of {rate}")
    print("hosts   import   everything   import / everything")
    for count in counts:
        found = once(venv, count, rate, [f"{PATH}/{importer[0]}", *importer[1:]])
        print(
            f"{count:5} {found.seconds:6.1f} s {found.all:10.1f} s"
            f" {found.seconds / found.all:21.2f}",
            flush=True,
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a delivery.

    Attributes:
        output: of the command on a host.
        seconds: from the mount to the end of the command.
        all: seconds from the mount until all hosts had everything.
    """

    output: str
    seconds: float
    all: float


def once(source: Path, count: int, rate: str, command: list[str], *shared: Path) -> Found:
    """One delivery, during which the last host runs a command; ``shared`` is as of ``Lab``."""
    with Lab(count, rate, [source.parent, *shared]) as lab:
        start_workers(lab)
        mounting = [sys.executable, "-c", CLIENT, workers_spec(lab), str(source), PATH]
        client = lab.popen(
            LOGIN, mounting, env=dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0,
        )  # fmt: skip
        try:
            lines = iter(client.stdout or ())
            json.loads(next(lines))
            begun = time.monotonic()
            done = lab.run(lab.hosts[-1], command, timeout=900, check=True)
            seconds = time.monotonic() - begun
            everything = json.loads(next(lines))["all"]
        finally:
            client.kill()
            client.wait()
    return Found(done.stdout, seconds, everything)


if __name__ == "__main__":
    main()
