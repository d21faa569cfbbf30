"""The wheelhouse: a flat directory of wheels from which requirements install offline.

Beside the wheels lie ``pylock.toml`` (PEP 751) of the latest request and ``wheelmount.json``, the
manifest of all requests. Requests are resolved one by one and not together: a cluster's wheelhouse
serves jobs that would conflict with each other, and one lock can't hold two versions of a package
or two targets. Wheels of earlier requests stay. What must go into one environment is to be asked
for at once.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

from wheelmount.errors import SourceError, WheelError
from wheelmount.progress import SILENT, Progress
from wheelmount.wheels.download import DownloadReport, download, locked
from wheelmount.wheels.findings import Findings
from wheelmount.wheels.lockfile import LOCK_NAME, chosen_wheels, parse_lock
from wheelmount.wheels.manifest import Manifest, Request
from wheelmount.wheels.proof import Known, Question, find_unsound, prove
from wheelmount.wheels.requirements import existing_files, parse_requirements, without_url
from wheelmount.wheels.resolve import resolve
from wheelmount.wheels.simple import write_index
from wheelmount.wheels.target import Target


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
        trusted: Sequence[str] = (),
    ) -> DownloadReport:
        """Resolve requirements and bring their wheels in.

        The lock and the manifest change only once every wheel is there.

        Args:
            requirements: PEP 508 requirements.
            files: files of requirements.
            target: what to resolve for.
            progress: told of two steps, ``resolve`` and ``download``.
            jobs: wheels fetched at the same time.
            trusted: packages whose wheels may have a wrong RECORD, from now on.

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
            report = download(
                lock, self.directory, target=target, progress=progress, jobs=jobs, trusted=trusted
            )
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
                write_index(self.directory, manifest.wheels)
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
    ) -> Findings:
        """Find out offline whether requirements install from this directory alone.

        Every wheel they come to is read in full: its hash is compared with those of ``pylock.toml``
        and the manifest (a wheel that neither knows was put there by hand and has none), and its
        contents with what it says of itself, unless a download did so with the same bytes. Without
        requirements that is every wheel of the directory.

        Args:
            requirements: PEP 508 requirements; a URL in one is left out, since hosts ask by name.
            files: files of requirements. With neither, every request of the manifest is checked.
            target: what they shall install on; default each request's own, or this machine.
            progress: told of the one step, ``check``.

        Returns:
            What was found; ``raise_if_any`` makes an error of it.

        Raises:
            WheelError: the manifest or the lock can't be understood, or there is nothing to prove.
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
            questions = [Question(named, paths, (), target or Target.here())]
            wheels: set[Path] = set()
        else:
            questions = [_question(request, target) for request in manifest.requests]
            wheels = set(self.wheels())
        if not questions:
            raise WheelError(
                f"{self.directory} does not say what it is to hold",
                hint="name requirements, or fill it with wheelmount download",
            )
        gaps = []
        with progress.task("check", unit="requests") as task:
            task.total(len(questions))
            for question in questions:
                chosen, gap = prove(question, self.directory)
                wheels.update(chosen)
                gaps += [gap] if gap else []
                task.advance(1)
            unsound = find_unsound(sorted(wheels), self._known(manifest))
        return Findings(
            directory=self.directory,
            requests=len(questions),
            wheels=tuple(sorted(wheel.name for wheel in wheels)),
            size=sum(wheel.stat().st_size for wheel in wheels),
            unsound=tuple(unsound),
            gaps=tuple(dict.fromkeys(gaps)),
        )

    def wheels(self) -> list[Path]:
        """The wheels, sorted by name; none where the directory does not exist."""
        return sorted(self.directory.glob("*.whl"))

    def size(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.stat().st_size for wheel in self.wheels())

    def _known(self, manifest: Manifest) -> dict[str, Known]:
        """What is remembered of each wheel."""
        hashes = {name: {entry.sha256} for name, entry in manifest.wheels.items()}
        file = self.directory / LOCK_NAME
        if file.is_file():
            lock = parse_lock(file.read_text(encoding="utf-8", errors="replace"), str(file))
            for package in lock.packages:
                for wheel in package.wheels or ():
                    if "sha256" in wheel.hashes:
                        hashes.setdefault(wheel.filename, set()).add(wheel.hashes["sha256"])
        sound = {name for name, entry in manifest.wheels.items() if entry.sound}
        return {name: Known(frozenset(found), name in sound) for name, found in hashes.items()}


def _question(request: Request, target: Target | None) -> Question:
    pins = tuple(Requirement(pin) for pin in request.pins)
    requirements = tuple(without_url(one) for one in parse_requirements(request.requirements))
    if target is None or target == request.target:
        return Question(requirements, (), pins, request.target)
    # Another target may have other versions, so only what was asked for counts; of a file of
    # requirements, which may be gone by now, only the pins are left to ask for.
    return Question(requirements, (), pins if request.files else (), target)
