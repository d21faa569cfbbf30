"""Compare hashes that requirements pin with the chosen files.

uv ignores them when it resolves for another machine. pip and uv refuse to install a file with
another hash, so a wheelhouse does not accept it either.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl

from packaging.pylock import Package, PackageArchive, PackageSdist, PackageWheel, Pylock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from wheelmount.errors import InputError, WheelError
from wheelmount.wheels import uvsettings
from wheelmount.wheels.lockfile import TOOL, selected, wheel_name
from wheelmount.wheels.reqfile import Line, name_of, read_lines
from wheelmount.wheels.requirements import applies, split_url
from wheelmount.wheels.target import Target
from wheelmount.wheels.uvsettings import PROJECT_NAME
from wheelmount.wheels.wanted import Wanted

ALGORITHMS = ("sha256", "sha384", "sha512")
"""Hash algorithms for pins: those that pip accepts."""

_REQUIRE = ("PIP_REQUIRE_HASHES", "UV_REQUIRE_HASHES")


@dataclass(frozen=True, slots=True)
class Pins:
    """Hashes by package, for one target.

    Attributes:
        hashes: by normalized name, ``ALGORITHM:HEX`` of each file that may be used.
        exact: names of packages that are also tied to one version, or to a URL.
        required: whether every package must be pinned.
    """

    hashes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    required: bool = False

    @classmethod
    def of(cls, wanted: Wanted, target: Target) -> Pins:
        """Return the pins of requirements, and of files of requirements, on a target.

        Raises:
            InputError: a hash has an unknown algorithm, or no package; a URL is none, or a marker
                has no meaning.
        """
        if wanted.lock:
            return cls()  # a lock has a hash of every file, which is always compared
        required = wanted.require_hashes or required_by_environment()
        found: dict[str, frozenset[str]] = {}
        exact: set[str] = set()
        for line in _lines(wanted):
            if line.option:
                required = required or line.option == "--require-hashes"
                continue
            one = line.requirement()
            if one and not applies(one, target):
                continue
            hashes = line.hashes | _of_url(one.url if one else None) | _of_url(line.text)
            if one and (one.url or _is_exact(one)):
                exact.add(canonicalize_name(one.name))
            if not hashes:
                continue
            name = name_of(line)
            if unknown := {h for h in hashes if h.partition(":")[0] not in ALGORITHMS}:
                raise InputError(
                    f"{line.file} pins {name} by {min(unknown).partition(':')[0]}",
                    hint=f"pin it by {', '.join(ALGORITHMS)}",
                )
            # Hashes of two lines for one package both count, as with pip.
            found[name] = found[name] & hashes if name in found else hashes
        return cls(found, frozenset(exact), required)

    @classmethod
    def of_lock(cls, lock: Pylock, target: Target) -> Pins:
        """Return the hashes that a lock has of the wheels for a target."""
        found: dict[str, frozenset[str]] = {}
        for package, source in selected(lock, target):
            if wheel_name(source):
                files = [one.hashes for one in package.wheels or ()]
                files += [package.archive.hashes] if package.archive else []
                found[package.name] = frozenset().union(*map(as_texts, files))
        return cls(found)

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> Pins:
        """Make pins of the result of ``texts``."""
        found: dict[str, frozenset[str]] = {}
        for text in texts:
            name, _, one = text.partition(" ")
            found[name] = found.get(name, frozenset()) | {one}
        return cls(found)

    def texts(self) -> tuple[str, ...]:
        """Return ``NAME ALGORITHM:HEX`` of each hash."""
        return tuple(
            f"{name} {one}" for name in sorted(self.hashes) for one in sorted(self.hashes[name])
        )

    def apply(self, lock: Pylock, target: Target, built: Collection[str] = ()) -> Pylock:
        """Return a lock with only the files that the pins allow.

        Args:
            lock: the resolved lock.
            target: the target of the lock.
            built: names of packages that were built on this machine, and already compared.

        Raises:
            WheelError: files of the target are pinned to other hashes, or are not pinned although
                they must be; the message names all of them.
        """
        if not self.hashes and not self.required:
            return lock
        chosen = {package.name for package, _ in selected(lock, target)} - set(built)
        if self.required:
            self._refuse_open(lock, chosen)
        packages = []
        for package in lock.packages:
            allowed = self.hashes.get(package.name) if package.name in chosen else None
            packages.append(_narrow(package, allowed) if allowed is not None else package)
        return dataclasses.replace(lock, packages=packages)

    def _refuse_open(self, lock: Pylock, chosen: Collection[str]) -> None:
        by_name = {str(package.name): package for package in lock.packages}
        lines = [
            f"{name}=={by_name[name].version} "
            + ("is not pinned by a hash" if name in self.exact else "is not pinned")
            for name in sorted(chosen)
            if not self.hashes.get(name) or name not in self.exact
        ]
        if lines:
            raise WheelError(
                f"hashes are required, and {'; '.join(lines)}",
                hint="pin each to one version and a hash: uv pip compile --generate-hashes",
            )

    def refuse_other(self, package: str, hashes: Mapping[str, str], filename: str) -> None:
        """Compare the hashes of one file.

        Raises:
            WheelError: the package is pinned to other hashes.
        """
        allowed = self.hashes.get(package)
        if allowed is not None and not allowed & as_texts(hashes) and _comparable(allowed, hashes):
            raise _other(filename, hashes, allowed)


def required_by_environment() -> bool:
    """Return whether a variable of uv or pip says that every package must be pinned."""
    words = {os.environ.get(name, "0").lower() for name in _REQUIRE}
    return not words.isdisjoint(("1", "true", "yes", "on"))


def as_texts(hashes: Mapping[str, str]) -> frozenset[str]:
    """Return hashes by algorithm as ``ALGORITHM:HEX``."""
    return frozenset(f"{name}:{value}".lower() for name, value in hashes.items())


def overrides(wanted: Wanted) -> list[Line]:
    """Return the lines that replace all other requirements of the same packages.

    They are in files and in uv's configuration, which does not count for a lock.
    """
    lines = [line for line in read_lines(wanted.override_files) if not line.option]
    texts = [] if wanted.lock else uvsettings.overrides()
    return lines + [Line(Path("override-dependencies"), "", text) for text in texts]


def names_of(lines: Iterable[Line]) -> set[str]:
    """Return the normalized names of packages that lines name."""
    return {canonicalize_name(one.name) for line in lines if (one := line.requirement())}


def _lines(wanted: Wanted) -> Iterator[Line]:
    over = overrides(wanted)
    replaced = names_of(over)
    lines = [Line(Path("the command line"), "", str(one)) for one in wanted.requirements]
    lines += [Line(Path(PROJECT_NAME), "", str(one)) for one in wanted.of_projects()]
    for line in (*lines, *read_lines(wanted.plain_files)):
        if line.option or not names_of([line]) & replaced:
            yield line
    yield from over


def _is_exact(one: Requirement) -> bool:
    return any(s.operator in ("==", "===") and "*" not in s.version for s in one.specifier)


def _of_url(url: str | None) -> frozenset[str]:
    """Return the hashes in the fragment of a URL."""
    pairs = parse_qsl(split_url(url).fragment) if url and "://" in url else []
    return frozenset(f"{name}:{value}".lower() for name, value in pairs if name in ALGORITHMS)


def _narrow(package: Package, allowed: frozenset[str]) -> Package:
    """Return a package with only the files that have an allowed hash."""
    files: list[PackageWheel | PackageSdist | PackageArchive] = [*(package.wheels or ())]
    files += [one for one in (package.sdist, package.archive) if one is not None]
    kept = [
        one
        for one in files
        if allowed & as_texts(one.hashes) or not _comparable(allowed, one.hashes)
    ]
    if not kept:
        raise _other(f"{package.name} {package.version or ''}".strip(), {}, allowed)
    tool = {**(package.tool or {}), TOOL: {"pinned": sorted(allowed)}}
    return dataclasses.replace(
        package,
        wheels=[one for one in package.wheels or () if one in kept] or None,
        sdist=package.sdist if package.sdist in kept else None,
        archive=package.archive if package.archive in kept else None,
        tool=tool,
    )


def _comparable(allowed: Iterable[str], hashes: Mapping[str, str]) -> bool:
    """Return whether an algorithm was pinned; if not, the file must be hashed."""
    return any(one.partition(":")[0] in hashes for one in allowed)


def _other(subject: str, hashes: Mapping[str, str], allowed: frozenset[str]) -> WheelError:
    has = f" has {', '.join(sorted(as_texts(hashes)))}, and" if hashes else " has no file of"
    pinned = ", ".join(sorted(allowed)) or "hashes that contradict each other"
    return WheelError(
        f"{subject}{has} {'the requirements pin ' if hashes else ''}{pinned}",
        hint="do not trust this index, or pin the version again: uv pip compile --generate-hashes",
    )
