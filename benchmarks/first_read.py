"""How long a read waits that a delivery has not come to yet: ``python -m benchmarks.first_read``.

On a test-bed (``tests/testbed``) whose links have a given rate, one file is delivered; meanwhile a
process on one of the hosts reads 4 KiB of it here and there, one after another, where nothing has
arrived yet. What a delivery has on its way is all that such a read has to wait for. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

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
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as place:
        source = make(Path(place) / "file", "file", given.size * MIB)
        print(f"{given.size} MiB, links of {given.rate}")
        print("hosts   first read   median   longest   everything   longest / everything")
        for count in map(int, given.hosts.split(",")):
            found = once(source, count, given.rate, given.reads)
            reads, whole = found["reads"], found["all"]
            print(
                f"{count:5} {reads[0]:10.2f} s {median(reads):6.2f} s {max(reads):7.2f} s"
                f" {whole:10.1f} s {max(reads) / whole:22.3f}"
                f"   (wire: {given.size * MIB / bandwidth(given.rate):.1f} s)",
                flush=True,
            )


def once(source: Path, count: int, rate: str, reads: int) -> dict[str, Any]:
    """One delivery; seconds that each read took, and until all hosts had everything."""
    with Lab(count, rate, [source.parent]) as lab:
        start_workers(lab)
        command = [sys.executable, "-c", CLIENT, workers_spec(lab), str(source), PATH]
        client = lab.popen(
            LOGIN, command, env=dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0,
        )  # fmt: skip
        try:
            lines = iter(client.stdout or ())
            json.loads(next(lines))
            reading = [sys.executable, "-S", "-c", READER, f"{PATH}/file", str(reads)]
            done = lab.run(lab.hosts[-1], reading, timeout=900, check=True)
            found = json.loads(next(lines))
        finally:
            client.kill()
            client.wait()
    return {"reads": json.loads(done.stdout), **found}


if __name__ == "__main__":
    main()
