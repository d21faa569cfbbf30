"""``uv pip compile``, ``export`` and ``build`` as functions: bounded, their failures sorted."""

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

import uv
from packaging.requirements import Requirement

from wheelmount import child
from wheelmount.errors import UnavailableError, WaitError
from wheelmount.wheels.standin import interpreter
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted

TIMEOUT = 600.0
"""Seconds one resolution may take; a hard one takes tens, a slow index minutes."""


MOST = 64 << 20
"""Bytes that uv may print; a lock has some hundred for each file of a package."""


class Kind(enum.Enum):
    """What went wrong, as far as the caller treats it differently."""

    UNKNOWN_PACKAGE = enum.auto()
    NO_SOURCE_BUILD = enum.auto()  # there is a source distribution and no wheel at all
    NO_FITTING_WHEEL = enum.auto()  # there are wheels, for other Pythons or platforms
    DENIED = enum.auto()  # the index wants credentials, or other ones
    NO_NETWORK = enum.auto()
    GONE = enum.auto()  # a URL that the server knows nothing of
    BAD_FILE = enum.auto()
    BAD_WHEEL = enum.auto()
    NO_EXTRA = enum.auto()  # or group: the project has none of that name
    NO_VERSION = enum.auto()  # there is the package, and not in that version
    CONFLICT = enum.auto()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why uv found no solution.

    Attributes:
        kind: which of the cases above.
        subject: the package, URL or file it is about; empty where uv names none.
        reason: uv's own words: a conflict in its lines, all else in one.
        hint: uv's own hint in one line, empty where it has none or one about its options.
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
    (Kind.BAD_FILE, re.compile(r"(?:read from file|File not found:) `?(?P<subject>[^\s`]+)")),
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


def compile_requirements(
    wanted: Wanted,
    target: Target,
    options: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    wheels_only: bool = True,
    warn: Callable[[str], object] | None = None,
) -> str | Failure:
    """Resolve for a target; return uv's output, or why there is no solution.

    Args:
        wanted: the requirements; no lock.
        target: for which to resolve.
        options: further options of ``uv pip compile``, such as the format and where it goes.
        environ: the whole environment of uv. Files it makes are the caller's alone to read: they
            may have credentials.
        wheels_only: whether source distributions do not count.
        warn: called with each of uv's warnings, in one line; default none.

    Raises:
        UnavailableError: uv is not installed.
        WaitError: no answer within ``TIMEOUT``.
    """
    # Always an interpreter that exists, or uv looks for one of the target's version: seconds.
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
        # Parsed requirements, on standard input: none can be read as an option.
        return _run(command, environ, _lines(wanted.requirements), warn)


@contextlib.contextmanager
def _written(requirements: Sequence[Requirement]) -> Iterator[str]:
    """A file of requirements, for as long as it is needed; no path where there are none."""
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
    """A ``uv.lock`` as ``pylock.toml``, less the project it is of; or why it can't be had.

    Raises:
        UnavailableError: uv is not installed.
        WaitError: no answer within ``TIMEOUT``.
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
        source: its directory or archive.
        output: directory for the wheel; made.
        python: the interpreter to build with.
        options: further ones of ``uv build``.
        prefix: makes of the command the one that is run: that in a sandbox.
        environ: the whole environment.

    Returns:
        Why it does not build, in one line; empty where it does.

    Raises:
        UnavailableError: uv is not installed.
        WaitError: no end within ``TIMEOUT``.
    """
    command = ["build", "--quiet", "--wheel", "--out-dir", str(output), "--python", python]
    command += options
    try:
        answer = _run([*command, "--", str(source)], environ, prefix=prefix)
    except WaitError:
        raise WaitError(
            f"the build of {source.name} did not end within {TIMEOUT:.0f} s",
            hint=f"see what it does: uv build --wheel {source}",
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
        return explain(done.stderr)
    if not done.whole:
        raise UnavailableError(
            f"uv printed more than {MOST >> 20} MB, which cannot be read", hint="ask for less"
        )
    return done.stdout


def explain(stderr: str) -> Failure:
    """Classify uv's messages as a ``Failure``."""
    said, _, hints = stderr.partition("hint:")
    reason = _one_line(said)
    kind, subject = Kind.CONFLICT, ""
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
    """The same with the lines that are sentences of their own, as uv tells a conflict."""
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
