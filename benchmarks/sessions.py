"""How fast work comes back to hosts: ``python -m benchmarks.sessions``, from the checkout.

The same script, which prints one line from a file of a mounted tree, run by the command line: where
the tree is, on hosts of its own, and in a session for the first time, again, and after one file was
edited. Each is measured to the first line that a host prints, and to the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import trees

COMMAND = [sys.executable, "-m", "wheelmount.cli.main"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.sessions")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--big", type=int, default=5, help="GiB in a big file beside 30,000 small")
    given = parser.parse_args()
    spec = f"local:{given.hosts}"
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as place:
        work = Path(place)
        os.environ["WHEELMOUNT_RUNTIME_DIR"] = str(work / "runtime")
        made = trees.make(work, trees.Sizes(0, 30_000, 0, given.big << 30, 0, 0), (), None)
        file = next((made.main / "small").glob("*/*/*.py"))
        script = work / "script"
        script.write_text(f"md5sum {file.relative_to(made.main)}")
        run = [*COMMAND, "run", "--live", "--quiet"]
        what = [str(made.main), str(script)]
        again = [*run, *what]
        print(f"30,000 files and one of {given.big} GiB, {given.hosts} hosts: first line, end")
        _report(
            "where it is", [_timed(["bash", str(script)], made.main) for _ in range(given.rounds)]
        )
        _report("hosts of its own", [_timed([*run, "--hosts", spec, *what])])
        subprocess.run([*COMMAND, "up", "--quiet", "--hosts", spec], check=True)
        try:
            _report("session, first time", [_timed(again)])
            _report("session, again", [_timed(again) for _ in range(given.rounds)])
            edited = []
            for _ in range(given.rounds):
                file.write_bytes(os.urandom(1024))
                edited.append(_timed(again))
            _report("session, one file edited", edited)
        finally:
            subprocess.run([*COMMAND, "down", "--quiet"], check=True)


def _timed(command: Sequence[str], cwd: Path | None = None) -> tuple[float, float]:
    time.sleep(2)  # until what the last one left is cleared away
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=cwd) as process:
        if process.stdout is None or not process.stdout.readline():
            raise SystemExit(f"{command} printed nothing")
        first = time.perf_counter() - started
        process.communicate()
    if process.returncode:
        raise SystemExit(f"{command} ended with code {process.returncode}")
    return first, time.perf_counter() - started


def _report(what: str, times: Sequence[tuple[float, float]]) -> None:
    first, end = (median(column) for column in zip(*times, strict=True))
    print(f"{what}: {first:.2f} s, {end:.2f} s", flush=True)


if __name__ == "__main__":
    main()
