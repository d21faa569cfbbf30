"""Prove that requirements can be installed from one directory alone.

uv resolves them with the directory as its only source; then every chosen wheel is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from wheelmount.errors import UnavailableError
from wheelmount.wheels.archive import find_faults, hash_file, opened
from wheelmount.wheels.compiler import Failure, compile_requirements
from wheelmount.wheels.findings import Gap, Unsound
from wheelmount.wheels.install import clean_environment
from wheelmount.wheels.lockfile import LOCK_NAME
from wheelmount.wheels.missing import find_missing, fitting
from wheelmount.wheels.pins import Pins
from wheelmount.wheels.requirements import without_url
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Question:
    """The requirements that one offline resolution has to prove.

    Requirements of files are known by ``pins``, which also fix the versions to the locked ones. A
    file of a package in ``hashes`` must have one of its hashes, except those in ``built``: names of
    wheels that were built on this machine of sources that the requirements name.
    """

    wanted: Wanted
    pins: tuple[Requirement, ...]
    target: Target
    hashes: Pins = field(default_factory=Pins)
    built: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """The recorded facts about a wheel.

    Attributes:
        hashes: recorded SHA-256 hashes; the file must have all of them.
        verified: whether the contents of a file with one of these hashes were checked before.
        trusted: whether its RECORD may be wrong.
        untouched: whether nothing was written to the file since it was hashed.
    """

    hashes: frozenset[str] = frozenset()
    verified: bool = False
    trusted: bool = False
    untouched: bool = False


def prove(question: Question, directory: Path) -> tuple[list[Path], Gap | None]:
    """Resolve a question from a directory alone.

    Returns:
        The chosen wheels and None; or, without a solution, all wheels of the directory (a damaged
        one may be the reason) and the gap, which is None if uv could not open one of them.

    Raises:
        WaitError: uv took too long.
        UnavailableError: uv is not installed.
    """
    asked = question.wanted.adding(question.pins)
    if not (asked.requirements or asked.files):  # no requirement applies to this target
        return [], None
    # Without the cache: a proof reads the bytes that are there, and leaves nothing behind. No
    # lock either: for its hashes uv would unpack every wheel, ten times as long as hashing.
    options = ["--no-cache", "--no-index", "--offline", "--no-config", "--no-annotate"]
    wheels = sorted(directory.glob("*.whl"))
    try:
        answer = compile_requirements(
            asked,
            question.target,
            [*options, "--find-links", str(directory.absolute())],
            clean_environment(os.environ),
        )
    except UnavailableError:
        unreadable = [wheel for wheel in wheels if not wheel.is_file()]
        if not unreadable:
            raise
        return unreadable, None  # such as links to nothing, which are found when they are read
    if isinstance(answer, Failure):
        return wheels, _gap(question, answer, wheels)
    offered = fitting(wheels, question.target)
    pins = [Requirement(line) for line in answer.splitlines()]
    chosen = [
        wheel
        for pin in pins
        for version, wheel in offered.get(canonicalize_name(pin.name), [])
        if pin.specifier.contains(version, prereleases=True)
    ]
    return chosen, None


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of reading a wheel.

    Attributes:
        sha256: hash of its bytes; empty if it cannot be read.
        fault: its first fault, in words; empty if there is none.
    """

    sha256: str
    fault: str


def examine(
    wheels: Iterable[Path], known: Mapping[str, Known], *, contents: bool
) -> dict[str, Examined]:
    """Read wheels on all processors, and find damaged ones and those with other hashes than known.

    Args:
        wheels: the files.
        known: the recorded facts, by file name.
        contents: whether to read and unpack all wheels, also those that were checked before.

    Returns:
        The result for each wheel, by file name.
    """

    def read(wheel: Path) -> tuple[str, Examined]:
        return wheel.name, _examine(wheel, known.get(wheel.name, Known()), contents=contents)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(read, wheels))


def find_unpinned(
    question: Question, chosen: Iterable[Path], examined: Mapping[str, Examined]
) -> list[Unsound]:
    """Find wheels of pinned packages of which no file has a pinned hash.

    Args:
        question: the question.
        chosen: the chosen wheels, without those that were built on this machine.
        examined: the results of reading them.
    """
    found = []
    by_package: dict[str, list[Path]] = {}
    for wheel in chosen:
        if examined[wheel.name].sha256:
            by_package.setdefault(canonicalize_name(wheel.name.partition("-")[0]), []).append(wheel)
    for name, wheels in by_package.items():
        allowed = question.hashes.hashes.get(name)
        if allowed is None and question.hashes.required:
            found += [Unsound(wheel.name, "it is not pinned by a hash") for wheel in wheels]
        elif allowed is not None and not any(
            _has_one(wheel, examined[wheel.name].sha256, allowed) for wheel in wheels
        ):
            fault = f"the requirements pin {', '.join(sorted(allowed))}"
            found += [Unsound(wheel.name, fault) for wheel in wheels]
    return found


def _has_one(wheel: Path, sha256: str, allowed: frozenset[str]) -> bool:
    others = {one.partition(":")[0] for one in allowed} - {"sha256"}
    return f"sha256:{sha256}" in allowed or any(
        f"{name}:{hash_file(wheel, name)}" in allowed for name in sorted(others)
    )


def _examine(wheel: Path, known: Known, *, contents: bool) -> Examined:
    if known.verified and known.untouched and len(known.hashes) == 1 and not contents:
        (noted,) = known.hashes
        return Examined(noted, "")
    try:
        with opened(wheel) as (stream, digest):
            same = not known.hashes or known.hashes == {digest}
            if same and known.verified and not contents:
                return Examined(digest, "")
            if faults := find_faults(stream, wheel.name, record=not known.trusted):
                return Examined(digest, faults[0])
    except OSError as error:  # such as of a link to nothing, or of a directory of that name
        return Examined("", f"it cannot be read: {error.strerror or error}")
    return Examined(digest, "" if same else "another build than the one that was locked")


def _gap(question: Question, failure: Failure, wheels: list[Path]) -> Gap:
    roots = [(one, "you") for one in question.wanted.requirements]
    roots += [(one, file.name) for file in question.wanted.files for one in _lines(file)]
    missing = find_missing(roots, wheels, question.target)
    pins = find_missing([(p, LOCK_NAME) for p in question.pins], wheels, question.target)
    named = {Requirement(one.requirement).name for one in missing}
    missing += [one for one in pins if Requirement(one.requirement).name not in named]
    return Gap(question.target, tuple(missing), failure.reason, failure.hint)


def _lines(file: Path) -> Iterable[Requirement]:
    """Yield the requirements of a file, without options, to explain a failure."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield without_url(Requirement(line.partition(" #")[0].strip()))
        except InvalidRequirement:
            continue
