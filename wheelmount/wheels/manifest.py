"""The manifest of a wheelhouse: ``wheelmount.json`` beside the wheels.

::

    {"version": 1,
     "requests": [{"requirements": ["pandas"], "files": [], "python_version": "3.11",
                   "platform": "x86_64-manylinux_2_36", "digest": "…",
                   "pins": ["numpy==2.4.6", ...], "wheels": ["numpy-2.4.6-….whl", ...]}],
     "wheels": {"numpy-2.4.6-….whl": {"sha256": "…", "size": 16642781, "mtime_ns": 17…,
                                       "verified": true, "ctime_ns": 17…}},
     "trusted": [],
     "built": {"own-1.0-py3-none-any.whl": "git+https://…@8c12f7…"}}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

from wheelmount import disk, typed
from wheelmount.errors import InputError, WheelError
from wheelmount.owned import make_folders
from wheelmount.urls import public, without_credentials
from wheelmount.wheels.given import recorded
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted

MANIFEST_NAME = "wheelmount.json"

REQUESTS_NAME = "requests"
"""Directory with the result of each request, as files of requirements."""

RESULT = re.compile(r"[0-9a-f]{16}\.txt")
"""Names of the files in it. There may be others: the user can have a directory of that name."""

_VERSION = 1

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and its result.

    Attributes:
        requirements: in their original form, or, of what was built, names with the URLs of
            their sources.
        files: absolute paths of the files of requirements, for information: they may be gone.
        python_version: of the target.
        platform: of the target.
        pins: ``NAME==VERSION`` of every package locked, whether asked for in a string or a file.
        constraints: absolute paths of files of constraints, for information.
        extras: of the projects among the files.
        groups: of the same.
        builds: packages of the index that were to be built on this machine.
        flags: options of uv that changed the choice.
        digest: hash of everything that the result depends on, with the addresses of the indexes;
            empty if that is unknown: files that name others, packages that are built on this
            machine.
        wheels: names of the chosen wheels.
        hashes: SHA-256 of each of them; none in requests of old versions.
        given: requirements, and paths of projects, in their original form without credentials;
            None in requests of old versions.
        located: ``NAME==VERSION`` of packages that were chosen by URLs, in requirements or in the
            metadata of others, or by overrides; hosts have them by name.
        pinned: ``NAME ALGORITHM:HEX`` of each hash that the requirements pin a package to.
        built: ``WHEEL ORIGIN`` of each of its wheels that was built on this machine; None in
            requests of old versions.
    """

    requirements: tuple[str, ...]
    files: tuple[str, ...]
    python_version: str
    platform: str
    pins: tuple[str, ...]
    constraints: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    builds: tuple[str, ...] = ()
    digest: str = ""
    wheels: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    located: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    built: tuple[str, ...] | None = None
    hashes: tuple[str, ...] = ()
    given: tuple[str, ...] | None = None

    @classmethod
    def of(cls, wanted: Wanted, target: Target) -> Request:
        """Return the request for requirements, without a result."""
        requirements = tuple(without_credentials(str(one)) for one in wanted.requirements)
        return cls(
            requirements=requirements,
            files=tuple(map(recorded, wanted.files)),
            python_version=target.python_version,
            platform=target.platform,
            pins=(),
            constraints=tuple(map(recorded, wanted.constraints)),
            extras=wanted.extras,
            groups=wanted.groups,
            builds=tuple(map(str, wanted.builds)),
            digest=wanted.digest(),
            flags=(*wanted.flags, *(f"--overrides={recorded(f)}" for f in wanted.override_files)),
            built=(),
            given=(*requirements, *map(str, wanted.projects)),
        )

    @property
    def target(self) -> Target:
        """The target of the request."""
        return Target(self.python_version, self.platform)

    @property
    def answered(self) -> bool:
        """Whether the request lists its wheels, maybe none; requests of old versions do not."""
        return bool(self.wheels) or not self.pins

    def text(self, wheels: Mapping[str, Entry]) -> str:
        """Return the result as a file of requirements, with versions and hashes.

        pip and uv install it with ``--no-deps``, without resolving anything again.

        Args:
            wheels: what is known of each wheel.
        """
        names = [(parse_wheel_filename(one)[:2], wheels[one].sha256) for one in self.wheels]
        lines = (f"{name}=={version} --hash=sha256:{digest}\n" for (name, version), digest in names)
        words = (*self.requirements, *self.builds, *(f"-r {file}" for file in self.files))
        asked = " ".join(" ".join(words).split())  # on one line, whatever is recorded
        asked = asked.encode(errors="backslashreplace").decode()  # paths may be no UTF-8
        return "".join([f"# {asked} for {self.target}\n", *lines])

    def file(self, wheels: Mapping[str, Entry]) -> str:
        """Return the path in a wheelhouse of the file with ``text``."""
        digest = hashlib.sha256(self.text(wheels).encode()).hexdigest()[:16]
        return f"{REQUESTS_NAME}/{digest}.txt"

    def same_question(self, other: Request) -> bool:
        """Return whether another request is the same, whatever its result."""
        ignored = ["pins", "wheels", "hashes", "digest", "pinned", "located", "built"]
        ignored.append("given" if None in (self.given, other.given) else "requirements")
        blank: dict[str, Any] = dict.fromkeys(ignored, ())
        return dataclasses.replace(self, **blank) == dataclasses.replace(other, **blank)


