"""The rooms of the package: which may import which, and no module in a circle."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import wheelmount

ROOT = Path(wheelmount.__file__).parent

FLOORS = (
    ("cli", "cluster"),
    ("operations", "doctor", "machine"),
    ("containers", "wheels", "mount"),
    ("hosts",),
)
"""Rooms from above to below; what is not named here is on the ground."""

MOUNT = ("client", "host", "transfer", "serve", "store", "snapshot", "kernel")
"""Rooms of ``mount`` from above to below."""


@functools.cache
def _parsed(path: Path) -> tuple[list[ast.stmt], list[ast.ImportFrom]]:
    """What a module does at its start, and all imports in it."""
    tree = ast.parse(path.read_text())
    return tree.body, [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def _imports(path: Path, *, at_start: bool = False) -> Iterator[str]:
    """Modules of the package that a module imports, by their dotted names below ``wheelmount``."""
    body, imports = _parsed(path)
    for node in body if at_start else imports:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wheelmount"):
            _, _, room = str(node.module).partition(".")
            for name in node.names:
                below = f"{room}.{name.name}".lstrip(".")
                file = ROOT / (below.replace(".", "/") + ".py")
                yield below if file.exists() or file.with_suffix("").is_dir() else room


def _modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in ROOT.rglob("*.py")
        if path.name != "__init__.py"
    }


def test_rooms_import_only_what_is_below_them() -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    ground = len(FLOORS)
    upwards = [
        f"{name} imports {other}"
        for name, path in _modules().items()
        for other in _imports(path)
        if floor.get(name.partition(".")[0], ground) > floor.get(other.partition(".")[0], ground)
    ]
    assert not upwards


def test_rooms_of_a_mount_import_only_what_is_below_them() -> None:
    floor = {f"mount.{room}": number for number, room in enumerate(MOUNT)}

    def height(name: str) -> int | None:
        return floor.get(".".join(name.split(".")[:2]))

    upwards = []
    for name, path in _modules().items():
        for other in _imports(path):
            here, there = height(name), height(other)
            if here is not None and there is not None and here > there:
                upwards.append(f"{name} imports {other}")
    assert not upwards


def test_no_module_imports_itself_in_a_circle() -> None:
    modules = _modules()
    graph = {name: set(_imports(path, at_start=True)) for name, path in modules.items()}
    assert set(TopologicalSorter(graph).static_order()) >= modules.keys()
