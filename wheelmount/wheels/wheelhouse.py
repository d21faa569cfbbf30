"""The wheelhouse: a flat directory of wheels from which requirements install offline.

Beside the wheels lie ``pylock.toml`` (PEP 751) of the latest resolution, ``wheelmount.json``, the
manifest of all requests, and ``simple/``, the index. Requests are resolved one by one and not
together: a cluster's wheelhouse serves jobs that would conflict with each other, and one lock can't
hold two versions of a package or two targets. Wheels of earlier requests stay. What must go into
one environment is to be asked for at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.pylock import Pylock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from wheelmount import disk
from wheelmount.errors import InputError, SourceError, WheelError
from wheelmount.progress import SILENT, Progress, number_of
from wheelmount.urls import public, without_credentials
from wheelmount.wheels.archive import find_clashes
from wheelmount.wheels.build import UNNAMED, build_missing, is_source, sources_of_files
from wheelmount.wheels.disk import disk_errors
from wheelmount.wheels.download import DownloadReport, fill, locked, pending
from wheelmount.wheels.findings import Findings, Unsound
from wheelmount.wheels.given import recorded
from wheelmount.wheels.lockfile import LOCK_NAME, chosen_wheels, parse_lock, selected
from wheelmount.wheels.manifest import Manifest, Request
from wheelmount.wheels.own import own_directories
from wheelmount.wheels.pins import Pins, names_of, overrides, required_by_environment
from wheelmount.wheels.pipproof import prove_with_pip
from wheelmount.wheels.proof import Known, Question, examine, find_unpinned, prove
from wheelmount.wheels.reqfile import rewrite
from wheelmount.wheels.requirements import applies, parse_requirements, without_url
from wheelmount.wheels.resolve import read_lock, resolve
from wheelmount.wheels.scratch import scratch
from wheelmount.wheels.simple import refuse_other, write_index
from wheelmount.wheels.sources import build_locked
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import NO_DEPS, PRE, Wanted


class Wheelhouse:
    """A directory of wheels. Making the object touches nothing.

    Args:
        directory: where the wheels are, or will be.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(
        self,
        wanted: Wanted,
        *,
        targets: Sequence[Target],
        progress: Progress = SILENT,
        jobs: int = 8,
        trusted: Sequence[str] = (),
        upgrade: bool = False,
        prune: bool = False,
    ) -> DownloadReport:
        """Resolve requirements for each target, and download their wheels.

        An earlier equal request is not resolved again if all its wheels exist. The manifest, which
        ``check`` proves, changes only when every wheel of a target has arrived.

        Args:
            wanted: the requirements.
            targets: the targets to resolve for, one after the other.
            progress: told of the steps of each target: ``build`` if there are sources,
                ``resolve`` and ``download``.
            jobs: number of wheels fetched at the same time.
            trusted: packages whose wheels may have a wrong RECORD, from now on.
            upgrade: resolve again in any case, to the newest versions.
            prune: remove wheels, and partial downloads, that no request needs any more.

        Returns:
            The result for all targets together.

        Raises:
            WheelmountError: ``build_missing``, ``resolve`` or ``download`` failed.
        """
        if jobs < 1:
            raise InputError(f"jobs is {jobs}", hint="give 1 or more")
        started = time.monotonic()
        wanted = wanted.with_settings()
        asked = [Request.of(wanted, target) for target in targets]
        try:
            with locked(self.directory, progress):  # or say that it can't be used before resolving
                manifest = Manifest.read(self.directory)
        except SourceError:
            # One that can't be written serves as it is, where nothing is to be written.
            manifest = Manifest.read(self.directory) if self.directory.is_dir() else Manifest()
            if upgrade or not all(manifest.answer(one, self.directory) for one in asked):
                raise
        doubted = not manifest.trusted.issuperset(map(canonicalize_name, trusted))
        reports = []
        for request in asked:
            answer = None if upgrade or doubted else manifest.answer(request, self.directory)
            if answer is not None:
                reports.append(self._kept(answer, manifest, progress))
            else:
                reports.append(self._fetch(wanted, request, progress, jobs, trusted))
        if prune:
            self.prune(progress)
        return DownloadReport.together(reports, time.monotonic() - started)

    def preview(
        self, wanted: Wanted, target: Target, progress: Progress = SILENT
    ) -> tuple[str, ...]:
        """Return the names of the wheels that ``add`` would choose; download and write nothing.

        Raises:
            InputError: a source would have to be built.
            WheelmountError: ``resolve`` failed.
        """
        wanted = wanted.with_settings()
        sources = [*filter(is_source, wanted.requirements), *sources_of_files(wanted)]
        repositories = any(applies(each, target) for each in wanted.repositories())
        if wanted.projects or wanted.builds or sources or repositories:
            raise InputError("what has to be built is not known before", hint="omit --dry-run")
        with scratch() as place:
            lock = resolve(wanted, target=target, output=place / LOCK_NAME, progress=progress)
        return tuple(wheel.filename for wheel in chosen_wheels(lock, target))

    def forget(self, wanted: Wanted, progress: Progress = SILENT) -> int:
        """Remove equal requests from the manifest, for all targets.

        Returns:
            The number of removed requests.

        Raises:
            InputError: there is no equal request; the hint names all requests.
        """
        wanted = wanted.with_settings()
        with locked(self.directory, progress):
            manifest = Manifest.read(self.directory)
            kept = [
                one
                for one in manifest.requests
                if not one.same_question(Request.of(wanted, one.target))
            ]
            gone = len(manifest.requests) - len(kept)
            if not gone:
                asked = {
                    " ".join((*(one.given or one.requirements), *one.files))
                    for one in manifest.requests
                }
                raise InputError(
                    f"{self.directory} has no request for just these requirements",
                    hint=f"it was for: {'; '.join(sorted(asked)) or 'nothing'}",
                )
            manifest.requests = kept
            manifest.write(self.directory)
        progress.log(f"forget: {number_of(gone, 'request')}")
        return gone

    def _kept(self, request: Request, manifest: Manifest, progress: Progress) -> DownloadReport:
        size = sum(manifest.wheels[name].size for name in request.wheels)
        progress.log(
            f"download: {number_of(len(request.wheels), 'wheel')}, {size / 1e6:.1f} MB for "
            f"{request.target} are there already"
        )
        file = request.file(manifest.wheels)
        if not (self.directory / file).is_file():  # of a version that wrote none
            with locked(self.directory, progress):
                Manifest.read(self.directory).write(self.directory)
        return DownloadReport(request.wheels, (), size, 0, 0.0, (file,), (request,))

    def _fetch(
        self,
        wanted: Wanted,
        request: Request,
        progress: Progress,
        jobs: int,
        trusted: Sequence[str],
    ) -> DownloadReport:
        from wheelmount.wheels.credentials import IndexAuth  # with httpx, which takes long to load

        target = request.target
        refuse_other(self.directory)  # before anything is fetched
        with (
            disk_errors(self.directory),
            scratch(self.directory) as place,
            _removed(pending(place)) as lock_file,
        ):
            hashes = Pins.of(wanted, target)
            copies, fresh = place / "files", place / "built"
            copies.mkdir()
            fresh.mkdir()
            built = build_missing(wanted, target, fresh, copies, progress, hashes)
            lock = resolve(
                built.wanted,
                target=target,
                output=lock_file,
                progress=progress,
                pins=hashes,
                built=fresh,
            )
            own = own_directories(wanted)
            sources = build_locked(lock, built.wanted, target, self.directory, fresh, progress, own)
            if sources.origins:
                lock = sources.lock
                disk.write(lock_file, sources.text())
            # Until the request is recorded, its wheels seem unneeded; the lock prevents a pruning,
            # and that another request replaces a wheel by one of the same name.
            with locked(self.directory, progress):
                auth = IndexAuth(files=wanted.plain_files)
                report = fill(lock, self.directory, target, progress, jobs, trusted, auth, fresh)
                manifest = Manifest.read(self.directory)
                origins = {
                    name: origin
                    for name, origin in public(built.origins | sources.origins).items()
                    if name in report.wheels
                }
                chosen = chosen_wheels(lock, target)
                pins = tuple(wheel.pin for wheel in chosen)
                by_name = {str(one.name) for one in lock.packages if one.archive}
                by_name |= names_of(overrides(wanted))
                asked = tuple(without_credentials(str(one)) for one in built.asked)
                answer = replace(
                    request,
                    requirements=asked,
                    pins=pins,
                    wheels=report.wheels,
                    hashes=tuple(wheel.sha256 for wheel in chosen),
                    pinned=hashes.texts(),
                    located=tuple(wheel.pin for wheel in chosen if wheel.package in by_name),
                    built=tuple(f"{name} {origin}" for name, origin in sorted(origins.items())),
                )
                manifest.remember(answer)
                manifest.built.update(origins)
                lock_file.replace(self.directory / LOCK_NAME)
                manifest.write(self.directory)
                write_index(self.directory, manifest.wheels)
        return replace(report, requests=(answer.file(manifest.wheels),), answers=(answer,))

    def prune(self, progress: Progress = SILENT) -> None:
        """Remove wheels, and partial downloads, that no request needs any more.

        Raises:
            WheelError: a request does not list its wheels.
        """
        with locked(self.directory, progress):
            self._prune(progress)

    def _prune(self, progress: Progress) -> None:
        manifest = Manifest.read(self.directory)
        needed = {name for request in manifest.requests for name in request.wheels}
        if unsure := [request for request in manifest.requests if not request.answered]:
            raise WheelError(
                f"{self.directory} does not say which wheels {unsure[0].requirements} came to",
                hint="run wheelmount download with these requirements again, then prune",
            )
        gone = [wheel for wheel in self.wheels() if wheel.name not in needed]
        size = sum(wheel.lstat().st_size for wheel in gone)
        for file in (*gone, *self.directory.glob("*.whl.part")):
            file.unlink()
            manifest.wheels.pop(file.name, None)
            manifest.built.pop(file.name, None)
        manifest.write(self.directory)
        write_index(self.directory, manifest.wheels)
        progress.log(f"prune: {number_of(len(gone), 'wheel')}, {size / 1e6:.1f} MB removed")

    def check(
        self,
        wanted: Wanted | None = None,
        *,
        targets: Sequence[Target] = (),
        contents: bool = False,
        pip: bool = False,
        progress: Progress = SILENT,
    ) -> Findings:
        """Check offline whether requirements can be installed from this directory alone.

        The hash of every chosen wheel is compared with those in ``pylock.toml`` and the manifest (a
        wheel that was added by hand has no hash there). Its contents are compared with its RECORD,
        unless that was done before for bytes with this hash. A file that was hashed before is not
        read again if its size, mtime and ctime are unchanged. Without requirements, every wheel of
        the directory is checked.

        Args:
            wanted: the requirements; URLs in them are ignored, because hosts ask by name. None for
                every request of the manifest.
            targets: targets to prove; default each request's own, or this machine.
            contents: whether to read and unpack all wheels, also those checked before.
            pip: whether pip must find everything by its own rules too, for this machine's Python.
            progress: told of the one step, ``check``.

        Returns:
            The findings; their ``raise_if_any`` raises an error for faults.

        Raises:
            WheelError: the manifest or a lock cannot be read, or there is nothing to prove.
            SourceError: the directory does not exist.
            InputError: a lock cannot be used.
            ResolveError: a lock does not fit a target.
        """
        if not self.directory.is_dir():
            raise SourceError(
                f"{self.directory} is not a directory", hint="run wheelmount download first"
            )
        manifest = Manifest.read(self.directory)
        wheels = set(self.wheels()) if wanted is None else set()
        gaps = []
        answers = []
        with progress.task("check", unit="request") as task, scratch() as copies:
            questions = (
                [
                    _ask_again(request, target, manifest)
                    for request in manifest.requests
                    for target in targets or [request.target]
                ]
                if wanted is None
                else [_ask(wanted, one, manifest, copies) for one in targets or [Target.here()]]
            )
            if not questions:
                raise WheelError(
                    f"{self.directory} does not say what it is to hold",
                    hint="name requirements, or fill it with wheelmount download",
                )
            task.total(len(questions))
            for question in questions:
                chosen, gap = prove(question, self.directory)
                wheels.update(chosen)
                answers.append((question, [] if gap else chosen))
                if pip and not gap:
                    gap = prove_with_pip(question, self.directory)
                gaps += [gap] if gap else []
                task.advance(1)
            known = self._known(manifest, wheels)
            examined = examine(sorted(wheels), known, contents=contents)
            unsound = [Unsound(name, one.fault) for name, one in examined.items() if one.fault]
            for question, chosen in answers:
                foreign = [wheel for wheel in chosen if wheel.name not in question.built]
                unsound += find_unpinned(question, foreign, examined)
                hashes = [(wheel.name, examined[wheel.name].sha256) for wheel in chosen]
                if contents or not manifest.has_together(hashes):
                    sound = [wheel for wheel in chosen if not examined[wheel.name].fault]
                    unsound += [Unsound(one.name, fault) for one, fault in find_clashes(sound)]
        return Findings(
            directory=self.directory,
            requests=len(questions),
            wheels=tuple(sorted(wheel.name for wheel in wheels)),
            size=sum(wheel.stat().st_size for wheel in wheels if wheel.is_file()),
            unsound=tuple(dict.fromkeys(unsound)),
            gaps=tuple(dict.fromkeys(gaps)),
        )

    def wheels(self) -> list[Path]:
        """Return the wheels, sorted by name; none if the directory does not exist."""
        return sorted(self.directory.glob("*.whl"))

    def size(self) -> int:
        """Return the size of all wheels together, bytes."""
        return sum(wheel.lstat().st_size for wheel in self.wheels())

    def _known(self, manifest: Manifest, wheels: Iterable[Path]) -> dict[str, Known]:
        """Return the recorded facts about each wheel."""
        hashes = {name: {entry.sha256} for name, entry in manifest.wheels.items()}
        file = self.directory / LOCK_NAME
        if file.is_file():
            lock = parse_lock(file.read_text(encoding="utf-8", errors="replace"), str(file))
            for package in lock.packages:
                for wheel in package.wheels or ():
                    if "sha256" in wheel.hashes:
                        hashes.setdefault(wheel.filename, set()).add(wheel.hashes["sha256"])
        return {
            wheel.name: Known(
                frozenset(hashes.get(wheel.name, ())),
                verified=wheel.name in manifest.wheels and manifest.wheels[wheel.name].verified,
                trusted=canonicalize_name(wheel.name.partition("-")[0]) in manifest.trusted,
                untouched=wheel.name in manifest.wheels
                and wheel.is_file()
                and manifest.wheels[wheel.name].untouched(wheel),
            )
            for wheel in wheels
        }


