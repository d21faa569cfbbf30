"""What is measured of a backend, in which order, and how samples are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import system
from benchmarks.peers import Backend
from benchmarks.system import BenchmarkError
from benchmarks.trees import GIB, Sizes, Trees

READERS = 8
MAPPERS = 4
"""Processes that read small files, and that map one file, at the same time."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A figure that is taken cold and warm.

    Attributes:
        name: short.
        unit: of a sample as it is printed.
        scale: what a sample is divided by for that.
        rate: whether more is better; else a sample is seconds.
    """

    name: str
    unit: str
    scale: float = 1.0
    rate: bool = True


METRICS = (
    Metric("find", "k files/s", 1e3),
    Metric("stat", "k files/s", 1e3),
    Metric("small", "k files/s", 1e3),
    Metric(f"small x{READERS}", "k files/s", 1e3),
    Metric("dd", "GiB/s", GIB),
    Metric("mmap", "k touches/s", 1e3),
    Metric("import", "s", rate=False),
)


class Samples:
    """A sample of each figure of each backend for each round, None where a round has none."""

    def __init__(self) -> None:
        self.round = 0
        """The round that is being taken."""
        self.values: dict[str, dict[str, list[float | None]]] = {}
        """By backend, then by figure, in order of the rounds."""
        self.failures: list[str] = []
        """Samples that could not be taken, each with the reason."""

    def note(self, backend: str, figure: str, value: float) -> None:
        """Keep the sample of this round."""
        found = self.values.setdefault(backend, {}).setdefault(figure, [])
        found += [None] * (self.round - len(found))
        found.append(value)

    def get(self, backend: str, figure: str) -> list[float | None]:
        """The samples of one figure; the last rounds may lack."""
        return self.values.get(backend, {}).get(figure, [])


def one_pass(
    backend: Backend, root: Path, trees: Trees, sizes: Sizes, *, cold: bool
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Every metric once, in processes of their own: its name and what takes a sample.

    Each has files of its own, so that none is warmed by the one before. ``dd`` and ``mmap`` share
    the big file, which the kernel is made to forget between them where it is to be cold; they come
    first, since some backends forget everything then.
    """
    big = root / "big"
    if cold:
        system.probe("take", str(min(sizes.big + trees.held // 2, system.available() // 2)))
    command = ["dd", f"if={big}", "of=/dev/null", "bs=1M", "status=none"]
    yield "dd", lambda: sizes.big / system.timed(command)
    if cold:
        backend.cool(big)
    yield "mmap", lambda: _rate("touch", big, str(sizes.touches))
    if cold:
        system.timed(command)  # the second pass is to find all of it cached
    yield "find", lambda: _find(root / "find")
    yield "stat", lambda: _rate("stat", root / "stat", trees.names / "stat")
    yield "small", lambda: _rate("small", root / "small", trees.names / "small")
    several = root / "several", trees.names / "several", str(READERS)
    yield f"small x{READERS}", lambda: _rate("several", *several)
    if trees.modules:
        yield "import", lambda: system.probe("load", root / "site", *trees.modules)[0]


def _rate(name: str, *arguments: str | Path) -> float:
    seconds, count = system.probe(name, *arguments)
    return count / seconds


def _find(folder: Path) -> float:
    start = time.perf_counter()
    found = system.call(["find", folder])
    return found.count("\n") / (time.perf_counter() - start)


def shared_pages(file: Path, length: int) -> float:
    """Bytes of memory that several processes need to map one file: the sum of their PSS."""
    command = system.probe_command("hold", file, str(length))
    with contextlib.ExitStack() as stack:
        holders = []
        for _ in range(MAPPERS):
            holder = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(holder)  # leaving closes its input, which has it end
            holders.append(holder)
        for holder in holders:
            if _line(holder) != "ready":
                raise BenchmarkError("a process could not map the file")
        for holder in holders:
            _tell(holder)
        return sum(int(_line(holder)) for holder in holders)


def _line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip() if process.stdout else ""


def _tell(process: subprocess.Popen[str]) -> None:
    if process.stdin:
        process.stdin.write("\n")
        process.stdin.flush()


def delivered(backend: Backend, trees: Trees, sizes: Sizes, samples: Samples) -> None:
    """Mount the main tree, measure it cold and warm and its memory, and take it down."""
    start = time.perf_counter()
    try:
        root = backend.up(trees.main)
        samples.note(backend.name, "mount and deliver", time.perf_counter() - start)
        backend.confirm()
        before = system.evictions()
        for temperature in ("cold", "warm"):
            cold = temperature == "cold"
            for name, sample in one_pass(backend, root, trees, sizes, cold=cold):
                figure = f"{name} {temperature}"
                try:
                    samples.note(backend.name, figure, sample())
                except BenchmarkError as error:  # the others can still be had
                    samples.failures.append(
                        f"{backend.name}, round {samples.round + 1}, {figure}: {error}"
                    )
        for name, count in system.evictions().items():
            samples.note(backend.name, name, count - before[name])
        length = min(sizes.big, GIB)
        samples.note(backend.name, "PSS", shared_pages(root / "big", length) / length)
        processes = system.memory(system.processes(backend.mark))
        samples.note(backend.name, "processes", processes)
        samples.note(backend.name, "store", backend.store())
    finally:
        backend.down()


def arriving(backend: Backend, trees: Trees, sizes: Sizes, samples: Samples) -> None:
    """Use the other tree while it arrives; seconds since the command that mounts it began."""
    start = time.perf_counter()
    process = backend.start(trees.demand)
    try:
        root = backend.mntpoint
        system.await_mount(root, process)

        def passed(figure: str) -> None:
            samples.note(backend.name, figure, time.perf_counter() - start)

        passed("mounted")
        system.call(["ls", root])
        passed("first ls")
        last = f"skip={sizes.demand // 4096 - 1}"
        system.call(
            ["dd", f"if={root / 'big'}", "of=/dev/null", "bs=4096", "count=1", "status=none", last]
        )
        passed("first byte")
        if trees.modules:
            system.call(system.probe_command("load", root / "site", *trees.modules))
            passed("first import")
        backend.finish(process)
        passed("whole delivery")
    finally:
        backend.down()
        if process.poll() is None:
            process.kill()
        process.wait()


def copied(source: Path, target: Path, samples: Samples, backend: str) -> None:
    """The reference of the time a delivery takes: ``cp -a`` within tmpfs."""
    samples.note(backend, "whole delivery", system.timed(["cp", "-a", source, target]))
    system.call(["rm", "-r", target])
