"""The user's requirements, as strings and in files, with constraints and options."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.pylock import is_valid_pylock_path
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, is_normalized_name

from wheelmount import toml
from wheelmount.errors import InputError, WheelError
from wheelmount.wheels import uvsettings
from wheelmount.wheels.lockfile import parse_lock
from wheelmount.wheels.reqfile import Line, expanded, read_lines
from wheelmount.wheels.requirements import existing_files, local_path, parse_requirements, wheel_at
from wheelmount.wheels.uvsettings import PROJECT_NAME

UV_LOCK_NAME = "uv.lock"

PRE, NO_DEPS = "--prerelease=allow", "--no-deps"
"""Options of uv, see ``Wanted.flags``."""

_OTHERS = ("-e", "--editable", "--requirement", "--constraint", "--find-links")
"""Options of a file that name other files, or projects on this machine."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Requirements of any kind, checked.

    Attributes:
        requirements: PEP 508 requirements.
        files: absolute paths of files of requirements: ``requirements.txt`` with its options,
            ``pyproject.toml``, or a lock (``uv.lock``, ``pylock.toml``), which stands alone.
        constraints: absolute paths of files of constraints.
        extras: normalized names of extras of each ``pyproject.toml`` or ``uv.lock``.
        groups: normalized names of dependency groups (PEP 735) of the same.
        projects: absolute paths of projects and source distributions to build.
        builds: packages whose source distributions in the index, or in a lock, are to be built.
        overrides: requirements that replace all others of their names.
        flags: options of uv that change the chosen versions: ``--prerelease=allow``, ``--no-deps``,
            ``--exclude-newer=…``.
        override_files: absolute paths of files of such requirements.
        confined: whether builds of foreign sources run in a sandbox.
        require_hashes: whether all packages must be pinned by hashes.
    """

    requirements: tuple[Requirement, ...] = ()
    files: tuple[Path, ...] = ()
    constraints: tuple[Path, ...] = ()
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    projects: tuple[Path, ...] = ()
    builds: tuple[Requirement, ...] = ()
    overrides: tuple[Requirement, ...] = ()
    require_hashes: bool = False
    confined: bool = True
    flags: tuple[str, ...] = ()
    override_files: tuple[Path, ...] = ()

    @classmethod
    def of(
        cls,
        requirements: Iterable[str] = (),
        files: Iterable[Path] = (),
        constraints: Iterable[Path] = (),
        extras: Sequence[str] = (),
        groups: Sequence[str] = (),
        builds: Iterable[str] = (),
        *,
        require_hashes: bool = False,
        confined: bool = True,
        flags: Sequence[str] = (),
        override_files: Iterable[Path] = (),
    ) -> Wanted:
        """Check requirements given by the user.

        Among requirements may be paths of wheels, projects and source distributions; they begin
        with ``.`` or ``/``.

        Raises:
            InputError: there are no requirements, one cannot be parsed, a lock is combined with
                others, or there are extras or groups without a project.
            SourceError: a file does not exist.
        """
        texts = [_named(text) for text in requirements]
        paths = [path for text in texts if (path := local_path(text))]
        named = [text for text in texts if not local_path(text)]
        wanted = cls(
            (*parse_requirements(named), *(wheel_at(p) for p in paths if p.suffix == ".whl")),
            tuple(existing_files(files)),
            tuple(existing_files(constraints, "-c")),
            _names(extras),
            _names(groups),
            tuple(path for path in paths if path.suffix != ".whl"),
            tuple(parse_requirements(builds)),
            require_hashes=require_hashes,
            confined=confined,
            flags=tuple(flags),
            override_files=tuple(existing_files(override_files, "--override")),
        )
        if not (wanted.requirements or wanted.files or wanted.projects or wanted.builds):
            raise InputError("nothing is required", hint="name a package, or a file with -r")
        if wanted.lock and wanted != cls(
            files=(wanted.lock,),
            extras=wanted.extras,
            groups=wanted.groups,
            builds=wanted.builds,
            require_hashes=require_hashes,
            confined=confined,
        ):
            raise InputError(
                f"{wanted.lock.name} cannot be joined with other requirements",
                hint="a lock is complete: give it alone, and the others in a command of their own",
            )
        if (extras or groups) and not wanted._own:
            raise InputError(
                "extras and groups of which project?", hint="give its pyproject.toml with -r"
            )
        return wanted

    @property
    def lock(self) -> Path | None:
        """The lock among the files, if there is one."""
        locks = [f for f in self.files if f.name == UV_LOCK_NAME or is_valid_pylock_path(f)]
        return locks[0] if locks else None

    @property
    def plain_files(self) -> list[Path]:
        """Files of requirements and constraints: those without projects and locks."""
        return [
            f for f in (*self.files, *self.constraints) if f not in self._own and f != self.lock
        ]

    @property
    def by_name(self) -> bool:
        """Whether all requirements are names, which mean the same on another machine."""
        return self == Wanted(self.requirements) and not any(one.url for one in self.requirements)

    @property
    def _own(self) -> list[Path]:
        return [file for file in self.files if file.name in (PROJECT_NAME, UV_LOCK_NAME)]

    def of_projects(self) -> list[Requirement]:
        """Return the requirements of its projects, with the requested extras and groups.

        They have the URLs of repositories in ``[tool.uv.sources]``.

        Raises:
            InputError: a repository has no address, or a name is invalid.
        """
        found = []
        for file in self._own:
            if file.name != PROJECT_NAME:
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                table = toml.loads(file.read_text(encoding="utf-8"))
                sources = _by_name(table.get("tool", {}).get("uv", {}).get("sources", {}))
                for needed in self._needed(table):
                    entries = sources.get(canonicalize_name(needed.name), ())
                    entries = entries if isinstance(entries, list | tuple) else [entries]
                    located = [_repository(needed, one) for one in entries if "git" in one]
                    found += located or [needed]
        return found

    def repositories(self) -> list[Requirement]:
        """Return the requirements of its projects that are git repositories.

        uv would clone them itself, and pass their passwords to git as arguments.

        Raises:
            InputError: as ``of_projects``.
        """
        return [one for one in self.of_projects() if (one.url or "").startswith("git+")]

    def _needed(self, project: dict[str, Any]) -> Iterator[Requirement]:
        """Yield the requirements of a ``pyproject.toml``, with the requested extras and groups."""
        table = project.get("project", {})
        extras, groups = map(
            _by_name, (table.get("optional-dependencies", {}), project.get("dependency-groups", {}))
        )
        chosen = [extras.get(name, ()) for name in self.extras]
        chosen += [groups.get(name, ()) for name in self.groups]
        waiting = [*table.get("dependencies", ()), *(one for more in chosen for one in more)]
        seen: list[object] = []
        for one in waiting:  # which grows: extras and groups include one another
            if one in seen:
                continue
            seen.append(one)
            if isinstance(one, dict):
                waiting += groups.get(canonicalize_name(one["include-group"]), ())
                continue
            with contextlib.suppress(InvalidRequirement):  # uv says what is wrong
                needed = Requirement(one)
                if canonicalize_name(needed.name) == canonicalize_name(table.get("name", "")):
                    for name in needed.extras:
                        waiting += extras.get(canonicalize_name(name), ())
                yield needed

    def options(self) -> list[str]:
        """Return the arguments of ``uv pip compile`` for all but the string requirements."""
        return [
            *(f"--constraints={file}" for file in self.constraints),
            *(f"--extra={name}" for name in self.extras),
            *(f"--group={file}:{name}" for file in self._own for name in self.groups),
            *(f"--overrides={file}" for file in self.override_files),
            *self.flags,
            *map(str, self.files),
        ]

    def digest(self) -> str:
        """Return a hash of everything that a resolution depends on, without credentials.

        The indexes and the user's settings of uv count, unless a lock says what is chosen.

        Empty if that is unknown: for files that name others, and for wheels and projects on this
        machine, which may have changed.
        """
        digest = hashlib.sha256(
            repr(
                (
                    [expanded(str(one).encode()) for one in self.requirements],
                    *(self.extras, self.groups),
                    [*map(str, self.builds)],
                    *(self.require_hashes, self.flags),
                )
            ).encode()
        )
        if not self.lock:
            digest.update(repr((uvsettings.addresses(), uvsettings.of_choice())).encode())
        for file in (*self.files, *self.constraints, *self.override_files):
            text = file.read_bytes() if file == self.lock else expanded(file.read_bytes())
            if not self._is_fixed(file):
                return ""
            digest.update(hashlib.sha256(text).digest())
        fixed = all(map(_is_fixed, self.requirements)) and not self.projects
        return digest.hexdigest() if fixed else ""

    def _is_fixed(self, file: Path) -> bool:
        """Return whether a file means the same as long as its text, and the index, are the same."""
        if file == self.lock:
            return _is_fixed_lock(file)
        if file in self._own:
            return _is_fixed_project(file)
        return all(
            line.option not in _OTHERS if line.option else _is_fixed(line.requirement())
            for line in read_lines([file])
        )

    def with_files(self, change: Callable[[Path], Path]) -> Wanted:
        """Return a copy with other files of requirements; projects and locks stay.

        Args:
            change: returns the replacement of a file.
        """

        def changed(files: Iterable[Path]) -> tuple[Path, ...]:
            kept = {*self._own, self.lock}
            return tuple(file if file in kept else change(file) for file in files)

        return dataclasses.replace(
            self,
            files=changed(self.files),
            constraints=changed(self.constraints),
            override_files=changed(self.override_files),
        )

    def with_settings(self) -> Wanted:
        """Return a copy with the files of ``UV_CONSTRAINT`` and ``UV_OVERRIDE``, as uv adds them.

        They count if no such files are given, and not for a lock.

        Raises:
            SourceError: a file does not exist.
        """
        if self.lock:
            return self

        def named(variable: str) -> tuple[Path, ...]:
            return tuple(existing_files(uvsettings.files(variable), variable))

        return dataclasses.replace(
            self,
            constraints=self.constraints or named("UV_CONSTRAINT"),
            override_files=self.override_files or named("UV_OVERRIDE"),
        )

    def adding(self, requirements: Iterable[Requirement]) -> Wanted:
        """Return a copy with more requirements."""
        return dataclasses.replace(self, requirements=(*self.requirements, *requirements))


def _is_fixed(one: Requirement | None) -> bool:
    """Return whether a requirement is a name or the URL of a file on a server."""
    local = one is None or (one.url is not None and "://" not in one.url)
    return not local and not ((one and one.url) or "").startswith(("file:", "git+"))


def _is_fixed_project(file: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        text = file.read_text(encoding="utf-8")
        table = toml.loads(text)
        sources = table.get("tool", {}).get("uv", {}).get("sources", {}).values()
        located = [one for more in sources for one in (more if isinstance(more, list) else [more])]
        return not (
            table.get("project", {}).get("dynamic")
            or any({"path", "git", "workspace"} & one.keys() for one in located)
            or any(word in text for word in ("file:", "git+"))
        )
    return False  # uv says what is wrong


def _is_fixed_lock(file: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, WheelError):
        text = file.read_text(encoding="utf-8")
        if file.name != UV_LOCK_NAME:
            packages = parse_lock(text).packages
            return not any(one.directory or (one.vcs and one.vcs.path) for one in packages)
        sources = [one.get("source", {}) for one in toml.loads(text).get("package", ())]
        places = [one.get(key, ".") for one in sources for key in ("directory", "editable", "path")]
        return set(places) <= {"."}  # where its own project is
    return False


def _by_name(lists: dict[str, Any]) -> dict[str, Any]:
    return {canonicalize_name(name): more for name, more in lists.items()}


def _repository(needed: Requirement, source: dict[str, object]) -> Requirement:
    """Return a requirement with the URL of its ``git`` entry in ``[tool.uv.sources]``."""
    revision = next((source[key] for key in ("rev", "tag", "branch") if key in source), "")
    url = f"git+{source['git']}{f'@{revision}' if revision else ''}"
    url += f"#subdirectory={source['subdirectory']}" if "subdirectory" in source else ""
    extras = f"[{','.join(sorted(needed.extras))}]" if needed.extras else ""
    markers = " and ".join(f"({m})" for m in (needed.marker, source.get("marker")) if m)
    try:
        return Requirement(f"{needed.name}{extras} @ {url}{f' ; {markers}' if markers else ''}")
    except InvalidRequirement as error:
        raise InputError(
            f"[tool.uv.sources] has no usable repository for {needed.name}: {error}".splitlines()[
                0
            ],
            hint="correct pyproject.toml",
        ) from None


def _named(text: str) -> str:
    """Return a requirement; the bare URL of a wheel or source distribution gets its name."""
    if text.startswith(("http://", "https://")):
        one = Line(Path(), "", text).requirement()
        return str(one) if one is not None else text
    return text


def _names(given: Iterable[str]) -> tuple[str, ...]:
    names = tuple(canonicalize_name(name) for name in given)
    for name in names:
        if not is_normalized_name(name):
            raise InputError(f"{name!r} is not a name", hint="give one such as 'test'")
    return names
