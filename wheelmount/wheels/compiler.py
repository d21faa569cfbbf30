"""Run ``uv pip compile``, ``export`` and ``build`` with bounds, and classify their failures."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import uv
from packaging.requirements import Requirement

from wheelmount import child, disk
from wheelmount.errors import UnavailableError, WaitError, WheelmountError
from wheelmount.wheels.standin import interpreter
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted

TIMEOUT = 600.0
"""Seconds that one resolution may take; a hard one takes tens, a slow index minutes."""


MOST = 64 << 20
"""Most bytes that uv may print; a lock has some hundred bytes for each file of a package."""


class Kind(enum.Enum):
    """Kinds of failures that callers treat differently."""

    UNKNOWN_PACKAGE = enum.auto()
    NO_SOURCE_BUILD = enum.auto()  # there is a source distribution and no wheel at all
    NO_FITTING_WHEEL = enum.auto()  # there are wheels, for other Pythons or platforms
    DENIED = enum.auto()  # the index requires credentials, or other credentials
    NO_NETWORK = enum.auto()
    GONE = enum.auto()  # the server does not know the URL
    BAD_FILE = enum.auto()
    BAD_WHEEL = enum.auto()
    NO_EXTRA = enum.auto()  # the project has no extra or group of that name
    NO_VERSION = enum.auto()  # the package exists, but not in that version
    CONFLICT = enum.auto()
    OTHER = enum.auto()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why uv found no solution.

    Attributes:
        kind: the kind of failure.
        subject: the package, URL or file that failed; empty if uv names none.
        reason: uv's message: several lines for a conflict, otherwise one line.
        hint: uv's hint in one line; empty if there is none, or it is about uv's options.
    """

    kind: Kind
    subject: str
    reason: str
    hint: str


_PACKAGE = r"(?P<subject>[A-Za-z0-9][\w.\-]*)(?:\[[^\]]*\])?"
_VERSIONS = r"(?:[<>=!~]\S*)?"

# The first that matches decides. A failure of the network outranks what follows from it, and a
# missing package outranks the wheels of others that do not fit.
_KINDS = (
    (Kind.DENIED, re.compile(r"(?P<subject>https?://[^\s)]+)\)?[^\n]*\b(?:401|403)\b")),
    (Kind.GONE, re.compile(r"\(404 [^)]*\) for url \((?P<subject>[^\s)]+)\)")),
    (Kind.NO_NETWORK, re.compile(r"Failed to fetch: `?(?P<subject>[^\s`]+)")),
    (Kind.NO_NETWORK, re.compile(r"Because (?P<subject>\S+) was not found in the cache")),
    (
        Kind.NO_NETWORK,
        re.compile(r"network (?:connectivity )?(?:is|was) disabled(?P<subject>)", re.I),
    ),
    (Kind.NO_NETWORK, re.compile(r"dns error|error sending request|tcp connect(?P<subject>)")),
    (
        Kind.BAD_FILE,
        re.compile(r"(?:read from file|decode file|File not found:) `?(?P<subject>[^\s`]+)"),
    ),
    (Kind.BAD_FILE, re.compile(r"parse requirement in `(?P<subject>[^`]+)`")),
    (Kind.BAD_FILE, re.compile(r"Failed to parse: `?(?P<subject>[^\s`]+)")),
    (Kind.BAD_WHEEL, re.compile(r"Failed to read metadata: `?(?P<subject>[^\s`]+)")),
    (Kind.BAD_WHEEL, re.compile(r"Failed to (?:read|extract|unzip)[^`]*`(?P<subject>[^`]+)`")),
    (Kind.NO_EXTRA, re.compile(r"Requested extra not found: (?P<subject>\S+)")),
    (
        Kind.NO_EXTRA,
        re.compile(
            r"(?:dependency group|Group) [`'](?P<subject>[^`']+)[`'] (?:was |is )?not "
            r"(?:found|defined)",
            re.I,
        ),
    ),
    (
        Kind.UNKNOWN_PACKAGE,
        re.compile(rf"{_PACKAGE} was not found in the (?:package registry|provided package)"),
    ),
    (Kind.NO_SOURCE_BUILD, re.compile(rf"{_PACKAGE}{_VERSIONS} (?:has|have) no usable wheels")),
    (Kind.NO_FITTING_WHEEL, re.compile(rf"{_PACKAGE}{_VERSIONS} (?:has|have) no wheels with")),
    (Kind.NO_VERSION, re.compile(rf"there (?:is|are) no versions? of {_PACKAGE}[<>=!~]")),
)


