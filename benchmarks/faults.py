"""How soon hosts have all bytes if one is lost in a delivery: ``python -m benchmarks.faults``.

The hosts of a test-bed (``tests/testbed``) are a chain: one is the client's only child, one is in
the middle and one a leaf, and all bytes for the hosts below travel through the lost one. Each is
lost in each way when about a third has arrived. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.delivery import make
from benchmarks.trees import MIB
from tests.testbed import LOGIN, Lab
from tests.testbed.service import start_workers, workers_spec

HOSTS = 4
PLACES = {"first": "host0", "inner": "host1", "leaf": "host3"}
PATH = "/mnt/tree"

CLIENT = """
import json, logging, os, sys, time
from wheelmount import config, remotemount
from wheelmount.errors import WheelmountError
from wheelmount.hosts.spec import parse
named = {}
class Named(logging.Handler):
    def emit(self, record):
        if " is lost" in record.getMessage():
            named.setdefault(record.args[0], time.monotonic())
logging.getLogger("wheelmount").addHandler(Named())
hosts = parse(sys.argv[1]).make(config.load(), namespaces=False)
hosts.start()
mount = remotemount(hosts, sys.argv[2], sys.argv[3])
mount.open()
print(json.dumps({"opened": time.monotonic()}), flush=True)
try:
    mount.wait(300)
    said = ""
except WheelmountError as error:
    said = error.message
ended = time.monotonic()
whole = [n for n, s in mount.status().items() if isinstance(s, dict) and s["held"] == s["size"]]
print(json.dumps({"ended": ended, "named": named, "said": said, "whole": whole}), flush=True)
os._exit(0)
"""


Lose = Callable[[Lab, str], object]

WAYS: dict[str, Lose] = {"crashed": Lab.kill, "cut off": Lab.unplug}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.faults")
    parser.add_argument("--size", type=int, default=48, help="MiB of the file (%(default)s)")
    parser.add_argument("--rate", type=int, default=50, help="Mbit/s of a link (%(default)s)")
    parser.add_argument("--places", default=",".join(PLACES), help="(%(default)s)")
    given = parser.parse_args()
    wire = given.size * MIB * 8 / (given.rate * 1e6)
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as place:
        source = make(Path(place) / "file", "file", given.size * MIB)
        calm = once(source, given.rate, None)["complete"]
        print(f"{given.size} MiB to {HOSTS} hosts in a chain, links of {given.rate} Mbit/s", end="")
        print(f" ({wire:.1f} s): no host lost, {calm:.1f} s", flush=True)
        print(
            "lost            others complete   of the calm time   lost one named after   wait ends"
        )
        for place_of in given.places.split(","):
            for way, lose in WAYS.items():
                found = once(source, given.rate, (PLACES[place_of], lose, wire / 3))
                named = f"{found['named']:.1f} s" if found["named"] is not None else "at the end"
                print(
                    f"{place_of:6} {way:8} {found['complete']:13.1f} s"
                    f" {found['complete'] / calm:18.2f} {named:>21} {found['ended']:8.1f} s"
                    f"   {found['whole']} of {HOSTS - 1} others",
                    flush=True,
                )


def once(source: Path, rate: int, loss: tuple[str, Lose, float] | None) -> dict[str, Any]:
    """Deliver once.

    Returns:
        Seconds from the loss until it was ``named``, and seconds from the start of the delivery
        until the other hosts were ``complete`` and ``wait`` had ``ended``; the number of others
        that are ``whole``.
    """
    with Lab(HOSTS, f"{rate}mbit", [source.parent]) as lab:
        start_workers(lab)
        command = [sys.executable, "-c", CLIENT, workers_spec(lab), str(source), PATH]
        environment = {
            **os.environ, "WHEELMOUNT_FANOUT": "1", "WHEELMOUNT_BLOCK_SIZE": str(MIB),
            "WHEELMOUNT_FETCH_TIMEOUT": "10",
        }  # fmt: skip
        client = lab.popen(LOGIN, command, env=environment, stdout=subprocess.PIPE, bufsize=0)
        try:
            lines = iter(client.stdout or ())
            opened = json.loads(next(lines))["opened"]
            lost = opened
            if loss is not None:
                host, lose, delay = loss
                time.sleep(max(0.0, opened + delay - time.monotonic()))
                lost = time.monotonic()
                lose(lab, host)
            others = [name for name in lab.hosts if loss is None or name != loss[0]]
            while not all(_complete(lab, name) for name in others):
                time.sleep(0.1)
            complete = time.monotonic()
            found = json.loads(next(lines))
        finally:
            client.kill()
            client.wait()
    named = found["named"].get(loss[0]) if loss else None
    whole = [name for name in found["whole"] if loss is None or name != loss[0]]
    return {
        "named": named - lost if named is not None else None,
        "complete": complete - opened,
        "ended": found["ended"] - opened,
        "whole": len(whole),
    }


def _complete(lab: Lab, host: str) -> bool:
    """Whether all bytes are on a host: then the kernel alone shows the mount, without FUSE."""
    table = lab.run(host, ["cat", "/proc/self/mountinfo"]).stdout.splitlines()
    return any(f" {PATH} " in line and " - fuse." not in line for line in table)


if __name__ == "__main__":
    main()
