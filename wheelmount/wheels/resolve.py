"""Resolve requirements to a lock: the versions, and their wheels, for a target."""

from __future__ import annotations

import dataclasses
import os
import re
import uuid
from collections.abc import Iterable
from pathlib import Path

import tomli_w
from packaging.pylock import Pylock
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from wheelmount import disk
from wheelmount.errors import (
    InputError,
    ResolveError,
    SourceError,
    UnavailableError,
    WheelError,
    WheelmountError,
)
from wheelmount.owned import FILE
from wheelmount.progress import SILENT, Progress, number_of
from wheelmount.urls import public
from wheelmount.wheels import uvsettings
from wheelmount.wheels.compiler import Failure, Kind, compile_requirements, export_lock
from wheelmount.wheels.lockfile import TOOL, parse_lock
from wheelmount.wheels.pins import Pins
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import UV_LOCK_NAME, Wanted

_YANKED = re.compile(
    r"`(?P<name>[^=`]+)==(?P<version>[^`]+)` is yanked(?: \(reason: \"(?P<reason>.*)\"\))?"
)

# What uv prints of one package, with the index that it is from.
_NEWEST = re.compile(r"\S+==(?P<version>\S+)(?:\s+# from (?P<index>\S+))?")


def resolve(
    wanted: Wanted,
    *,
    target: Target,
    output: Path,
    progress: Progress = SILENT,
    pins: Pins | None = None,
    built: Path | None = None,
) -> Pylock:
    """Resolve requirements for a target, and write the lock file; a lock is taken as it is.

    The returned lock keeps credentials of given URLs; the file has none.

    Index, credentials, proxies and certificates are uv's, from the caller's environment and
    ``uv.toml``. An earlier lock at ``output`` is ignored: versions are
    the newest.

    Args:
        wanted: the requirements.
        target: the target; only wheels that install there count.
        output: path of the lock, which is written atomically; relative paths in it start at its
            directory.
        progress: told of the one step, ``resolve``.
        pins: pinned hashes; default those of ``wanted``.
        built: directory of wheels that were built on this machine, whose sources were compared;
            the lock has them by their names, as they are to lie beside it.

    Raises:
        InputError: a file cannot be parsed, or a lock has files beside it.
        SourceError: a file that files of requirements name, or the directory of ``output``, is
            missing.
        ResolveError: no solution: an unknown package, no wheel for the target, a conflict.
        WheelError: a file is pinned to another hash.
        UnavailableError: the index cannot be reached or refuses, or uv is not installed.
        WaitError: uv took too long.
    """
    # A new file, because uv keeps to the versions of an output that exists; beside the final one,
    # because paths in it are relative to it. uv takes only names of the form pylock.NAME.toml.
    mark = "-" if "." in output.stem else "."
    fresh = output.with_name(f"{output.stem}{mark}{uuid.uuid4().hex}.toml")
    try:
        # Test that the directory is writable: uv would report this like a conflict.
        fresh.touch(FILE)
        fresh.unlink()
        warnings = [one for one in [uvsettings.passed_over()] if one and not wanted.lock]
        with progress.task("resolve") as task:
            if wanted.lock:
                disk.write(fresh, _lock_text(wanted.lock, wanted))
            else:
                options = ["--format", "pylock.toml", "--output-file", str(fresh.absolute())]
                outcome = compile_requirements(wanted, target, options, warn=warnings.append)
                if isinstance(outcome, Failure):
                    raise error_of(outcome, target)
            text = fresh.read_text(encoding="utf-8")
            found = parse_lock(text, str(output))
            own = list(built.glob("*.whl")) if built else []
            lock = (pins or Pins.of(wanted, target)).apply(
                _beside(found, *filter(None, [built]), output.parent),
                target,
                [parse_wheel_filename(wheel.name)[0] for wheel in own],
            )
            table = dict(lock.to_dict())
            if lock is not found or public(table) != table:
                text = tomli_w.dumps(public(table))
            fresh.unlink()  # uv's lock may contain credentials, see compile_requirements
            disk.write(fresh, text)
            task.note(f"{number_of(len(lock.packages), 'package')} for {target}")
        for warning in warnings:
            progress.log(f"warning: {warning}")
        lock = _with_yanked(lock, warnings)
        fresh.replace(output)
    except OSError as error:
        if error.errno in disk.FULL:
            raise disk.no_room(error.errno, output.parent) from None
        raise SourceError(
            f"cannot write {output}: {error.strerror}", hint="check the directory"
        ) from None
    finally:
        fresh.unlink(missing_ok=True)
    return lock


def _beside(lock: Pylock, *folders: Path) -> Pylock:
    """Return a lock with paths below some directories relative to them.

    The lock and what lies beside it may be moved together then.
    """
    packages = []
    for package in lock.packages:
        path = Path((package.archive and package.archive.path) or "")
        for folder in folders:
            folder = Path(os.path.normpath(folder.absolute()))  # as uv writes paths
            if package.archive and path.is_relative_to(folder):
                archive = dataclasses.replace(
                    package.archive, path=path.relative_to(folder).as_posix()
                )
                package = dataclasses.replace(package, archive=archive)
                break
        packages.append(package)
    return dataclasses.replace(lock, packages=packages) if packages != lock.packages else lock


