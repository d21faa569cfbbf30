"""Imports what distributions of the Python that runs this have: ``python importable.py NAME…``.

Prints in JSON, by name, what went wrong: nothing where all top-level modules import. Each
distribution is tried in a process of its own; only the standard library is used.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from importlib import metadata
from pathlib import PurePosixPath

TIMEOUT = 120
"""Seconds that one distribution may take."""


def modules(name: str) -> list[str]:
    """Top-level modules of a distribution; of namespaces the first packages below."""
    files = [PurePosixPath(str(file)) for file in metadata.files(name) or ()]
    sources = [file for file in files if file.suffix in (".py", ".so") and ".." not in file.parts]
    packages = {file.parent for file in sources if file.name == "__init__.py"}
    found: dict[PurePosixPath, PurePosixPath] = {}
    for file in sorted(sources):
        folders = list(reversed(file.parents))[1:]
        module = file.parent / file.name.partition(".")[0]
        package = next((folder for folder in folders if folder in packages), None)
        if package is not None:
            found[package] = package
        elif folders:  # of a namespace: one module stands for all of its folder
            found.setdefault(file.parent, module)
        else:
            found[module] = module
    named = [module.parts for module in found.values()]
    return [".".join(parts) for parts in named if all(map(str.isidentifier, parts))]


def fault(name: str) -> str:
    """Why a distribution does not import; nothing where it does."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _try(name, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as stream:
        said = stream.read()
    _, status = os.waitpid(pid, 0)
    return said if said or not status else f"ended with {os.waitstatus_to_exitcode(status)}"


def _try(name: str, writing: int) -> None:
    signal.alarm(TIMEOUT)
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    try:
        found = modules(name)
        said = "" if found else "no module"
        for module in found:
            importlib.import_module(module)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    os.write(writing, said.encode())
    os._exit(0)


if __name__ == "__main__":
    json.dump({name: fault(name) for name in sys.argv[1:]}, sys.stdout)
