"""Build wheels of projects, source distributions and repositories on this machine.

uv builds them in isolation, with the indexes and credentials of its own configuration. The built
wheels are resolved by their paths, and have their origin recorded. They are private until then: a
wheelhouse gets them with the record of the request.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import url2pathname

import tomli_w
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from wheelmount import child
from wheelmount.errors import ResolveError, SourceError, UnavailableError, WaitError, WheelError
from wheelmount.owned import OTHERS
from wheelmount.progress import SILENT, Progress
from wheelmount.urls import without_credentials
from wheelmount.wheels import sandbox, uvsettings
from wheelmount.wheels.archive import find_faults, hash_file
from wheelmount.wheels.compiler import Failure, build_wheel, compile_requirements
from wheelmount.wheels.lockfile import Wheel, chosen_source, parse_lock
from wheelmount.wheels.pins import ALGORITHMS, Pins
from wheelmount.wheels.reqfile import Line, indexes, read_lines, rewrite
from wheelmount.wheels.requirements import applies, split_url
from wheelmount.wheels.resolve import error_of
from wheelmount.wheels.scratch import scratch
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import NO_DEPS, Wanted

UNNAMED = "wheelmount-unnamed"
"""Stands for the name of a repository's package until that is built."""

CLONE_TIMEOUT = 600.0
"""Seconds that git may take for one repository."""


_PROJECT_FILES = ("pyproject.toml", "setup.py")


@dataclass(frozen=True, slots=True)
class Built:
    """The result of building sources.

    Attributes:
        wanted: the requirements, with the paths of the built wheels in place of the sources.
        asked: the requirements for the manifest: names, with the URLs of their sources.
        origins: URL or path of the source of each built wheel, by file name, without credentials.
    """

    wanted: Wanted
    asked: tuple[Requirement, ...]
    origins: dict[str, str]


def build_missing(
    wanted: Wanted,
    target: Target,
    directory: Path,
    folder: Path,
    progress: Progress = SILENT,
    pins: Pins | None = None,
) -> Built:
    """Build all required sources.

    uv can then resolve with wheels alone: it neither runs code of sources to learn their
    requirements, nor clones repositories by URLs with passwords, which other users would see.

    Args:
        wanted: the requirements; nothing is done if none is a source, or for a lock.
        target: the target that the wheels must fit.
        directory: a private directory for the wheels.
        folder: a private directory for copies of files of requirements, which resolving needs.
        progress: informed of the one step, ``build``.
        pins: hashes that sources are pinned to.

    Raises:
        ResolveError: a source does not build, or builds a wheel that fits only this machine, which
            is not the target.
        SourceError: a repository or source distribution cannot be fetched.
        UnavailableError: git or uv is not installed.
        WheelError: a built wheel is not sound.
    """
    sources = [one for one in wanted.requirements if is_source(one)]
    lines = sources_of_files(wanted)
    of_project = wanted.repositories()
    if wanted.lock or not (sources or lines or of_project or wanted.projects or wanted.builds):
        return Built(wanted, wanted.requirements, {})
    plain = tuple(one for one in wanted.requirements if not is_source(one))
    by_path, asked = list(plain), list(plain)
    overrides = list(wanted.overrides)
    # Constraints also narrow the choice of a source distribution, except those that are sources;
    # and it is looked for where a file of requirements says, as the wheels are.
    bounds = replace(
        Wanted(flags=tuple(flag for flag in wanted.flags if flag != NO_DEPS)),
        files=(indexes(wanted.plain_files, folder),),
        constraints=wanted.constraints,
        override_files=wanted.override_files,
    ).with_files(lambda file: rewrite(file, dict.fromkeys(lines, ""), folder))
    origins: dict[str, str] = {}
    changes: dict[Line, str] = {}
    with progress.task("build", unit="wheel") as task, scratch() as place:
        todo: list[tuple[Path | Requirement, Line | None]] = [
            (one, None) for one in wanted.projects
        ]
        todo += [(one, None) for one in (*sources, *wanted.builds) if applies(one, target)]
        todo += [(one, line) for line, one in lines.items() if applies(one, target)]
        todo += [(one, None) for one in of_project if applies(one, target)]
        task.total(len(todo))
        for number, (one, line) in enumerate(todo):
            inner = place / str(number)
            inner.mkdir()
            source, origin = _bring(one, target, inner, pins or Pins(), bounds)
            own = isinstance(one, Path) and source.is_dir()
            fresh = build(
                source, origin, target, inner / "wheels", progress, own=own or not wanted.confined
            )
            requirement = _named(one, fresh)
            wheel = keep(fresh, directory)
            at = _at(requirement, wheel.absolute().as_uri())
            if line is not None:
                changes[line] = str(at)
            elif one in of_project:
                overrides.append(at)
            else:
                by_path.append(at)
                if wanted.override_files:  # which may name it too
                    overrides.append(at)
                if one not in wanted.builds:  # those have a place of their own in a request
                    asked.append(_at(requirement, origin))
            origins[wheel.name] = origin
            task.advance(1)
        task.note(", ".join(origins))
    built = replace(
        wanted,
        requirements=tuple(by_path),
        projects=(),
        builds=(),
        overrides=tuple(overrides),
    )
    if changes:
        built = built.with_files(lambda file: rewrite(file, changes, folder))
    return Built(built, tuple(asked), origins)


