"""Find and read installed distributions (RECORD, PEP 376), and their remains."""

from __future__ import annotations

import csv
import os
import re
import shutil
import sys

STASH = "~wheelmount-"
"""Prefix of directories for files that are moved aside. pip ignores names with a tilde."""


def installed(libraries: set[str]) -> dict[str, list[str]]:
    """Return the metadata directories of installed distributions, by normalized name."""
    found: dict[str, list[str]] = {}
    for library in libraries:
        for entry in os.listdir(library):
            stem, suffix = os.path.splitext(entry)
            if suffix in (".dist-info", ".egg-info", ".egg-link"):
                name = stem.rpartition("-")[0] if suffix == ".dist-info" else stem.split("-")[0]
                name = re.sub(r"[-_.]+", "-", name).lower()
                found.setdefault(name, []).append(os.path.join(library, entry))
    return found


def title(info: str) -> str:
    name, _, version = os.path.splitext(os.path.basename(info))[0].rpartition("-")
    return f"{name}=={version}"


def read_rows(file: str) -> list[list[str]]:
    with open(file, encoding="utf-8", newline="") as stream:
        return [row for row in csv.reader(stream) if row]


def files_of(info: str) -> list[str]:
    """Return the files of a distribution in this environment, with their bytecode."""
    library = os.path.dirname(info)
    below = tuple(os.path.join(prefix, "") for prefix in {sys.prefix, os.path.realpath(sys.prefix)})
    found: dict[str, None] = {}
    for row in read_rows(os.path.join(info, "RECORD")):
        path = os.path.normpath(os.path.join(library, row[0]))
        if path.startswith(below):
            found[path] = None
    caches: dict[str, list[str]] = {}
    for path in list(found):
        folder, name = os.path.split(path)
        if name.endswith(".py"):
            cache = os.path.join(folder, "__pycache__")
            if cache not in caches:
                caches[cache] = os.listdir(cache) if os.path.isdir(cache) else []
            stem = f"{name[:-3]}."
            found.update(
                dict.fromkeys(os.path.join(cache, n) for n in caches[cache] if n.startswith(stem))
            )
    return list(found)


def remove_empty(folder: str, keep: set[str]) -> None:
    while folder not in keep:
        try:
            os.rmdir(folder)
        except OSError:
            return
        folder = os.path.dirname(folder)


def remove_leftovers(library: str) -> None:
    """Delete files that a killed run had moved aside."""
    for entry in os.listdir(library):
        if entry.startswith(STASH):
            shutil.rmtree(os.path.join(library, entry), ignore_errors=True)


def read_text(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return ""
