"""Model files that are mapped: by numpy and by safetensors, from several processes at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from tests.mount.test_server import Served, _arrive_all
from wheelmount.config import MEMORY, Settings
from wheelmount.mount.serve import processes

pytestmark = pytest.mark.fuse

SIZE = 24 << 20
PROCESSES = 4

LOAD = """
import sys
path, kind = sys.argv[1:]
if kind == "numpy":
    import numpy as np
    data = np.load(path, mmap_mode="r")
    total = int(data.sum(dtype="u8"))
else:
    from safetensors import safe_open
    with safe_open(path, framework="numpy") as file:
        total = sum(int(file.get_tensor(name).sum(dtype="u8")) for name in file.keys())
        assert file.get_slice("b")[:2].tolist() == [7, 7]
print(total, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["bind", "devfuse", "pyfuse3"])
def models(
    source: Path, workplace: Path, settings: Settings, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """A mount with an array and a safetensors file, both of ``SIZE`` bytes of data."""
    rng = np.random.default_rng(1)
    np.save(source / "array.npy", rng.integers(0, 256, SIZE, np.uint8))
    half = rng.integers(0, 256, SIZE // 2, np.uint8)
    save_file({"a": half, "b": np.full(SIZE // 2, 7, np.uint8)}, source / "model.safetensors")
    settings = replace(settings, store=MEMORY, block_size=1 << 20)
    served = Served(source, workplace, settings, request.param)
    served.feed(keep=True)
    _arrive_all(served)
    if request.param == "bind":
        served.store.finish()
        processes.show(served.directory, 1)
    yield served.mount
    served.end()


@pytest.mark.costly
@pytest.mark.parametrize("name", ["array.npy", "model.safetensors"])
def test_is_loaded_by_several_and_is_in_memory_once(models: Path, source: Path, name: str) -> None:
    kind = "numpy" if name == "array.npy" else "safetensors"
    command = [sys.executable, "-c", LOAD]
    alone = subprocess.run(
        [*command, source / name, kind], stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    readers = [
        subprocess.Popen(
            [*command, models / name, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(PROCESSES)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == alone.stdout
        if kind == "numpy":  # safetensors maps the file only while it is open
            shares = [_share(reader.pid, models / name) for reader in readers]
            assert SIZE <= sum(shares) < 1.1 * SIZE
    finally:
        for reader in readers:
            reader.communicate(timeout=30)


def _share(pid: int, path: Path) -> int:
    """Bytes of a mapped file that a process has, those of several divided among them."""
    maps = psutil.Process(pid).memory_maps(grouped=True)
    return sum(each.pss for each in maps if each.path == str(path))