@dataclass(frozen=True, slots=True)
class Entry:
    """The recorded facts about a wheel that was hashed.

    Attributes:
        sha256: lower-case hexadecimal.
        size: bytes.
        mtime_ns: mtime of the file when it was hashed, in nanoseconds.
        ctime_ns: its ctime then, which no program can set; 0 if unknown.
        verified: whether a wheel with this hash was unpacked and found sound.
        yanked: why the index yanked it (PEP 592), maybe empty; None if it did not.
    """

    sha256: str
    size: int
    mtime_ns: int
    verified: bool = False
    yanked: str | None = None
    ctime_ns: int = 0

    @classmethod
    def of(cls, file: Path, sha256: str, yanked: str | None = None) -> Entry:
        """Return the entry of a sound file whose hash is known."""
        found = file.stat()
        return cls(
            *(sha256, found.st_size, found.st_mtime_ns),
            verified=True,
            yanked=yanked,
            ctime_ns=found.st_ctime_ns,
        )

    def fits(self, file: Path) -> bool:
        """Return whether a file's size and mtime are those of when it was hashed."""
        found = file.stat()
        return (self.size, self.mtime_ns) == (found.st_size, found.st_mtime_ns)

    def untouched(self, file: Path) -> bool:
        """Return whether size, mtime and ctime are unchanged; a copy has another ctime."""
        return self.fits(file) and self.ctime_ns == file.stat().st_ctime_ns


@dataclass(slots=True)
class Manifest:
    """The content of the manifest; a process must hold the directory's lock to change it.

    Attributes:
        requests: all requests, the latest last.
        wheels: the recorded facts about each wheel, by file name.
        trusted: normalized names of packages whose wheels may have a wrong RECORD.
        built: where the wheels that were built on this machine are from, by file name.
    """

    requests: list[Request] = field(default_factory=list)
    wheels: dict[str, Entry] = field(default_factory=dict)
    trusted: set[str] = field(default_factory=set)
    built: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the directory's manifest; an empty one where there is none.

        Raises:
            WheelError: it cannot be read.
        """
        file = directory / MANIFEST_NAME
        try:
            data = typed.decode(file.read_bytes(), dict[str, Any])
            if data.get("version") != _VERSION:
                raise ValueError(f"version {data.get('version')}")
            found = typed.convert(data, cls)
            found.check()
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, InputError) as error:
            raise WheelError(
                f"{file} cannot be understood: {error}",
                hint="remove it and run wheelmount download again: wheels that are whole stay",
            ) from None
        return found

    def check(self) -> None:
        """Check names and hashes of wheels, and targets, of a manifest that was read.

        Raises:
            ValueError: the name of a wheel is invalid, or has a path; a hash is invalid.
            InputError: a target is invalid.
        """
        chosen = (one for request in self.requests for one in request.wheels)
        for name in {*self.wheels, *self.built, *chosen}:
            parse_wheel_filename(name)
            if "/" in name:
                raise ValueError(f"{name} is no file name")
        for name, entry in self.wheels.items():
            if not _SHA256.fullmatch(entry.sha256):
                raise ValueError(f"{name} has no hash, but {entry.sha256!r}")
        for target in {request.target for request in self.requests}:
            Target.parse(target.python_version, target.platform)

    def write(self, directory: Path) -> None:
        """Write the directory's manifest, whole or not at all."""
        data = {
            "version": _VERSION,
            "requests": [dataclasses.asdict(request) for request in self.requests],
            "wheels": {name: dataclasses.asdict(self.wheels[name]) for name in sorted(self.wheels)},
            "trusted": sorted(self.trusted),
            "built": dict(sorted(self.built.items())),
        }
        file = directory / MANIFEST_NAME
        disk.write(file, f"{json.dumps(public(data), indent=1)}\n".encode())
        self._write_requests(directory)

    def _write_requests(self, directory: Path) -> None:
        folder = directory / REQUESTS_NAME
        make_folders(folder)
        answered = [
            one for one in self.requests if one.answered and self.wheels.keys() >= {*one.wheels}
        ]
        texts = {directory / one.file(self.wheels): one.text(self.wheels) for one in answered}
        for old in set(folder.iterdir()) - texts.keys():
            if RESULT.fullmatch(old.name):
                old.unlink()
        for file, text in texts.items():
            if not file.is_file():
                disk.write(file, text.encode())

    def answer(self, asked: Request, directory: Path) -> Request | None:
        """Return an equal earlier request if all its wheels are still there, otherwise None.

        Wheels with other bytes, or that were built of other sources, are those of another request.
        """
        for request in self.requests:
            same = request.same_question(asked) and request.digest == asked.digest != ""
            if (
                same
                and request.answered
                and all(self.has(name, directory) for name in request.wheels)
                and request.hashes == tuple(self.wheels[name].sha256 for name in request.wheels)
                and len(self.built_for(request)) == len(request.built or ())
            ):
                return request
        return None

    def built_for(self, request: Request) -> set[str]:
        """Return the names of a request's wheels that were built for it, not for another one.

        Its pins are hashes of their sources. For a request of an old version, any built wheels.
        """
        if request.built is None:
            return self.built.keys() & {*request.wheels}
        texts = {f"{name} {origin}": name for name, origin in self.built.items()}
        return {texts[one] for one in request.built if one in texts}

    def has(self, name: str, directory: Path) -> bool:
        """Return whether a wheel exists and is unchanged since its check, by size and mtime."""
        entry, file = self.wheels.get(name), directory / name
        return bool(entry and entry.verified and file.is_file() and entry.fits(file))

    def has_together(self, wheels: Iterable[tuple[str, str]]) -> bool:
        """Return whether one request has all these wheels, so that they are known not to clash.

        Args:
            wheels: name and SHA-256 of each.
        """
        asked = set(wheels)
        return any(
            asked.issubset(zip(request.wheels, request.hashes, strict=False))
            for request in self.requests
        )

    def remember(self, request: Request) -> None:
        """Add a request; it replaces an equal earlier one."""
        self.requests = [kept for kept in self.requests if not kept.same_question(request)]
        self.requests.append(request)
