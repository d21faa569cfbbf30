"""The wheelhouse: a flat directory of wheels from which requirements install offline.

Beside the wheels lie ``pylock.toml`` (PEP 751) of the latest request and ``wheelmount.json``, the
manifest of all requests. Requests are resolved one by one and not together: a cluster's wheelhouse
serves jobs that would conflict with each other, and one lock can't hold two versions of a package
or two targets. Wheels of earlier requests stay. What must go into one environment is to be asked
for at once.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from wheelmount.errors import SourceError, WheelError
from wheelmount.progress import SILENT, Progress
from wheelmount.wheels.compiler import Failure, compile_requirements
from wheelmount.wheels.download import DownloadReport, download, hash_file, locked
from wheelmount.wheels.install import clean_environment
from wheelmount.wheels.lockfile import LOCK_NAME, chosen_wheels, parse_lock
from wheelmount.wheels.manifest import Manifest, Request
from wheelmount.wheels.missing import find_missing, fitting
from wheelmount.wheels.requirements import existing_files, parse_requirements, without_url
from wheelmount.wheels.resolve import resolve
from wheelmount.wheels.target import Target


@dataclass(frozen=True, slots=True)
class _Question:
    """What one offline resolution has to prove.

    Requirements that stand in a file only are known by ``pins``, which also tie the proof to the
    versions that were locked.
    """

    requirements: tuple[Requirement, ...]
    files: tuple[Path, ...]
    pins: tuple[Requirement, ...]
    target: Target


class Wheelhouse:
    """A directory of wheels. Making the object touches nothing.

    Args:
        directory: where the wheels are, or will be.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(
        self,
        requirements: Sequence[str],
        *,
        files: Sequence[Path] = (),
        target: Target,
        progress: Progress = SILENT,
        jobs: int = 8,
    ) -> DownloadReport:
        """Resolve requirements and bring their wheels in.

        The lock and the manifest change only once every wheel is there.

        Args:
            requirements: PEP 508 requirements.
            files: files of requirements.
            target: what to resolve for.
            progress: told of two steps, ``resolve`` and ``download``.
            jobs: wheels fetched at the same time.

        Raises:
            WheelmountError: whatever ``resolve`` and ``download`` raise.
        """
        with locked(self.directory, progress):
            pass  # make the directory, or say that it can't be used, before seconds of resolving
        # "pending" lies beside the final name because relative paths in a lock count from there.
        pending = self.directory / f"pylock.{uuid.uuid4().hex}.toml"
        try:
            lock = resolve(
                requirements, target=target, files=files, output=pending, progress=progress
            )
            report = download(lock, self.directory, target=target, progress=progress, jobs=jobs)
            request = Request(
                requirements=tuple(requirements),
                files=tuple(str(file.absolute()) for file in files),
                python_version=target.python_version,
                platform=target.platform,
                pins=tuple(wheel.pin for wheel in chosen_wheels(lock, target)),
            )
            with locked(self.directory, progress):
                manifest = Manifest.read(self.directory)
                manifest.remember(request)
                pending.replace(self.directory / LOCK_NAME)
                manifest.write(self.directory)
        finally:
            pending.unlink(missing_ok=True)
        return report

    def check(
        self,
        requirements: Sequence[str] = (),
        *,
        files: Sequence[Path] = (),
        target: Target | None = None,
        progress: Progress = SILENT,
    ) -> None:
        """Prove offline that requirements install from this directory alone.

        Every wheel they come to is read in full and compared with the hashes of ``pylock.toml``
        and the manifest; a wheel that neither knows was put there by hand and has none to compare.

        Args:
            requirements: PEP 508 requirements; a URL in one is left out, since hosts ask by name.
            files: files of requirements. With neither, every request of the manifest is checked.
            target: what they shall install on; default each request's own, or this machine.
            progress: told of the one step, ``check``.

        Raises:
            WheelError: what is missing and who wants it, or which wheels are damaged.
            SourceError: there is no such directory, or no file of requirements.
            InputError: a requirement that can't be parsed.
        """
        if not self.directory.is_dir():
            raise SourceError(
                f"{self.directory} is not a directory", hint="run wheelmount download first"
            )
        manifest = Manifest.read(self.directory)
        if requirements or files:
            named = tuple(without_url(one) for one in parse_requirements(requirements))
            paths = tuple(existing_files(files))
            questions = [_Question(named, paths, (), target or Target.here())]
        else:
            questions = [_question(request, target) for request in manifest.requests]
        if not questions:
            raise WheelError(
                f"{self.directory} does not say what it is to hold",
                hint="name requirements, or fill it with wheelmount download",
            )
        recorded = self._recorded(manifest)
        with progress.task("check", unit="requests") as task:
            task.total(len(questions))
            for question in questions:
                self._prove(question, recorded)
                task.advance(1)

    def wheels(self) -> list[Path]:
        """The wheels, sorted by name; none where the directory does not exist."""
        return sorted(self.directory.glob("*.whl"))

    def size(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.stat().st_size for wheel in self.wheels())

    def _recorded(self, manifest: Manifest) -> dict[str, set[str]]:
        """The hashes that a wheel of this name may have: all of them must agree."""
        recorded = {name: {entry.sha256} for name, entry in manifest.wheels.items()}
        file = self.directory / LOCK_NAME
        if file.is_file():
            lock = parse_lock(file.read_text(encoding="utf-8", errors="replace"), str(file))
            for package in lock.packages:
                for wheel in package.wheels or ():
                    if "sha256" in wheel.hashes:
                        recorded.setdefault(wheel.filename, set()).add(wheel.hashes["sha256"])
        return recorded

    def _prove(self, question: _Question, recorded: dict[str, set[str]]) -> None:
        # Without the cache: a proof reads the bytes that are there, and leaves nothing behind. No
        # lock either: for its hashes uv would unpack every wheel, ten times as long as hashing.
        options = ["--no-cache", "--no-index", "--offline", "--no-config", "--no-annotate"]
        answer = compile_requirements(
            [*question.requirements, *question.pins],
            question.files,
            question.target,
            [*options, "--find-links", str(self.directory.absolute())],
            clean_environment(os.environ),
        )
        if isinstance(answer, Failure):
            # A damaged wheel is reported as such, whatever uv made of it.
            _refuse_damaged(self.wheels(), recorded)
            raise self._why(question, answer)
        offered = fitting(self.wheels(), question.target)
        pins = [Requirement(line) for line in answer.splitlines()]
        _refuse_damaged(
            [
                wheel
                for pin in pins
                for version, wheel in offered.get(canonicalize_name(pin.name), [])
                if pin.specifier.contains(version, prereleases=True)
            ],
            recorded,
        )

    def _why(self, question: _Question, failure: Failure) -> WheelError:
        wheels = self.wheels()
        roots = [(one, "you") for one in question.requirements]
        roots += [(one, file.name) for file in question.files for one in _lines(file)]
        missing = find_missing(roots, wheels, question.target)
        pins = find_missing([(p, LOCK_NAME) for p in question.pins], wheels, question.target)
        named = {Requirement(one.requirement).name for one in missing}
        missing += [one for one in pins if Requirement(one.requirement).name not in named]
        if not missing:
            return WheelError(
                f"{self.directory} does not resolve for {question.target}: {failure.reason}",
                hint=failure.hint or "run wheelmount download with all of these requirements",
            )
        return WheelError(
            f"{self.directory} has no wheel for {question.target} of "
            + ", ".join(str(one) for one in missing),
            hint="run wheelmount download for this target",
        )


def _question(request: Request, target: Target | None) -> _Question:
    pins = tuple(Requirement(pin) for pin in request.pins)
    requirements = tuple(without_url(one) for one in parse_requirements(request.requirements))
    if target is None or target == request.target:
        return _Question(requirements, (), pins, request.target)
    # Another target may have other versions, so only what was asked for counts; of a file of
    # requirements, which may be gone by now, only the pins are left to ask for.
    return _Question(requirements, (), pins if request.files else (), target)


def _refuse_damaged(wheels: Iterable[Path], recorded: dict[str, set[str]]) -> None:
    known = [wheel for wheel in wheels if wheel.name in recorded]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = pool.map(hash_file, known)
    damaged = [
        wheel.name
        for wheel, sha256 in zip(known, hashes, strict=True)
        if recorded[wheel.name] != {sha256}
    ]
    if damaged:
        raise WheelError(
            f"damaged, not what the lock says: {', '.join(sorted(damaged))}",
            hint="remove them and run wheelmount download again",
        )


def _lines(file: Path) -> Iterable[Requirement]:
    """The plain requirements of a file, to explain a failure with; options are passed over."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield without_url(Requirement(line.partition(" #")[0].strip()))
        except InvalidRequirement:
            continue