def sources_of_files(wanted: Wanted) -> dict[Line, Requirement]:
    """Return the repositories and source distributions that files of requirements name.

    Sources whose package is not named get ``UNNAMED``. Local directories are left out.
    """
    found = {}
    for line in read_lines((*wanted.plain_files, *wanted.override_files)):
        if not line.option and (one := _source_of(line)):
            found[line] = one
    return found


def _source_of(line: Line) -> Requirement | None:
    one = line.requirement()
    if one is None and line.text.startswith("git+"):
        with suppress(InvalidRequirement):
            one = Requirement(f"{UNNAMED} @ {line.text}")
    if one is None or one.url is None:
        return None
    if "://" not in one.url:
        one.url = Path(unquote(one.url.partition("#")[0])).absolute().as_uri()
    parts = split_url(one.url)
    local = Path(url2pathname(parts.path)) if parts.scheme == "file" else None
    return one if is_source(one) and (local is None or local.is_file()) else None


def is_source(requirement: Requirement) -> bool:
    """Return whether a requirement names a source by URL, which has to be built."""
    return requirement.url is not None and not split_url(requirement.url).path.endswith(".whl")


def _bring(
    one: Path | Requirement, target: Target, folder: Path, pins: Pins, bounds: Wanted
) -> tuple[Path, str]:
    """The directory or source distribution to build, and where it is from."""
    if isinstance(one, Path):
        return _compared(one, "", pins), one.as_uri()
    if one.url is None:
        return _download(one, target, folder, ["--no-binary", one.name], pins, bounds)
    parts = split_url(one.url)
    if parts.scheme == "file":
        return _compared(Path(url2pathname(parts.path)), one.name, pins), one.url
    if parts.scheme.startswith("git+"):
        _refuse_open(str(one), pins)
        return clone(one.url, folder / "repository")
    return _download(one, target, folder, [], pins, Wanted(files=bounds.files))


def _compared(path: Path, name: str, pins: Pins) -> Path:
    """Check a local project or source distribution against its pins; return its path."""
    if path.is_dir():
        _refuse_open(str(path), pins)
    elif path.is_file():
        with suppress(InvalidSdistFilename):
            name = name or parse_sdist_filename(path.name)[0]
        hashes = {algorithm: hash_file(path, algorithm) for algorithm in ALGORITHMS}
        pins.refuse_other(canonicalize_name(name), hashes, path.name)
        if canonicalize_name(name) not in pins.hashes:
            _refuse_open(str(path), pins)
    return path


def _refuse_open(what: str, pins: Pins) -> None:
    if pins.required:
        raise WheelError(
            f"hashes are required, and {what} is not pinned by one",
            hint="build its wheel apart, and pin that",
        )