def read_lock(file: Path, wanted: Wanted) -> Pylock:
    """Read the lock among the wanted files.

    Raises:
        InputError: it needs files beside it.
        SourceError: it cannot be read.
        WheelError: it is not a lock.
    """
    return parse_lock(_lock_text(file, wanted), str(file))


def _lock_text(file: Path, wanted: Wanted) -> str:
    if file.name == UV_LOCK_NAME:
        outcome = export_lock(file, wanted)
        if isinstance(outcome, Failure):
            raise InputError(f"{file}: {outcome.reason}", hint="make it again: uv lock")
        return outcome
    text = file.read_text(encoding="utf-8", errors="replace")
    for package in parse_lock(text, str(file)).packages:
        for source in (*(package.wheels or ()), package.archive):
            if source and not source.url and source.path and not Path(source.path).is_absolute():
                raise InputError(
                    f"{file} has a file beside it: {source.path}",
                    hint="give that wheel by its path, and a lock without it",
                )
    return text


def error_of(failure: Failure, target: Target) -> WheelmountError:
    """Convert a failure of uv to an error for users."""
    subject = failure.subject
    if failure.kind is Kind.UNKNOWN_PACKAGE:
        return ResolveError(
            f"no package named {subject} in the index{_wanted_by(failure)}",
            hint="check the spelling; name a private index in UV_INDEX",
        )
    if failure.kind is Kind.NO_SOURCE_BUILD:
        return ResolveError(
            f"no wheel of {subject} for {target}: only a source distribution exists",
            hint=f"take another version, or build it on this machine: --build {subject}",
        )
    if failure.kind is Kind.NO_FITTING_WHEEL:
        return ResolveError(
            f"no wheel of {subject} for {target}: {failure.reason}",
            hint=failure.hint or "take another version, or another target",
        )
    if failure.kind is Kind.DENIED:
        return UnavailableError(
            f"the package index at {subject} refuses access",
            hint="give credentials in UV_INDEX_NAME_USERNAME and UV_INDEX_NAME_PASSWORD, "
            "or in ~/.netrc",
        )
    if failure.kind is Kind.NO_NETWORK:
        if os.environ.get("UV_OFFLINE", "0").lower() in ("1", "true", "yes"):
            return UnavailableError(
                "UV_OFFLINE forbids uv to reach the package index", hint="unset UV_OFFLINE"
            )
        return UnavailableError(
            f"the package index did not deliver: {failure.reason}",
            hint="check the network, HTTPS_PROXY, SSL_CERT_FILE and UV_DEFAULT_INDEX",
        )
    if failure.kind is Kind.GONE:
        return SourceError(
            f"there is nothing at {subject} (404)", hint="check the URL; it may be a private one"
        )
    if failure.kind is Kind.BAD_FILE:
        if "parse" in failure.reason.lower():
            return InputError(failure.reason, hint=f"correct {subject}")
        return SourceError(failure.reason, hint=f"check the path {subject}")
    if failure.kind is Kind.BAD_WHEEL:
        return WheelError(failure.reason, hint=f"get {subject} again, or from elsewhere")
    if failure.kind is Kind.NO_EXTRA:
        return InputError(
            f"the project has no extra or group {subject}: {failure.reason}",
            hint="see [project.optional-dependencies] and [dependency-groups] in pyproject.toml",
        )
    if failure.kind is Kind.NO_VERSION:
        return ResolveError(
            f"the requirements have no solution for {target}: {failure.reason}",
            hint=_versions(subject, target),
        )
    if failure.kind is Kind.OTHER:
        return ResolveError(
            f"the requirements cannot be resolved: {failure.reason}",
            hint=failure.hint or "correct what is named",
        )
    return ResolveError(
        f"the requirements have no solution for {target}: {failure.reason}",
        hint=failure.hint or "loosen one of the versions named",
    )


def _versions(package: str, target: Target) -> str:
    """Return a hint with the existing versions of a package, the newest first."""
    from wheelmount.wheels.listed import offered_versions  # with httpx, which takes long to load

    lines = ["--no-deps", "--no-annotate", "--emit-index-annotation"]
    try:
        answer = compile_requirements(Wanted((Requirement(package),)), target, lines)
    except WheelmountError:
        answer = ""
    newest = isinstance(answer, str) and _NEWEST.match(answer)
    if not newest:
        return "choose an existing version"
    found = offered_versions(package, newest["index"] or "", target) or [newest["version"]]
    return f"for this target there are {package} {', '.join(found)}"


def _with_yanked(lock: Pylock, warnings: Iterable[str]) -> Pylock:
    """Return the lock with the reasons of yanked packages from uv's warnings."""
    reasons = {}
    for warning in warnings:
        if found := _YANKED.search(warning):
            reasons[found["name"], found["version"]] = found["reason"] or ""
    packages = []
    for package in lock.packages:
        reason = reasons.get((str(package.name), str(package.version)))
        if reason is not None:
            table = (package.tool or {}).get(TOOL, {})
            tool = {**(package.tool or {}), TOOL: {**table, "yanked": reason}}
            package = dataclasses.replace(package, tool=tool)
        packages.append(package)
    return dataclasses.replace(lock, packages=packages) if reasons else lock


def _wanted_by(failure: Failure) -> str:
    """Return `` (wanted by Y)`` if the missing package is a dependency of Y."""
    found = re.search(rf"(\S+) depends? on {re.escape(failure.subject)}\b", failure.reason)
    return f" (wanted by {found[1]})" if found else ""