_CONFLICT = re.compile("no solution|unsatisfiable|conflict", re.IGNORECASE)


def compile_requirements(
    wanted: Wanted,
    target: Target,
    options: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    wheels_only: bool = True,
    warn: Callable[[str], object] | None = None,
) -> str | Failure:
    """Resolve requirements for a target; return uv's output, or a failure.

    Args:
        wanted: the requirements; no lock.
        target: the target to resolve for.
        options: further options of ``uv pip compile``, such as the format and the output file.
        environ: the whole environment of uv. Only this user may read the files that uv makes,
            because they may contain credentials.
        wheels_only: ignore source distributions.
        warn: called with each of uv's warnings, as one line; by default warnings are dropped.

    Raises:
        UnavailableError: uv is not installed.
        WaitError: uv did not end within ``TIMEOUT``.
    """
    # Always give an existing interpreter; otherwise uv searches for one, which takes seconds.
    with interpreter(target) as python, _written(wanted.overrides) as overrides:
        command = [
            *("pip", "compile", "--no-header", "--python", python),
            *(("--quiet",) if warn is None else ()),
            *("--python-version", target.release, "--python-platform", target.platform),
            *(("--only-binary", ":all:") if wheels_only else ()),
            *options,
            *(("--overrides", overrides) if overrides else ()),
            *wanted.options(),
        ]
        if wanted.requirements:
            command.append("-")
        # Pass parsed requirements on standard input, where none can be taken for an option.
        return _run(command, environ, _lines(wanted.requirements), warn)


@contextlib.contextmanager
def _written(requirements: Sequence[Requirement]) -> Iterator[str]:
    """Write requirements to a temporary file for the context; yield no path if there are none."""
    if not requirements:
        yield ""
        return
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(_lines(requirements))
        file.flush()
        yield file.name


def _lines(requirements: Sequence[Requirement]) -> str:
    return "".join(f"{one}\n" for one in requirements)


def export_lock(file: Path, wanted: Wanted) -> str | Failure:
    """Convert a ``uv.lock`` to ``pylock.toml``, without its own project; return it or a failure.

    Raises:
        UnavailableError: uv is not installed.
        WaitError: uv did not end within ``TIMEOUT``.
    """
    command = [
        *("export", "--quiet", "--no-header", "--frozen", "--no-emit-project"),
        *("--format", "pylock.toml", "--project", str(file.parent)),
        *("--python", sys.executable),
        *(f"--extra={name}" for name in wanted.extras),
        *(f"--group={name}" for name in wanted.groups),
    ]
    return _run(command, os.environ)