@contextlib.contextmanager
def _removed(file: Path) -> Iterator[Path]:
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def _ask(wanted: Wanted, target: Target, manifest: Manifest, copies: Path) -> Question:
    """Return the question for requirements, with built wheels in place of sources in files."""
    if wanted.lock:
        lock = read_lock(wanted.lock, wanted)
        pins = Pins.of_lock(lock, target)  # none of what is to be built
        return Question(Wanted(), _pins(lock, target), target, pins)
    built = {origin: parse_wheel_filename(name)[0] for name, origin in manifest.built.items()}
    for project in wanted.projects:
        if project.as_uri() not in built:
            raise WheelError(
                f"no wheel was built of {project}", hint=f"run wheelmount download {project}"
            )
    pins = Pins.of(wanted, target)
    exempt = _built_from(wanted, target, manifest)
    located = _located(wanted, target, manifest)
    of_files = _built_of_files(wanted, target, manifest)
    changes = {
        line: "" if one.name == UNNAMED else str(without_url(one))
        for line, one in sources_of_files(wanted).items()
    }
    if changes:
        wanted = wanted.with_files(lambda file: rewrite(file, changes, copies))
    named = (
        *(without_url(one) for one in wanted.requirements),
        *(of_files if changes else ()),
        *(Requirement(built[project.as_uri()]) for project in wanted.projects),
        *wanted.builds,
    )
    return Question(
        replace(
            wanted,
            requirements=named,
            projects=(),
            builds=(),
            flags=_proof_flags(wanted.flags),
            overrides=(*of_files, *located),
        ),
        (),
        target,
        pins,
        exempt,
    )