def _download(
    one: Requirement,
    target: Target,
    folder: Path,
    options: Sequence[str],
    pins: Pins,
    bounds: Wanted,
) -> tuple[Path, str]:
    lines = ["--no-deps", "--format", "pylock.toml", *options]
    # Give uv the metadata, so that it does not run code of the source to get them.
    told: dict[str, object] = {"name": one.name, "requires-dist": []}
    if one.url:
        told["version"] = "0"
    settings = folder / "uv.toml"
    settings.write_text(tomli_w.dumps({**uvsettings.of_indexes(), "dependency-metadata": [told]}))
    environ = {name: value for name, value in os.environ.items() if name != "UV_NO_CONFIG"}
    environ["UV_CONFIG_FILE"] = str(settings)
    answer = compile_requirements(
        bounds.adding((one,)), target, lines, environ, wheels_only=one.url is not None
    )
    if isinstance(answer, Failure):
        raise error_of(answer, target)
    (package,) = pins.apply(parse_lock(answer), target).packages
    return bring(chosen_source(package), folder, bounds.plain_files)


def bring(source: Wheel, folder: Path, files: Iterable[Path]) -> tuple[Path, str]:
    """Fetch a source distribution.

    Args:
        source: the source distribution.
        folder: directory for it.
        files: files of requirements, which may have credentials of its index.

    Returns:
        Its path, and where it is from without credentials.
    """
    # Both with httpx, which takes long to load.
    from wheelmount.wheels.credentials import IndexAuth
    from wheelmount.wheels.fetch import fetch

    with SILENT.task("download") as task:
        fetch([source], folder, task, 1, auth=IndexAuth(files=files))
    return folder / source.filename, without_credentials(source.source)


def clone(url: str, folder: Path) -> tuple[Path, str]:
    """Clone a repository at a revision.

    Args:
        url: URL of the form ``git+URL@REVISION#subdirectory=PATH``.
        folder: directory for the clone; made.

    Returns:
        The directory of the project, and the URL with the commit and without credentials.

    Raises:
        SourceError: the repository cannot be fetched, or has no such revision or directory.
        UnavailableError: git is not installed.
    """
    parts = split_url(url.removeprefix("git+"))
    path, at, revision = parts.path.rpartition("@")
    path, revision = (path, revision) if at else (revision, "")
    address, environment = _apart(parts._replace(path=path, fragment="").geturl())
    if revision.startswith("-"):
        raise SourceError(f"{revision} is no revision", hint="give a branch, a tag or a commit")
    inside = parse_qs(parts.fragment).get("subdirectory", ["."])[0]
    _git(environment, "clone", "--quiet", "--", address, str(folder))
    if revision:
        _check_out(revision, environment, folder)
    modules = ("submodule", "--quiet", "update", "--init", "--recursive")
    _git(environment, "-C", str(folder), *modules)
    commit = _git(environment, "-C", str(folder), "rev-parse", "HEAD").strip()
    source = (folder / inside).resolve()
    if not source.is_relative_to(folder.resolve()):
        raise SourceError(f"{inside} is not in the repository", hint="check its subdirectory")
    return source, f"git+{without_credentials(address)}@{commit}"


def _check_out(revision: str, environment: Mapping[str, str], folder: Path) -> None:
    """Check out a revision of a clone: a commit, a tag, a branch, or another reference.

    Servers need not give a commit by its name, or by the beginning of its name. The clone has those
    of all branches and tags.
    """
    inside = ("-C", str(folder))
    try:  # the colon: what is fetched gets no name in the clone
        _git(environment, *inside, "fetch", "--quiet", "--", "origin", f"{revision}:")
        found = "FETCH_HEAD"
    except SourceError:
        found = f"{revision}^{{commit}}"  # otherwise git may take it for a branch to make
    _git(environment, *inside, "checkout", "--quiet", "--detach", found, "--")


def _apart(url: str) -> tuple[str, dict[str, str]]:
    """Split a repository's URL from its user and password, which git gets by environment variables.

    Other users can see the arguments of a process, but not its environment.
    """
    parts = urlsplit(url)
    environment = {"GIT_TERMINAL_PROMPT": "0"}  # otherwise git prompts, and waits
    if parts.scheme not in ("http", "https") or parts.username is None:
        return url, environment
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    number = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    environment["GIT_CONFIG_COUNT"] = str(number + 1)
    place = bare._replace(path="/", query="").geturl()
    environment[f"GIT_CONFIG_KEY_{number}"] = f"http.{place}.extraHeader"
    header = f"Authorization: Basic {base64.b64encode(pair).decode()}"
    environment[f"GIT_CONFIG_VALUE_{number}"] = header
    return bare.geturl(), environment


