"""The trees that are mounted, the same every time."""

from __future__ import annotations

import dataclasses
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import uv

from benchmarks.system import BenchmarkError, call

MIB = 1 << 20
GIB = 1 << 30
FALLBACK = ("numpy", "pandas", "scipy")
"""Imported where what was asked for cannot be had."""

_IN_ONE = 20
"""Files in a directory."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the trees are.

    Attributes:
        listed: files that are found, and as many that are asked for their attributes; empty.
        small: files that are read by one reader.
        several: files that are read by several readers.
        big: bytes of the one big file.
        demand: bytes of the big file of the tree that is read while it arrives.
        touches: pages touched of the big file.
    """

    listed: int = 20_000
    small: int = 30_000
    several: int = 16_000
    big: int = 2 * GIB
    demand: int = GIB
    touches: int = 50_000


QUICK = Sizes(2_000, 3_000, 2_000, 256 * MIB, 128 * MIB, 10_000)


@dataclasses.dataclass(frozen=True)
class Trees:
    """Directories made by ``make``, with the lists of what is in them.

    Attributes:
        main: ``find`` and ``stat`` (empty files), ``small``, ``several``, ``big``, ``site``.
        demand: ``big`` and ``site``.
        names: folder with a file of relative paths for each part of ``main``.
        modules: that can be imported from ``site``; empty if none could be installed.
        note: what was installed, or why not.
        held: bytes in ``main``.
    """

    main: Path
    demand: Path
    names: Path
    modules: tuple[str, ...]
    note: str
    held: int


def make(work: Path, sizes: Sizes, modules: Sequence[str], links: str | None) -> Trees:
    """Make the trees below ``work``, or find them there from an earlier run."""
    root = work / f"trees-{'-'.join(map(str, dataclasses.astuple(sizes)))}"
    main, demand, names = root / "main", root / "demand", root / "names"
    if not (root / "complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        for folder in (main, demand, names):
            folder.mkdir(parents=True)
        rng = random.Random(20)  # noqa: S311 - the same every time
        for part, count in (("find", sizes.listed), ("stat", sizes.listed)):
            fill(main / part, names / part, (0 for _ in range(count)), rng)
        for part, count in (("small", sizes.small), ("several", sizes.several)):
            fill(main / part, names / part, lengths(count, rng), rng)
        big(main / "big", sizes.big, rng)
        big(demand / "big", sizes.demand, rng)
        (root / "complete").touch()
    found, note = _site(root, modules, links)
    held = sum(path.stat().st_size for path in main.rglob("*") if path.is_file())
    return Trees(main, demand, names, found, note, held)


def lengths(count: int, rng: random.Random) -> Iterator[int]:
    """Bytes of files as site-packages have them: median 3 KiB, mean 9 KiB, at most 256 KiB."""
    for _ in range(count):
        yield min(int(rng.lognormvariate(8.0, 1.5)), 256 << 10)


def fill(folder: Path, names: Path, sizes: Iterator[int], rng: random.Random) -> None:
    lines = []
    for number, length in enumerate(sizes):
        place = f"d{number // _IN_ONE // 30:03}/s{number // _IN_ONE % 30:02}"
        if number % _IN_ONE == 0:
            (folder / place).mkdir(parents=True)
        lines.append(f"{place}/module_{number:05}.py\n")
        (folder / place / f"module_{number:05}.py").write_bytes(rng.randbytes(length))
    names.write_text("".join(lines))


def big(path: Path, size: int, rng: random.Random) -> None:
    with path.open("wb") as file:
        for _ in range(size // MIB):
            file.write(rng.randbytes(MIB))


def _site(root: Path, modules: Sequence[str], links: str | None) -> tuple[tuple[str, ...], str]:
    """Install modules into both trees; what can be imported there, and a note."""
    wanted, note = tuple(modules), ""
    for attempt in dict.fromkeys((wanted, FALLBACK)):
        mark = root / f"site-of-{'-'.join(attempt)}"
        names = tuple(each.partition("==")[0] for each in attempt)
        if mark.exists():
            return names, f"import of {', '.join(attempt)}{note}"
        for old in root.glob("site-of-*"):
            old.unlink()
        try:
            _install(root, attempt, links)
        except BenchmarkError as error:
            note = f" since {', '.join(attempt)} cannot be installed ({error})"
            continue
        mark.touch()
        return names, f"import of {', '.join(attempt)}{note}"
    return (), f"no import{note}"


def _install(root: Path, modules: tuple[str, ...], links: str | None) -> None:
    site, second = root / "main" / "site", root / "demand" / "site"
    for folder in (site, second):
        shutil.rmtree(folder, ignore_errors=True)
    command = [uv.find_uv_bin(), "pip", "install", "--quiet", "--only-binary", ":all:"]
    command += ["--compile-bytecode", "--python", sys.executable, "--target", str(site)]
    command += ["--link-mode", "copy", *(["--find-links", links] if links else [])]
    call([*command, *modules])
    shutil.copytree(site, second, symlinks=True)
