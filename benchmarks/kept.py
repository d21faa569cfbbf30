"""What blocks on the disk of a host save the next job: ``python -m benchmarks.kept``.

Jobs one after the other, each with hosts of its own on this machine: with nothing kept and
``store_keep`` off; the first with it on; the second; and a third, for which a hundredth of the
files was edited and one was added ahead of all others. From the call of ``mount`` until all bytes
are there. In each round, what the round before kept is deleted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks import trees
from benchmarks.memory import DISK
from wheelmount import config, remotemount
from wheelmount.config import Settings
from wheelmount.hosts.local import LocalHosts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.kept")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--big", type=int, default=1024, help="MiB in a big file beside the small")
    given = parser.parse_args()
    sent, seconds = defaultdict(list), defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="wm-", dir=DISK) as place:
        work = Path(place)
        made = trees.make(work, trees.Sizes(0, given.files, 0, given.big << 20, 0, 0), (), None)
        os.environ["WHEELMOUNT_RUNTIME_DIR"] = str(work / "runtime")
        off = config.load()
        on = replace(off, store_keep=str(work / "keep"), store_keep_size=100 << 30)
        files = itertools.cycle(sorted((made.main / "small").glob("*/*/*.py"))[::100])
        for number in range(given.rounds):
            shutil.rmtree(work / "keep", ignore_errors=True)
            for what in ("off", "first", "second", "edited"):
                if what == "edited":
                    for file in itertools.islice(files, given.files // 100):
                        file.write_bytes(os.urandom(1024))
                    (made.main / f".added{number}").write_bytes(os.urandom(5000))
                size, took = _job(made.main, work, off if what == "off" else on, given.hosts)
                sent[what].append(size)
                seconds[what].append(took)
    for what in sent:
        of_first = median(a / b for a, b in zip(sent[what], sent["first"], strict=True))
        of_off = median(a / b for a, b in zip(seconds[what], seconds["off"], strict=True))
        print(
            f"{what}: sent {median(sent[what]) / 1e6:.1f} MB ({of_first:.4f} of the first), "
            f"{median(seconds[what]):.2f} s ({of_off:.2f} of off)"
        )


def _job(source: Path, work: Path, settings: Settings, count: int) -> tuple[int, float]:
    """Return the bytes that the client sent, and the seconds until all hosts had all."""
    with LocalHosts(count, settings, namespaces=False) as hosts:
        began = time.perf_counter()
        with remotemount(hosts, source, f"{work}/on-{{host}}", settings=settings) as mount:
            mount.wait()
            took = time.perf_counter() - began
            for path in mount.mntpoints.values():
                subprocess.run(["diff", "-r", source, path], check=True)
            return mount.sent, took


if __name__ == "__main__":
    main()
