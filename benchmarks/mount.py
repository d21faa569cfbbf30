"""How fast a mount is: ``python -m benchmarks.mount``, from the checkout.

Each round takes every backend in turn: a fresh mount, all bytes delivered, every metric cold and
then warm, its memory; then a second tree used while it arrives. Needs Linux, and root for the
peers that the kernel mounts. Peers that lack here are named and left out.

Cold is a fresh mount that nothing was read from. The machine's page cache is not dropped for it:
that would also make every command that measures slow to start. What a backend keeps its bytes in
(tmpfs, or its processes) is warm by nature.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import measure, report, system, trees
from benchmarks.images import Erofs, Squashfs, Squashfuse
from benchmarks.measure import Samples
from benchmarks.peers import ADAPTERS, Backend, Monarch, Native, Wheelmount
from benchmarks.system import MEMORY, BenchmarkError


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.mount", description="How fast a mount is, next to tmpfs and peers."
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="default 5; 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="small trees: about a minute")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a backend; may be given more than once"
    )
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        metavar="MODULE",
        help="package to install and import; may be given more than once; default "
        f"{' '.join(trees.FALLBACK)}, which is also used where another cannot be installed",
    )
    parser.add_argument(
        "--find-links", metavar="PLACE", help="where wheels lie that the index does not have"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="where trees are kept for the next run; on tmpfs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw ratios (.svg, .png)")
    return parser.parse_args()


@contextmanager
def workplace() -> Iterator[tuple[Path, Path]]:
    """A directory on tmpfs and a short one that marks processes; nothing is left of either."""
    folder = Path(tempfile.mkdtemp(prefix="wm-bench-", dir=MEMORY))
    mark = Path(tempfile.mkdtemp(prefix="wm-bench-"))
    try:
        yield folder, mark
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second ^C must not stop this half way
        system.end(mark)
        for path in (folder, mark):
            system.unmount_below(path)
            shutil.rmtree(path, ignore_errors=True)


def backends(folder: Path, mark: Path) -> list[Backend]:
    """All of them, native tmpfs first."""
    kinds = (Monarch, Squashfuse, Squashfs, Erofs)

    def place(name: str) -> Path:
        path = folder / name
        path.mkdir(parents=True)
        return path

    rungs = [Wheelmount(place(f"wheelmount-{name}"), mark, name) for name in ADAPTERS]
    return [
        Native(place("native"), mark),
        *rungs,
        *(kind(place(kind.__name__.lower()), mark) for kind in kinds),
    ]


class Run:
    """All rounds of one benchmark."""

    def __init__(self, found: Sequence[Backend], made: trees.Trees, sizes: trees.Sizes) -> None:
        self.samples = Samples()
        self.left_out: dict[str, str] = {}
        self._trees = made
        self._sizes = sizes
        self._backends = []
        for backend in found:
            if why := backend.check():
                self.left_out[backend.name] = why
            else:
                self._backends.append(backend)

    def round(self, number: int) -> None:
        """Measure every backend once, the first a different one each time."""
        self.samples.round = number
        first = number % len(self._backends)
        for backend in self._backends[first:] + self._backends[:first]:
            start = time.monotonic()
            try:
                self._measure(backend)
            except (BenchmarkError, OSError, subprocess.SubprocessError) as error:
                backend.clear()
                if backend.name in self.left_out:  # the second time
                    self._backends.remove(backend)
                self.left_out[backend.name] = f"round {number + 1}: {error}"
                say(self.left_out[backend.name])
            say(f"round {number + 1}: {backend.name}: {time.monotonic() - start:.1f} s")

    def _measure(self, backend: Backend) -> None:
        made, sizes, samples = self._trees, self._sizes, self.samples
        samples.note(backend.name, "held", made.held)
        measure.delivered(backend, made, sizes, samples)
        if backend.arrives:
            measure.arriving(backend, made, sizes, samples)
        elif isinstance(backend, Native):
            measure.copied(made.demand, backend.folder / "copy", samples, backend.name)


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run it."""
    asked = options()
    signal.signal(signal.SIGTERM, _interrupt)
    sizes = trees.QUICK if asked.quick else trees.Sizes()
    modules = asked.modules or (["numpy"] if asked.quick else trees.FALLBACK)
    rounds = asked.rounds or (1 if asked.quick else 5)
    results: dict[str, Any] = {
        "machine": report.machine(),
        "versions": report.versions(),
        "rounds": rounds,
    }
    system.hide_mounts()
    with workplace() as (folder, mark):
        work = (asked.work or folder / "work").absolute()
        work.mkdir(parents=True, exist_ok=True)
        if system.call(["stat", "-f", "-c", "%T", work]).strip() != "tmpfs":
            raise BenchmarkError(f"{work} is not on tmpfs, which all is compared with")
        say("making trees")
        made = trees.make(work, sizes, modules, asked.find_links)
        wanted = [Native.name, *asked.only] if asked.only else None
        found = [b for b in backends(folder, mark) if wanted is None or b.name in wanted]
        run = Run(found, made, sizes)
        try:
            for number in range(rounds):
                run.round(number)
        except KeyboardInterrupt:  # what there is by now is reported
            run.left_out["the rest"] = f"interrupted in round {number + 1}"
    results |= {"tree": _described(made, sizes), "left out": run.left_out}
    print(report.text(results, run.samples))
    if asked.json:
        report.save(asked.json, results, run.samples)
    if asked.plot:
        report.plot(asked.plot, run.samples)


def _described(made: trees.Trees, sizes: trees.Sizes) -> str:
    return (
        f"{sizes.listed} files found and as many asked for attributes, {sizes.small} small files "
        f"read by one\nand {sizes.several} by {measure.READERS}, one of "
        f"{sizes.big / trees.GIB:g} GiB with {sizes.touches} pages touched, "
        f"{made.held / trees.GIB:.2f} GiB in all; {made.note}"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BenchmarkError as error:
        sys.exit(str(error))
