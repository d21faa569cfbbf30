"""What is measured, each as a process of its own: ``probes.py NAME ARGUMENTS``.

Alone and of the standard library only, since it is run without site-packages. Prints one JSON
mapping: ``seconds`` of the work alone, without the start of the interpreter, and ``count`` of what
was done. The loops are Python's; what they cost by themselves (about 1 us for a file read) is the
same on every file system, and so makes ratios look a little nearer to 1 than they are.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

PAGE = 4096
MOST = 1 << 20
"""Bytes that one read asks for: no small file has more."""


def _names(root: str, names: str, seed: int) -> list[bytes]:
    """Paths below ``root`` of a file with a relative path a line, shuffled."""
    head = os.fsencode(root) + b"/"
    found = [head + name for name in Path(names).read_bytes().splitlines()]
    random.Random(seed).shuffle(found)  # noqa: S311 - the same every time
    return found


def _read_all(paths: list[bytes]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        while len(os.read(fd, MOST)) == MOST:
            pass
        os.close(fd)


def stat(root: str, names: str) -> tuple[float, int]:
    """Attributes of every file by its path, shuffled."""
    paths = _names(root, names, 1)
    start = time.perf_counter()
    for path in paths:
        os.lstat(path)
    return time.perf_counter() - start, len(paths)


def small(root: str, names: str) -> tuple[float, int]:
    """Open, read and close every file, shuffled."""
    paths = _names(root, names, 2)
    start = time.perf_counter()
    _read_all(paths)
    return time.perf_counter() - start, len(paths)


def several(root: str, names: str, readers: str) -> tuple[float, int]:
    """The same by several processes at a time, each with its share of the files."""
    paths = _names(root, names, 3)
    number = int(readers)
    go_read, go_write = os.pipe()
    children = []
    for reader in range(number):
        pid = os.fork()
        if pid == 0:
            os.close(go_write)
            os.read(go_read, 1)  # returns when the parent closes its end
            try:
                _read_all(paths[reader::number])
            except OSError as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(pid)
    os.close(go_read)
    time.sleep(0.05)  # all of them wait by now
    start = time.perf_counter()
    os.close(go_write)
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    seconds = time.perf_counter() - start
    if any(codes):
        sys.exit(1)  # it has said why
    return seconds, len(paths)


def touch(path: str, touches: str) -> tuple[float, int]:
    """One byte each of pages all over a mapped file, in random order, no page twice."""
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        pages = random.Random(4).sample(range(len(data) // PAGE), int(touches))  # noqa: S311
        offsets = [page * PAGE for page in pages]
        start = time.perf_counter()
        for offset in offsets:
            data[offset]
        return time.perf_counter() - start, len(offsets)


def load(folder: str, *modules: str) -> tuple[float, int]:
    """Import modules from a folder."""
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    start = time.perf_counter()
    for module in modules:
        found = importlib.import_module(module).__file__ or ""
        if not found.startswith(folder):
            raise ImportError(f"{module} came from {found}")
    return time.perf_counter() - start, len(modules)


def forget(path: str) -> tuple[float, int]:
    """Have the kernel drop what it caches of a file."""
    with Path(path).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return 0.0, 1


def fault(root: str) -> tuple[float, int]:
    """Read every file past the kernel's cache, so that all bytes arrive and none is cached."""
    start, count = time.perf_counter(), 0
    with mmap.mmap(-1, MOST) as buffer:  # direct reads want aligned memory
        for folder, _, files in os.walk(root):
            for name in files:
                path = f"{folder}/{name}"
                if os.path.islink(path):  # noqa: PTH114 - a Path for each would cost more
                    continue
                fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
                while os.readv(fd, [buffer]) == MOST:
                    pass
                os.close(fd)
                count += 1
    return time.perf_counter() - start, count


def take(length: str) -> tuple[float, int]:
    """Have the machine give so many bytes of memory, and give them back.

    A virtual machine may have to ask for what it has not used lately, which is ten times slower
    than to use it: what is measured next finds it there.
    """
    start = time.perf_counter()
    with mmap.mmap(-1, int(length)) as memory:
        for offset in range(0, len(memory), PAGE):
            memory[offset] = 1
    return time.perf_counter() - start, int(length)


def hold(path: str, length: str) -> NoReturn:
    """Map the first ``length`` bytes of a file, touch all, and say ``ready``.

    At a line of input it says its share of the mapping in bytes, and lets it go at the end of the
    input: until all processes have been asked, all must hold it.
    """
    with (
        Path(path).open("rb") as file,
        mmap.mmap(file.fileno(), int(length), prot=mmap.PROT_READ) as data,
    ):
        for offset in range(0, len(data), PAGE):
            data[offset]
        print("ready", flush=True)
        sys.stdin.readline()
        print(_share(path), flush=True)
        sys.stdin.read()
        sys.exit()


def _share(path: str) -> int:
    share, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # the head of a mapping
            ours = line.endswith(path)
        elif ours and words[0] == "Pss:":
            share += int(words[1]) << 10
    return share


PROBES: dict[str, Callable[..., tuple[float, int]]] = {
    function.__name__: function
    for function in (stat, small, several, touch, load, forget, fault, take, hold)
}

if __name__ == "__main__":
    seconds, count = PROBES[sys.argv[1]](*sys.argv[2:])
    print(json.dumps({"seconds": seconds, "count": count}))
