"""The proof that requirements install from one directory and nothing else.

uv resolves them with the directory as all there is; then every wheel that it chose is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from wheelmount.wheels.archive import find_faults, hash_file
from wheelmount.wheels.compiler import Failure, compile_requirements
from wheelmount.wheels.findings import Gap, Unsound
from wheelmount.wheels.install import clean_environment
from wheelmount.wheels.lockfile import LOCK_NAME
from wheelmount.wheels.missing import find_missing, fitting
from wheelmount.wheels.requirements import without_url
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Question:
    """What one offline resolution has to prove.

    Requirements that stand in a file only are known by ``pins``, which also tie the proof to the
    versions that were locked.
    """

    wanted: Wanted
    pins: tuple[Requirement, ...]
    target: Target


@dataclass(frozen=True, slots=True)
class Known:
    """What is remembered of a wheel.

    Attributes:
        hashes: SHA-256 it may have; all of them must agree.
        sound: whether the form of bytes with one of these hashes was looked into before.
        trusted: whether its RECORD may be wrong.
    """

    hashes: frozenset[str] = frozenset()
    sound: bool = False
    trusted: bool = False


def prove(question: Question, directory: Path) -> tuple[list[Path], Gap | None]:
    """Resolve a question from a directory alone.

    Returns:
        The wheels it comes to and nothing; or, where there is no solution, all wheels of the
        directory (a damaged one may be the reason) and what is missing.

    Raises:
        WaitError: uv took too long.
        UnavailableError: uv is not installed.
    """
    # Without the cache: a proof reads the bytes that are there, and leaves nothing behind. No
    # lock either: for its hashes uv would unpack every wheel, ten times as long as hashing.
    options = ["--no-cache", "--no-index", "--offline", "--no-config", "--no-annotate"]
    answer = compile_requirements(
        question.wanted.adding(question.pins),
        question.target,
        [*options, "--find-links", str(directory.absolute())],
        clean_environment(os.environ),
    )
    wheels = sorted(directory.glob("*.whl"))
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


def find_unsound(
    wheels: Iterable[Path], known: Mapping[str, Known], *, contents: bool
) -> list[Unsound]:
    """Read wheels, all processors at it; those that are damaged or other ones than known.

    Args:
        wheels: the files.
        known: what is remembered, by file name.
        contents: whether they are unpacked, too.
    """

    def examine(wheel: Path) -> Unsound | None:
        fault = _fault(wheel, known.get(wheel.name, Known()), contents=contents)
        return Unsound(wheel.name, fault) if fault else None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [found for found in pool.map(examine, wheels) if found]


def _fault(wheel: Path, known: Known, *, contents: bool) -> str:
    same = not known.hashes or known.hashes == {hash_file(wheel)}
    if same and known.sound and not contents:
        return ""
    if faults := find_faults(wheel, record=not known.trusted, contents=contents or not same):
        return faults[0]
    return "" if same else "another build than the one that was locked"


def _gap(question: Question, failure: Failure, wheels: list[Path]) -> Gap:
    roots = [(one, "you") for one in question.wanted.requirements]
    roots += [(one, file.name) for file in question.wanted.files for one in _lines(file)]
    missing = find_missing(roots, wheels, question.target)
    pins = find_missing([(p, LOCK_NAME) for p in question.pins], wheels, question.target)
    named = {Requirement(one.requirement).name for one in missing}
    missing += [one for one in pins if Requirement(one.requirement).name not in named]
    return Gap(question.target, tuple(missing), failure.reason, failure.hint)


def _lines(file: Path) -> Iterable[Requirement]:
    """The plain requirements of a file, to explain a failure with; options are passed over."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield without_url(Requirement(line.partition(" #")[0].strip()))
        except InvalidRequirement:
            continue
