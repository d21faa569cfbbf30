"""Read lock files (PEP 751, ``pylock.toml``), and select the wheels for one target."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.pylock import (
    Package,
    PackageArchive,
    PackageWheel,
    Pylock,
    PylockSelectError,
    PylockValidationError,
)
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from wheelmount import toml
from wheelmount.errors import ResolveError, WheelError
from wheelmount.wheels.target import Target

LOCK_NAME = "pylock.toml"

TOOL = "wheelmount"
"""Name of the table ``tool`` of a package, with what wheelmount adds to a lock."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel that a lock names.

    Attributes:
        filename: its checked file name, without a directory.
        package: normalized name of its package.
        version: the version in the lock.
        source: ``https://``, ``http://`` or ``file://`` URL, or a path relative to the lock.
        sha256: lower-case hexadecimal.
        pinned: hashes ``ALGORITHM:HEX`` to which requirements pin it, of which one must match;
            empty if it is not pinned.
        index: URL of its index, if the lock has one.
        size: bytes; 0 if the lock does not tell.
        yanked: reason why the index yanked it (PEP 592), maybe empty; None if it did not.
    """

    filename: str
    package: str
    version: str
    source: str
    sha256: str
    pinned: tuple[str, ...] = ()
    index: str = ""
    size: int = 0
    yanked: str | None = None

    @property
    def pin(self) -> str:
        """Return the requirement of exactly this version."""
        return f"{self.package}=={self.version}"


def parse_lock(text: str, where: str = LOCK_NAME) -> Pylock:
    """Read the text of a lock file.

    Raises:
        WheelError: the text is not a lock; the message names ``where`` it is from.
    """
    try:
        lock = Pylock.from_dict(toml.loads(text))
        for package in lock.packages:
            sources = (*(package.wheels or ()), package.sdist, package.archive, package.vcs)
            for url in (package.index, *(source.url for source in sources if source)):
                urlsplit(url or "")
        return lock
    except (ValueError, PylockValidationError) as error:  # of TOML and of URLs
        raise WheelError(
            f"{where} is not a lock file: {error}", hint="run wheelmount download again"
        ) from None


def chosen_wheels(lock: Pylock, target: Target) -> list[Wheel]:
    """Return for each package the wheel that installs on a target, in the lock's order.

    Raises:
        ResolveError: a package has no wheel for the target.
        WheelError: a wheel has an invalid name or no hash.
    """
    return [_wheel(package, source, target) for package, source in selected(lock, target)]


def selected(lock: Pylock, target: Target) -> list[tuple[Package, object]]:
    """Return each package that a lock has for a target, with the file that installs there.

    Raises:
        ResolveError: a package has no such file.
    """
    try:
        return list(lock.select(environment=target.environment(), tags=target.tags()))
    except (PylockSelectError, UndefinedComparison, UndefinedEnvironmentName) as error:
        raise ResolveError(
            f"the lock does not fit {target}: {error}", hint="resolve again for this target"
        ) from None


def wheel_name(source: object) -> str:
    """Return the file name of a wheel in a lock; empty if the entry is not a wheel."""
    if isinstance(source, PackageWheel):
        return source.filename
    if isinstance(source, PackageArchive):  # a requirement of the form NAME @ URL
        name = unquote(urlsplit(source.url or source.path or "").path.rpartition("/")[2])
        return name if name.endswith(".whl") else ""
    return ""


def _wheel(package: Package, source: object, target: Target) -> Wheel:
    filename = wheel_name(source)
    if not isinstance(source, PackageWheel | PackageArchive) or not filename:
        raise ResolveError(
            f"no wheel of {package.name} for {target}: only a source distribution exists",
            hint=f"build one on this machine: --build {package.name}",
        )
    version = _check_name(filename, package)
    sha256 = source.hashes.get("sha256", "").lower()
    if len(sha256) != 64:
        raise WheelError(
            f"the lock has no sha256 of {filename}", hint="resolve again, or use another index"
        )
    location = source.url or source.path or ""
    return _make(package, filename, version, location, sha256, source.size)


def chosen_source(package: Package) -> Wheel:
    """Return the source distribution of a package that was locked without wheels, as a ``Wheel``.

    Raises:
        WheelError: there is none with a hash and a valid name.
    """
    source = package.sdist or package.archive
    location = (source.url or source.path or "") if source else ""
    filename = unquote(urlsplit(location).path.rpartition("/")[2])
    sha256 = source.hashes.get("sha256", "").lower() if source else ""
    if not source or len(sha256) != 64 or any(c in filename for c in "/\\\0\n"):
        raise WheelError(
            f"no source distribution of {package.name} with a sha256", hint="use another index"
        )
    version = str(package.version or "")
    return _make(package, filename, version, location, sha256, source.size)


def _make(
    package: Package, filename: str, version: str, location: str, sha256: str, size: int | None
) -> Wheel:
    table = (package.tool or {}).get(TOOL)
    table = table if isinstance(table, dict) else {}
    return Wheel(
        filename,
        package.name,
        version,
        location,
        sha256,
        pinned=tuple(map(str, table.get("pinned", ()))),
        index=package.index or "",
        size=size or 0,
        yanked=table.get("yanked"),
    )


def _check_name(filename: str, package: Package) -> str:
    """Refuse names that would leave the directory or belong to another package."""
    if any(character in filename for character in "/\\\0\n"):
        raise WheelError(f"{filename!r} is not a file name", hint="do not trust this index")
    try:
        name, version, _, _ = parse_wheel_filename(filename)
    except InvalidWheelFilename as error:
        raise WheelError(f"the lock names a bad wheel: {error}", hint="resolve again") from None
    if name != package.name or (package.version is not None and version != package.version):
        raise WheelError(
            f"{filename} is not a wheel of {package.name} {package.version or ''}".rstrip(),
            hint="do not trust this index",
        )
    return str(package.version or version)
