"""Find the packages that a directory lacks, and the requirements that name them.

uv proves that a directory is complete; where it is not, uv names one conflict. This walks the
wheels' own metadata to name everything that is not there. It takes the newest version that fits,
without backtracking: good for an explanation, no proof.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidWheelFilename,
    NormalizedName,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import Version

from wheelmount.errors import InputError
from wheelmount.wheels.archive import requirements_of
from wheelmount.wheels.requirements import applies
from wheelmount.wheels.target import Target

# What pip and uv say of a requirement that a directory does not meet.
_ABSENT = (
    re.compile(r"No matching distribution found for ([^\n]+?)(?: \(from [^\n]*\))?$", re.MULTILINE),
    re.compile(r"Because (\S+) was not found in the provided package locations"),
    re.compile(r"is available and you require ([^\s,]+)"),
)


@dataclass(frozen=True, slots=True)
class Missing:
    """A requirement without a wheel in the directory, and which package has it."""

    requirement: str
    wanted_by: str

    def __str__(self) -> str:
        return f"{self.requirement} (wanted by {self.wanted_by})"


def find_missing(
    roots: Iterable[tuple[Requirement, str]], wheels: Iterable[Path], target: Target
) -> list[Missing]:
    """Follow requirements through a directory's wheels; return those that no wheel meets.

    Args:
        roots: requirements, each with the package that has it.
        wheels: the files to choose from.
        target: markers are evaluated and wheels chosen for it.
    """
    offered = fitting(wheels, target)
    queue = deque((root, by, frozenset({""})) for root, by in roots)
    seen: set[tuple[str, frozenset[str]]] = set()
    missing: dict[Missing, None] = {}
    while queue:
        requirement, by, extras = queue.popleft()
        try:
            if not applies(requirement, target, extras):
                continue
        except InputError:  # of a stranger's wheel; uv passes over it, too
            continue
        bare = f"{requirement.name}{requirement.specifier}"
        meeting = [
            (version, file)
            for version, file in offered.get(canonicalize_name(requirement.name), [])
            if requirement.specifier.contains(version, prereleases=True)
        ]
        if not meeting:
            missing.setdefault(Missing(bare, by))
            continue
        version, file = max(meeting)
        wanted_extras = frozenset({"", *requirement.extras})
        if (file.name, wanted_extras) not in seen:
            seen.add((file.name, wanted_extras))
            label = f"{canonicalize_name(requirement.name)} {version}"
            queue.extend((needed, label, wanted_extras) for needed in requirements_of(file))
    return list(missing)


def fitting(
    wheels: Iterable[Path], target: Target
) -> dict[NormalizedName, list[tuple[Version, Path]]]:
    """Return the wheels that install on a target, by package."""
    tags = frozenset(target.tags())
    found: dict[NormalizedName, list[tuple[Version, Path]]] = {}
    for file in wheels:
        try:
            name, version, _, its_tags = parse_wheel_filename(file.name)
        except InvalidWheelFilename:
            continue  # pip and uv pass over it, too
        if tags & its_tags:
            found.setdefault(name, []).append((version, file))
    return found


def absent(said: str) -> list[str]:
    """Return the requirements that pip or uv did not find, read from its output."""
    found = []
    for pattern in _ABSENT:
        for text in pattern.findall(said):
            with suppress(InvalidRequirement):
                found.append(str(Requirement(text)))
    return list(dict.fromkeys(found))