def _built_from(wanted: Wanted, target: Target, manifest: Manifest) -> set[str]:
    """Return the names of wheels that were built of sources that requirements name."""
    packages = {
        canonicalize_name(one.name)
        for one in (
            *filter(is_source, wanted.requirements),
            *sources_of_files(wanted).values(),
            *wanted.repositories(),
            *wanted.builds,
        )
        if applies(one, target)
    }
    origins = {project.as_uri() for project in wanted.projects}
    return {
        name
        for name, origin in manifest.built.items()
        if origin in origins or parse_wheel_filename(name)[0] in packages
    }


def _built_of_files(wanted: Wanted, target: Target, manifest: Manifest) -> tuple[Requirement, ...]:
    """Return requirements for the wheels that were built of sources in files."""
    files = tuple(map(recorded, wanted.files))
    answers = [one for one in manifest.requests if one.files == files and one.target == target]
    if not (files and answers):
        return ()
    noted = answers[-1].built
    built = manifest.built if noted is None else {one.partition(" ")[0] for one in noted}
    names = [parse_wheel_filename(wheel)[:2] for wheel in answers[-1].wheels if wheel in built]
    return tuple(Requirement(f"{name}=={version}") for name, version in names)


def _proof_flags(flags: Iterable[str]) -> tuple[str, ...]:
    """Return the flags that matter offline; wheels in a directory have no upload time."""
    return tuple(one for one in flags if one in (NO_DEPS, PRE))


