"""How fast a directory becomes blocks: ``python -m benchmarks.pack``, from the checkout.

What the client does with every byte once, however many hosts there are: read it into the ring and
hash it. Beside it ``cat`` of the same files, which only reads, and ``mksquashfs`` without any
compression, which makes an image of them. All on tmpfs, in turn in every round; medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks import system
from benchmarks.delivery import make
from benchmarks.trees import MIB
from wheelmount.config import Settings
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.source import Source
from wheelmount.mount.transfer.ring import Ring
from wheelmount.mount.transfer.topology import block_size

CAT = 'find "$0" -type f -exec cat {} + >/dev/null'
SQUASHFS = ["-noI", "-noD", "-noF", "-noX", "-noappend", "-no-progress", "-quiet"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.pack")
    parser.add_argument("--size", type=int, default=1024, help="MiB of each tree (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trees", default="file,files", help="or directories (%(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wm-bench-", dir="/dev/shm") as place:
        for tree in given.trees.split(","):
            folder = make(Path(place) / Path(tree).name, tree, given.size * MIB)
            show(folder, measure(folder, Path(place) / "image", given.rounds))
            shutil.rmtree(folder)


def measure(folder: Path, image: Path, rounds: int) -> dict[str, float]:
    """Seconds of each way, the median of all rounds."""
    ways: dict[str, Callable[[], object]] = {
        "cat": lambda: system.call(["sh", "-c", CAT, folder]),
        "wheelmount": lambda: pack(folder, packed=False),
        "wheelmount, zstd": lambda: pack(folder, packed=True),
        "mksquashfs": lambda: system.call(["mksquashfs", folder, image, *SQUASHFS]),
    }
    if not shutil.which("mksquashfs"):
        print("mksquashfs is left out: it is not installed")
        del ways["mksquashfs"]
    seconds = defaultdict(list)
    for number in range(rounds):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
            image.unlink(missing_ok=True)
    return {name: median(found) for name, found in seconds.items()}


def pack(folder: Path, *, packed: bool) -> None:
    """The client's part: scan, lay out, and every block once through the ring."""
    root = os.fsencode(folder)
    settings = Settings()
    tree = scan(root)
    layout = Layout(tree, settings.block_size or block_size(tree.size, 1))
    layout.encode()
    ring = Ring(Source(root, layout), slots=settings.ring, lease=60, readers=lambda _: 1)

    def through(block: int) -> None:
        with ring.lend(block, packed):
            pass

    with ThreadPoolExecutor(settings.in_flight) as threads:
        for _ in threads.map(through, range(layout.blocks)):
            pass


def show(folder: Path, found: dict[str, float]) -> None:
    """Print a table."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    held = sum(path.stat().st_size for path in files) / MIB
    print(f"\n{folder.name}: {len(files)} files, {held:.0f} MiB")
    for name, seconds in sorted(found.items(), key=lambda item: item[1]):
        print(
            f"  {name:17} {seconds:6.2f} s {held / seconds:6.0f} MiB/s"
            f" {found['cat'] / seconds:5.2f} of cat"
        )


if __name__ == "__main__":
    main()
