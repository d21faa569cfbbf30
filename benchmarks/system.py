"""Processes and mounts of a benchmark: run, found again, ended and taken down."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

MEMORY = Path("/dev/shm")  # noqa: S108 - private directories are made in it
"""Where what is kept is kept in memory."""

MARK = "BENCHMARK_OF"
"""Environment variable that every process of a backend has: the benchmark's directory."""

TIMEOUT = 400.0
"""Seconds that one command may take."""

PROBES = Path(__file__).with_name("probes.py")
_libc = ctypes.CDLL(None, use_errno=True)


class BenchmarkError(Exception):
    """A command failed or a backend cannot be had; the message says which and why."""


def call(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
    """Run a command to its end and give what it printed.

    Raises:
        BenchmarkError: it failed or took too long.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except FileNotFoundError:
        raise BenchmarkError(f"there is no {words[0]}") from None
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{words[0]} took longer than {TIMEOUT:g} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
        last = "; ".join(said[-2:])  # what happened, and a hint
        raise BenchmarkError(f"{Path(words[0]).name}: code {done.returncode}: {last}")
    return done.stdout


def probe_command(name: str, *arguments: str | Path) -> list[str]:
    """The command of a probe: a bare interpreter, that no site-packages slow down."""
    head = [sys.executable, "-S", "-E", "-B", str(PROBES), name]
    return [*head, *map(str, arguments)]


def probe(name: str, *arguments: str | Path) -> tuple[float, int]:
    """Run a probe; its seconds and count."""
    found: dict[str, Any] = json.loads(call(probe_command(name, *arguments)).splitlines()[-1])
    return found["seconds"], found["count"]


def timed(command: Sequence[str | Path]) -> float:
    """Seconds of a whole command, its start included."""
    start = time.perf_counter()
    call(command)
    return time.perf_counter() - start


def mounts() -> list[tuple[str, str]]:
    """Mount point and type of every mount here, the latest last."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields.split()[4])
        found.append((point, rest.split()[0]))
    return found


def mounted(path: Path) -> bool:
    """Whether something is mounted at exactly ``path``."""
    return any(point == str(path) for point, _ in mounts())


def await_mount(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until something is mounted at ``path`` by a process that may fail instead."""
    deadline = time.monotonic() + TIMEOUT
    while not mounted(path):
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"nothing was mounted (code {process.poll()})")
        time.sleep(0.001)


def mount(source: Path, target: Path, kind: str, data: str) -> None:
    """mount(2), read-only; mount(8) would put a loop device under an image that needs none."""
    flags = 1 | 2 | 4  # MS_RDONLY, MS_NOSUID, MS_NODEV
    words = [os.fsencode(source), os.fsencode(target), kind.encode()]
    if _libc.mount(*words, flags, data.encode()):
        raise BenchmarkError(f"mount {kind}: {os.strerror(ctypes.get_errno())}")


def hide_mounts() -> None:
    """Give this process and its children mounts of their own, if it may.

    Nobody else sees them, nor takes them down, and whatever happens they go with the processes.
    """
    namespace = 0x20000  # CLONE_NEWNS
    if os.geteuid() == 0 and _libc.unshare(namespace) == 0:
        _libc.mount(b"none", b"/", None, 1 << 14 | 1 << 19, None)  # MS_REC, MS_SLAVE


def unmount_below(folder: Path) -> None:
    """Take down what is still mounted in a folder, whoever uses it."""
    head = f"{folder}/"
    for point, _ in reversed(mounts()):
        if point.startswith(head):
            _libc.umount2(os.fsencode(point), 2)  # MNT_DETACH


def processes(mark: Path) -> list[int]:
    """Processes that were started for the benchmark in ``mark``, and theirs; not this one."""
    wanted = os.fsencode(f"{MARK}={mark}")
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def end(mark: Path) -> None:
    """End all processes that were started for the benchmark in ``mark``."""
    deadline = time.monotonic() + 10
    while (left := processes(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def memory(pids: Sequence[int]) -> int:
    """Bytes of processes by themselves: private and their share of files, without shared memory.

    Pages of tmpfs are left out: those are the store, which is counted where it lies.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_File:")):
                    total += int(line.split()[1]) << 10
    return total


def available() -> int:
    """Bytes of memory that can be had."""
    return int(psutil.virtual_memory().available)


def evictions() -> dict[str, int]:
    """How often this machine's caches were dropped by hand, and pages read again after reclaim.

    Since it was started. What these counted meanwhile was not warm, whoever did it.
    """
    lines = Path("/proc/vmstat").read_text().splitlines()
    counts = {name: int(value) for name, value in map(str.split, lines)}
    names = ("drop_pagecache", "drop_slab", "workingset_refault_file")
    return {name: counts.get(name, 0) for name in names}


def allocated(folder: Path) -> int:
    """Bytes that files in a folder take up."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
