"""Results: as text, as JSON with all samples, as a plot."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.measure import MAPPERS, METRICS, Metric, Samples
from benchmarks.peers import Native
from benchmarks.trees import GIB, MIB

STEPS = ("mounted", "first ls", "first byte", "first import", "whole delivery")
TEMPERATURES = ("cold", "warm")
NOTES = """\
cold: a fresh mount, from which nothing was read; tmpfs has no cold. Each figure has files of its
own. Small files are read by a loop in Python, whose cost is the same everywhere. Images of squashfs
are uncompressed; all images lie on tmpfs. wheelmount and monarch: one host on this machine."""


def _known(samples: Samples, backend: str, figure: str) -> list[float]:
    return [value for value in samples.get(backend, figure) if value is not None]


def median(samples: Samples, backend: str, figure: str) -> float | None:
    """The median of the rounds that have this figure."""
    known = _known(samples, backend, figure)
    return statistics.median(known) if known else None


def ratio(samples: Samples, backend: str, metric: Metric, figure: str) -> float | None:
    """Speed as a multiple of native tmpfs: the median of the rounds' own ratios.

    Each round is compared with tmpfs in the same round, so that a slow minute of the machine hits
    both. More is better, for seconds too.
    """
    pairs = zip(samples.get(backend, figure), samples.get(Native.name, figure), strict=False)
    found = [(a / b if metric.rate else b / a) for a, b in pairs if a and b]
    return statistics.median(found) if found else None


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "memory": pages,
        "load": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Versions of what is measured and of what it stands on; those that can be had."""
    found = {"python": platform.python_version()}
    for name in ("wheelmount", "torchmonarch", "pyfuse3"):
        found[name] = metadata.version(name)
    checkout = str(Path(__file__).parent)
    for name, command in {
        "commit": ["git", "-C", checkout, "describe", "--always", "--dirty=-with-changes"],
        "libfuse": ["pkg-config", "--modversion", "fuse3"],
        "fusermount3": ["fusermount3", "--version"],
        "squashfuse": ["squashfuse_ll", "--help"],
        "mksquashfs": ["mksquashfs", "-version"],
        "mkfs.erofs": ["mkfs.erofs", "-V"],
    }.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            continue
        lines = (done.stdout + done.stderr).splitlines()
        # Some say it with their usage or after an error, and none alike.
        found[name] = next(
            (line for line in lines if re.search(r"\d\.\d|^[\w-]+$", line)), "unknown"
        )
    return found


def text(results: Mapping[str, Any], samples: Samples) -> str:
    """The tables."""
    here, parts = results["machine"], []
    parts.append(
        f"{here['cpu']}, {here['cores']} cores, {here['memory'] / GIB:.0f} GiB, Linux "
        f"{here['kernel']}; {results['rounds']} rounds in turn\n"
        + "\n".join(f"{name}: {version}" for name, version in results["versions"].items())
        + f"\n{results['tree']}"
    )
    for temperature in TEMPERATURES:
        parts.append(_speeds(samples, temperature))
    parts.append(_arrival(samples))
    parts.append(_memory(samples))
    if results["left out"] or samples.failures:
        lines = [f"{name}: {why}" for name, why in results["left out"].items()]
        parts.append("\n  ".join(["left out:", *lines, *samples.failures]))
    parts.append(_disturbed(samples) + NOTES)
    return "\n\n".join(parts)


def _speeds(samples: Samples, temperature: str) -> str:
    rows = [[temperature, *(metric.name for metric in METRICS)]]
    rows.append(["", *(metric.unit for metric in METRICS)])
    for backend in samples.values:
        row = [backend]
        for metric in METRICS:
            figure = f"{metric.name} {temperature}"
            value = median(samples, backend, figure)
            if value is None:
                row.append("-")
                continue
            times = ratio(samples, backend, metric, figure)
            shown = f"{value / metric.scale:.3g}"
            row.append(f"{shown} ({times:.2f})" if times else shown)
        if set(row[1:]) != {"-"}:
            rows.append(row)
    title = "medians; in brackets the speed as a multiple of tmpfs in the same round"
    return f"{title}\n{_table(rows)}"


def _arrival(samples: Samples) -> str:
    rows = [["while it arrives, s", *STEPS]]
    for backend in samples.values:
        values = [median(samples, backend, step) for step in STEPS]
        if any(value is not None for value in values):
            rows.append([backend, *("-" if v is None else f"{v:.2f}" for v in values)])
    title = (
        "since the mounting command began, its start and the host's included, one after the other\n"
        f"in one mount, first byte = last page of the big file; {Native.name}: cp -a"
    )
    return f"{title}\n{_table(rows)}"


def _memory(samples: Samples) -> str:
    parts = ("processes", "store")
    rows = [["memory", "up, s", "held", *parts, "all/held", f"PSS of {MAPPERS}/file"]]
    for backend in samples.values:
        figures = ("mount and deliver", "held", *parts, "PSS")
        values = [median(samples, backend, figure) for figure in figures]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            up, held, processes, store, share = known
            cells = [f"{up:.1f}"]
            cells += [f"{value / MIB:.0f} MiB" for value in (held, processes, store)]
            rows.append([backend, *cells, f"{(processes + store) / held:.2f}", f"{share:.2f}"])
    title = (
        "s until it was mounted and all bytes were there (images: already made), and memory then:\n"
        "of its processes by themselves and of its store; and\n"
        f"what {MAPPERS} processes that map one file take in all, as a multiple of it"
    )
    return f"{title}\n{_table(rows)}"


def _disturbed(samples: Samples) -> str:
    """What the rest of the machine did to its caches while they were measured, if it was much."""
    lines = []
    for backend in samples.values:
        drops = sum(sum(_known(samples, backend, name)) for name in ("drop_pagecache", "drop_slab"))
        read = median(samples, backend, "workingset_refault_file") or 0.0
        share = read * os.sysconf("SC_PAGE_SIZE") / (median(samples, backend, "held") or 1)
        if drops or share > 0.01:
            lines.append(f"NOT ALL WARM: {backend}: caches dropped {drops:.0f} times meanwhile, ")
            lines.append(f"{share:.0%} of the bytes read again after the kernel took them back\n")
    return "".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def save(path: Path, results: Mapping[str, Any], samples: Samples) -> None:
    """Write everything as JSON: rates per second, times in s, memory in bytes."""
    path.write_text(
        json.dumps({**results, "samples": samples.values, "failures": samples.failures}, indent=1)
        + "\n"
    )


def plot(path: Path, samples: Samples) -> None:
    """Draw the ratios to tmpfs as grouped bars, cold above warm."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(len(TEMPERATURES), figsize=(11, 7), sharex=True, squeeze=False)
    shown = [backend for backend in samples.values if backend != Native.name]
    width = 0.8 / max(len(shown), 1)
    for axis, temperature in zip(axes.flat, TEMPERATURES, strict=True):
        for number, backend in enumerate(shown):
            heights = [
                ratio(samples, backend, metric, f"{metric.name} {temperature}") or 0.0
                for metric in METRICS
            ]
            places = [place - 0.4 + (number + 0.5) * width for place in range(len(METRICS))]
            axis.bar(places, heights, width, label=backend)
        axis.set_yscale("log")
        axis.set_ylim(0.01, 3)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylabel(f"{temperature}: speed, tmpfs = 1")
        axis.set_xticks(range(len(METRICS)), [metric.name for metric in METRICS])
    axes.flat[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    figure.tight_layout()
    figure.savefig(path)