def _located(wanted: Wanted, target: Target, manifest: Manifest) -> tuple[Requirement, ...]:
    """Return requirements by name for packages that an equal request got by URL or override."""
    with contextlib.suppress(SourceError):  # a file of the settings that is gone
        wanted = wanted.with_settings()
    asked = Request.of(wanted, target)
    answers = [one for one in manifest.requests if one.same_question(asked)]
    return tuple(parse_requirements(pin for one in answers for pin in one.located))


def _ask_again(request: Request, target: Target, manifest: Manifest) -> Question:
    pins = tuple(parse_requirements(request.pins))
    texts = (*request.requirements, *request.builds)
    named = tuple(without_url(one) for one in parse_requirements(texts))
    of_lock = Wanted(files=tuple(map(Path, request.files))).lock is not None  # which has hashes
    required = required_by_environment() and not of_lock
    hashes = replace(Pins.of_texts(request.pinned), required=required)
    if target == request.target:
        located = tuple(parse_requirements(request.located))
        asked = Wanted(named, overrides=located, flags=_proof_flags(request.flags))
        return Question(asked, pins, target, hashes, manifest.built_for(request))
    # Another target may have other versions, so only what was asked for counts; of a file of
    # requirements, which may be gone by now, only the pins are left to ask for.
    built = manifest.built_for(request)
    return Question(Wanted(named), pins if request.files else (), target, hashes, built)


def _pins(lock: Pylock, target: Target) -> tuple[Requirement, ...]:
    return tuple(
        Requirement(f"{package.name}=={package.version}" if package.version else package.name)
        for package, _ in selected(lock, target)
    )