def _git(environment: Mapping[str, str], *arguments: str) -> str:
    try:
        done = child.run(
            ["git", *arguments],
            timeout=CLONE_TIMEOUT,
            environ={**os.environ, **environment},
        )
    except FileNotFoundError:
        raise UnavailableError("git is not installed", hint="install it: apt install git") from None
    except subprocess.TimeoutExpired:
        raise SourceError(
            f"git did not end within {CLONE_TIMEOUT:.0f} s", hint="check that the server answers"
        ) from None
    if done.code:
        said = " ".join(done.stderr.split()) or "git gave no reason"
        raise SourceError(f"no repository to build from: {said}", hint="check URL and revision")
    return done.stdout


def keep(wheel: Path, directory: Path) -> Path:
    """Move a built wheel into a private directory; return its path there."""
    kept = directory / wheel.name
    wheel.chmod(wheel.stat().st_mode & ~OTHERS)
    shutil.move(wheel, kept)
    return kept


def build(
    source: Path,
    origin: str,
    target: Target,
    output: Path,
    progress: Progress = SILENT,
    *,
    own: bool = False,
) -> Path:
    """Build the wheel of a project or source distribution; return its path.

    Args:
        source: directory or archive of the source, maybe a temporary one.
        origin: URL of where it is from, for messages.
        target: the target that the wheel must fit.
        output: directory for the wheel; made.
        progress: warned when strangers' code runs as this user.
        own: whether the code is this user's own; other code runs in a sandbox if there is one.

    Raises:
        ResolveError: the source does not build, or its wheel fits only this machine, which is not
            the target.
        SourceError: the source does not exist or is not a project.
        WheelError: the built wheel is not sound.
    """
    parts = split_url(origin)
    if parts.scheme == "file":
        name = url2pathname(parts.path)
        again = f"uv build --wheel {name}"
    else:
        name = f"{source.name} of {origin}"
        again = f"uv build --wheel, in a copy of {origin}"
    if not source.exists():
        raise SourceError(f"{name} does not exist", hint="check the path")
    if source.is_dir() and not any((source / file).exists() for file in _PROJECT_FILES):
        raise SourceError(
            f"{name} is not a project",
            hint="it has no pyproject.toml or setup.py; give wheels by their own paths",
        )
    try:
        if not own and sandbox.available():
            from wheelmount.wheels.confined import build_confined

            failure = build_confined(source, output)
        else:
            if not own:
                progress.log(
                    f"warning: the build of {source.name} runs its code as you, with your files "
                    "and network in reach: this machine makes no namespaces for you"
                )
            failure = build_wheel(source, output, sys.executable)
    except WaitError as error:
        error.hint = f"see what it does: {again}"
        raise
    found = list(output.glob("*.whl"))
    if failure or len(found) != 1:
        raise ResolveError(
            f"{name} does not build: {failure or 'no wheel came out'}",
            hint=f"see all it says with: {again}"
            + ("" if own else "; builds that need a network: --no-sandbox, if you trust them"),
        )
    (wheel,) = found
    if faults := find_faults(wheel):
        raise WheelError(
            f"{wheel.name} was built and is not sound: {faults[0]}", hint="fix its project"
        )
    tags = parse_wheel_filename(wheel.name)[3]
    anywhere = all(tag.platform == "any" for tag in tags)
    if not tags & frozenset(target.tags()) or not (anywhere or target == Target.here()):
        raise ResolveError(
            f"{wheel.name} was built for this machine, not for {target}",
            hint="build it where such a Python runs, and give the wheel by its path",
        )
    return wheel


def _named(one: Path | Requirement, wheel: Path) -> Requirement:
    name = parse_wheel_filename(wheel.name)[0]
    if isinstance(one, Path):
        return Requirement(name)
    if one.name == UNNAMED:
        return Requirement(str(one).replace(UNNAMED, name, 1))
    if canonicalize_name(one.name) != name:
        raise ResolveError(f"{one} builds {wheel.name}", hint=f"ask for {name}")
    return Requirement(str(one))


def _at(requirement: Requirement, url: str) -> Requirement:
    moved = Requirement(str(requirement))
    moved.specifier, moved.url = type(moved.specifier)(), url
    return moved
