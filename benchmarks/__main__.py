"""Nearly all benchmarks in their short form: ``python -m benchmarks``, as root.

It takes about ten minutes on two cores, and writes what each prints into a section of its own of
``docs/benchmarks.md``. The figures of the other sections come from longer runs.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from uv import find_uv_bin

from benchmarks.report import machine, versions
from benchmarks.trees import GIB

CHECKOUT = Path(__file__).parent.parent

PAGE = CHECKOUT / "docs" / "benchmarks.md"

IMAGE = CHECKOUT / "build" / "images" / "python.sif"
"""Of images/python.def; built if it is missing, which takes a minute."""

BEGIN, END = "<!-- written by python -m benchmarks -->", "<!-- end of what it wrote -->"

PACKAGES = ["numpy", "pandas", "requests"]
"""Downloaded once for the benchmarks that need wheels or an environment."""

SHORT = {
    "mount": "--quick",
    "rootless": "--quick --rounds 1",
    "delivery": "--hosts 2 --size 128 --rounds 1",
    "tls": "--size 256 --rounds 3 --connections 1",
    "pack": "--size 256 --rounds 3",
    "rdma": "--rounds 3",
    "refresh": "--hosts 2 --big 0 --rounds 2 --files 10000 --pause 0.5",
    "many": "--files 30000 --place /dev/shm",
    "verify": "--size 256 --rounds 1 --place /dev/shm",
    "kept": "--rounds 1 --files 5000 --big 256",
    "memory": "--size 256 --place /dev/shm",
    "growth": "--rounds 100",
    "sessions": "--rounds 1 --big 0",
    "short": "--rounds 1",
    "first_read": "--size 16 --reads 3",
    "first_use": "ENVIRONMENT --modules numpy,pandas,requests --times 2",
    "faults": "--size 16 --places inner",
    "scale check": "--hosts 2,4 --size 8 --rate 20 --only=",
    "scale tell": "--hosts 64 --blocks 32",
    "clients": "--hosts 8,16 --rounds 1",
    "download": "--rounds 1",
    "check": "WHEELS --rounds 3",
    "install": "numpy pandas requests --modules numpy,pandas,requests --rounds 1",
    "containers": "start streams --packages WHEELS --image IMAGE --rounds 1",
}
"""Words of each benchmark's command line."""

LIMIT = 240.0
"""Seconds that one benchmark may take."""


class Outcome(NamedTuple):
    """What one benchmark printed, with its exit status and the seconds that it took."""

    command: str
    text: str
    status: int
    seconds: float


def main() -> int:
    """Run them, one after the other, and write the section."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("only", nargs="*", help="default: all")
    parser.add_argument("--page", type=Path, default=PAGE, help="to write into (%(default)s)")
    given = parser.parse_args()
    if unknown := set(given.only) - SHORT.keys():
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there is {', '.join(SHORT)}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all modules
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/var/tmp") as place:
        found = list(_run_all(given.only or list(SHORT), Path(place)))
    if not given.only:
        _write(given.page, found)
    failed = [outcome.command for outcome in found if outcome.status]
    for command in failed:
        print(f"failed: {command}", file=sys.stderr)
    return 1 if failed else 0


def _run_all(names: Sequence[str], place: Path) -> Iterator[Outcome]:
    """Prepare what some of them need, and run each."""
    wheels, environment = place / "wheels", place / "environment"
    uv, wheelmount = find_uv_bin(), [sys.executable, "-m", "wheelmount.cli.main"]
    made = [uv, "venv", "--quiet", "--relocatable", "--python", sys.executable]
    installed = [uv, "pip", "install", "--quiet", "--no-index", "--link-mode", "copy"]
    preparations = [
        [*wheelmount, "download", *PACKAGES, "-d", str(wheels)],
        [*made, str(environment)],
        [*installed, "--find-links", str(wheels), "-p", str(environment / "bin/python"), *PACKAGES],
    ]
    if not IMAGE.exists():
        IMAGE.parent.mkdir(parents=True, exist_ok=True)
        preparations.append([*wheelmount, "image", "build", "images/python.def", str(IMAGE)])
    for command in preparations:
        subprocess.run(command, check=True, cwd=CHECKOUT)
    places = {"WHEELS": str(wheels), "ENVIRONMENT": str(environment), "IMAGE": str(IMAGE)}
    for name in names:
        words = [places.get(word, word) for word in SHORT[name].split()]
        outcome = _run(name, words)
        print(f"{outcome.seconds:6.1f} s  {outcome.command}", file=sys.stderr, flush=True)
        print(outcome.text, flush=True)
        yield outcome


def _run(name: str, words: Sequence[str]) -> Outcome:
    """Run one, and end all of its processes if it takes too long."""
    module = f"benchmarks.{name}".split()
    command = [sys.executable, "-m", *module, *words]
    started = time.monotonic()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            text, errors = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, errors = process.communicate()
            errors += f"\nended after {LIMIT:g} s"
    if process.returncode:
        text = f"{text}{errors[-2000:]}"
    shown = shlex.join(["python", "-m", *module, *SHORT[name].split()])
    text = text.strip().replace(str(CHECKOUT), "CHECKOUT")
    return Outcome(shown, text, process.returncode, time.monotonic() - started)


def _write(page: Path, found: Sequence[Outcome]) -> None:
    """Put the section in the place of the last one, or at the end."""
    took = sum(outcome.seconds for outcome in found)
    here, known = machine(), versions()
    lines = [
        BEGIN,
        "## All in short",
        "",
        f"`python -m benchmarks` wrote this section on {datetime.date.today():%Y-%m-%d}, in"
        f" {took:.0f} s. {here['cpu']}, {here['cores']} cores, {here['memory'] / GIB:.0f} GiB,"
        f" Linux {here['kernel']}; Python {known['python']}, torchmonarch {known['torchmonarch']}."
        " Few rounds of small trees show whether something has changed; the sections above have"
        " figures of longer runs.",
    ]
    for outcome in found:
        status = f", exit status {outcome.status}" if outcome.status else ""
        lines += ["", f"`{outcome.command}` ({outcome.seconds:.0f} s{status})", ""]
        table = outcome.text.startswith("|")
        lines += [outcome.text] if table else ["```text", outcome.text, "```"]
    section = "\n".join([*lines, END])
    text = page.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if pattern.search(text):
        text = pattern.sub(lambda _: section, text)
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    page.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