def build_wheel(
    source: Path,
    output: Path,
    python: str,
    options: Sequence[str] = (),
    prefix: Callable[[Sequence[str]], Sequence[str]] = list,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Build a project or source distribution in isolation.

    Args:
        source: directory or archive of the source.
        output: directory for the wheel; made.
        python: path of the interpreter to build with.
        options: further options of ``uv build``.
        prefix: converts the command to the command that is run, for example in a sandbox.
        environ: the whole environment of uv.

    Returns:
        The reason of a failure, in one line; empty on success.

    Raises:
        UnavailableError: uv is not installed.
        WaitError: the build did not end within ``TIMEOUT``.
    """
    command = ["build", "--quiet", "--wheel", "--out-dir", str(output), "--python", python]
    command += options
    try:
        answer = _run([*command, "--", str(source)], environ, prefix=prefix)
    except WaitError:
        raise WaitError(
            f"the build of {source.name} did not end within {TIMEOUT:.0f} s",
            hint="see what it does: uv build --wheel",
        ) from None
    return answer.reason if isinstance(answer, Failure) else ""


def _run(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    given: str = "",
    warn: Callable[[str], object] | None = None,
    prefix: Callable[[Sequence[str]], Sequence[str]] = list,
) -> str | Failure:
    try:
        done = child.run(
            prefix([_uv(), *arguments]),
            timeout=TIMEOUT,
            environ={**environ, "NO_COLOR": "1"},
            given=given,
            most=MOST,
            umask=0o077,
        )
    except subprocess.TimeoutExpired:
        raise WaitError(
            f"uv did not end within {TIMEOUT:.0f} s",
            hint="narrow the versions, or check that the package index answers",
        ) from None
    for warning in re.findall(r"^warning: (.+)$", done.stderr, re.M) if warn else ():
        warn(warning)  # type: ignore[misc]
    if done.code:
        failure = explain(done.stderr)
        if (error := _of_system(done.stderr, failure, environ)) is not None:
            raise error
        return failure
    if not done.whole:
        raise UnavailableError(
            f"uv printed more than {MOST >> 20} MB, which cannot be read", hint="ask for less"
        )
    return done.stdout


_OF_SYSTEM = re.compile(r"\(os error (\d+)\)")


def _of_system(stderr: str, failure: Failure, environ: Mapping[str, str]) -> WheelmountError | None:
    """Return the error for what uv says if its files are at fault, and not the requirements."""
    found = _OF_SYSTEM.search(stderr)
    number = int(found[1]) if found else 0
    if number in disk.UNWRITABLE:
        named = [Path(path) for path in re.findall(r"`(/[^`\n]+)`", stderr)]
        named += [Path(environ[name]) for name in ("UV_CACHE_DIR", "TMPDIR") if environ.get(name)]
        named.append(Path(platformdirs.user_cache_dir("uv")))
        if number in disk.FULL:
            place = disk.full(*named) or named[0]
        else:
            place = next(filter(disk.unwritable, named), named[0])
        return disk.no_room(number, place)
    if number and failure.kind is Kind.OTHER and "Failed to build" not in stderr:
        return UnavailableError(
            f"uv cannot go on: {_one_line(stderr)}", hint="check the directory that it names"
        )
    return None


def explain(stderr: str) -> Failure:
    """Classify uv's messages as a ``Failure``."""
    said, _, hints = stderr.partition("hint:")
    reason = _one_line(said)
    kind, subject = Kind.CONFLICT if _CONFLICT.search(reason) else Kind.OTHER, ""
    for candidate, pattern in _KINDS:
        # Hints count here: the reason alone says "not found" where the index said "401".
        if found := pattern.search(_one_line(stderr) if candidate is Kind.DENIED else reason):
            kind, subject = candidate, found["subject"] or ""
            break
    useful = [_one_line(hint) for hint in hints.split("hint:") if hint and "--no-build" not in hint]
    if kind is Kind.CONFLICT:
        reason = _lines_of(said)
    return Failure(kind, subject, _shorten(reason), useful[0] if useful else "")


def _one_line(text: str) -> str:
    # Older uv draws a tree with box-drawing characters, newer ones write "cause:".
    text = re.sub(
        r"^\s*(?:[\u00d7\u2500-\u25ff]+|error:|cause:|Caused by:|warning:)+", " ", text, flags=re.M
    )
    return " ".join(text.split())


def _lines_of(text: str) -> str:
    """Join broken lines, but keep the lines that are sentences, as in uv's report of a conflict."""
    lines = re.sub(r"\n\s*And because", "\0And because", text.replace("│", " "))
    return "\n  ".join(map(_one_line, lines.split("\0")))


def _shorten(reason: str) -> str:
    reason = reason.removeprefix("No solution found when resolving dependencies").lstrip(": ")
    reason = re.sub(r",? we can conclude that your requirements are unsatisfiable\.?$", "", reason)
    return reason.removeprefix("Because ") or "uv gave no reason"


def _uv() -> str:
    try:
        return uv.find_uv_bin()
    except FileNotFoundError:
        raise UnavailableError("uv is not installed", hint="pip install uv") from None
