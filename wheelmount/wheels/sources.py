"""Build the sources in a lock on this machine, and put their wheels into the lock.

Given locks and files of requirements may name repositories, projects and archives, which only the
resolved lock lists completely.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from packaging.pylock import (
    Package,
    PackageDirectory,
    PackageSdist,
    PackageVcs,
    PackageWheel,
    Pylock,
)
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from wheelmount.errors import ResolveError, SourceError
from wheelmount.progress import SILENT, Progress
from wheelmount.urls import public
from wheelmount.wheels.archive import hash_file
from wheelmount.wheels.build import bring, build, clone, keep
from wheelmount.wheels.given import is_fetched
from wheelmount.wheels.lockfile import chosen_source, chosen_wheels, selected, wheel_name
from wheelmount.wheels.scratch import scratch
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import UV_LOCK_NAME, Wanted


@dataclass(frozen=True, slots=True)
class BuiltLock:
    """The result of building the sources of a lock.

    Attributes:
        lock: the lock, with wheels in place of sources.
        origins: URL or path of the source of each built wheel, by file name, without credentials.
    """

    lock: Pylock
    origins: dict[str, str]

    def text(self) -> str:
        """Return the text of the lock without credentials."""
        return tomli_w.dumps(public(dict(self.lock.to_dict())))


def build_locked(
    lock: Pylock,
    wanted: Wanted,
    target: Target,
    directory: Path,
    folder: Path,
    progress: Progress = SILENT,
    own: Container[Path] = (),
) -> BuiltLock:
    """Build the sources of a lock for a target.

    Repositories, projects and archives are built, since they were named; source distributions of
    the index only where ``wanted.builds`` names them.

    Args:
        lock: the resolved or given lock.
        wanted: the requirements.
        target: the target that the wheels must fit.
        directory: directory that relative paths of a resolved lock start at.
        folder: a private directory for the wheels.
        progress: informed of the one step, ``build``, if it is needed.
        own: directories whose code is the user's, besides those of a lock that the user gave.

    Raises:
        ResolveError: a source does not build, or not for the target, or builds another package or
            version; or a source distribution of the index may not be built.
        SourceError: a source cannot be fetched.
        UnavailableError: git or uv is not installed.
        WheelError: a built wheel is not sound.
    """
    allowed = {canonicalize_name(one.name) for one in wanted.builds}
    todo = [
        package
        for package, source in selected(lock, target)
        if not wheel_name(source)
        and (not isinstance(source, PackageSdist) or package.name in allowed)
    ]
    if not todo:
        return BuiltLock(lock, {})
    whole = [package for package in lock.packages if package not in todo]
    chosen_wheels(dataclasses.replace(lock, packages=whole), target)  # fail before anything is made
    base = directory.absolute()
    if wanted.lock:  # paths that uv prints start at its working directory
        base = Path.cwd() if wanted.lock.name == UV_LOCK_NAME else wanted.lock.parent
    origins: dict[str, str] = {}
    made: dict[int, Package] = {}
    with progress.task("build", unit="wheel") as task, scratch() as place:
        task.total(len(todo))
        for number, package in enumerate(todo):
            inner = place / str(number)
            inner.mkdir()
            source, origin = _bring(package, base, inner, wanted)
            named = source in own or (wanted.lock is not None and not is_fetched(wanted.lock))
            plain = (package.directory is not None and named) or not wanted.confined
            fresh = build(source, origin, target, inner / "wheels", progress, own=plain)
            made[id(package)] = _as_wheel(package, fresh)
            wheel = keep(fresh, folder)
            origins[wheel.name] = origin
            task.advance(1)
        task.note(", ".join(origins))
    packages = [made.get(id(package), package) for package in lock.packages]
    return BuiltLock(dataclasses.replace(lock, packages=packages), origins)


def _bring(package: Package, base: Path, folder: Path, wanted: Wanted) -> tuple[Path, str]:
    """Return the directory or source distribution to build, and its origin."""
    if isinstance(package.vcs, PackageVcs):
        if package.vcs.type != "git":
            raise SourceError(
                f"{package.name} is in a repository of {package.vcs.type}",
                hint="build its wheel, and give that by its path",
            )
        address = package.vcs.url or (base / (package.vcs.path or "")).resolve().as_uri()
        inside = f"#subdirectory={package.vcs.subdirectory}" if package.vcs.subdirectory else ""
        return clone(f"git+{address}@{package.vcs.commit_id}{inside}", folder / "repository")
    if isinstance(package.directory, PackageDirectory):
        path = (base / package.directory.path / (package.directory.subdirectory or "")).resolve()
        return path, path.as_uri()
    source = chosen_source(package)
    if "://" not in source.source:
        source = dataclasses.replace(source, source=(base / source.source).resolve().as_uri())
    return bring(source, folder, wanted.plain_files)


def _as_wheel(package: Package, wheel: Path) -> Package:
    name, version, _, _ = parse_wheel_filename(wheel.name)
    # The commit and the directory say what is built; a version made of the former may be worded
    # otherwise in another clone.
    expected = None if package.vcs or package.directory else package.version
    if name != package.name or expected not in (None, version, Version(version.public)):
        raise ResolveError(
            f"{package.name} {package.version or ''}".rstrip() + f" builds {wheel.name}",
            hint="do not trust its source, or lock it again",
        )
    digests = {"sha256": hash_file(wheel)}
    return Package(
        name=package.name,
        version=version,
        marker=package.marker,
        requires_python=package.requires_python,
        dependencies=package.dependencies,
        wheels=[PackageWheel(name=wheel.name, path=wheel.name, hashes=digests)],
    )
