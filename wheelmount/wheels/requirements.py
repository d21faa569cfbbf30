"""Parse requirement strings (PEP 508) before they reach a command line or a file of uv."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast
from urllib.parse import SplitResult, urlsplit

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from wheelmount.errors import InputError, SourceError
from wheelmount.wheels.target import Target


def parse_requirements(texts: Iterable[str]) -> list[Requirement]:
    """Parse requirements such as ``"pandas[performance]>=2; python_version > '3.10'"``.

    Valid requirements contain neither options (``--index-url …``) nor further lines, which pip and
    uv would obey in a file of requirements.

    Raises:
        InputError: one of them is not a requirement.
    """
    parsed = []
    for text in texts:
        if "\n" in text or "\r" in text or text.lstrip().startswith("-"):
            raise InputError(
                f"{text!r} is not a requirement",
                hint="give one package each, such as 'numpy>=2', and no options",
            )
        try:
            parsed.append(Requirement(text))
        except InvalidRequirement as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"{text!r} is not a requirement: {reason}",
                hint="give a package such as 'numpy>=2', 'NAME @ file:///PATH.whl', "
                "or a file of requirements with -r",
            ) from None
    return parsed


def local_path(text: str) -> Path | None:
    """Return the absolute path of a text that is a path, or None if it is a requirement.

    Raises:
        SourceError: the path does not exist.
    """
    if not text.startswith((".", "/")):
        return None
    path = Path(text).absolute()
    if not path.exists():
        raise SourceError(f"{text} does not exist", hint="give a wheel, a project or its sdist")
    return path


def wheel_at(path: Path) -> Requirement:
    """Return a requirement that only this wheel meets.

    Raises:
        InputError: its name is not that of a wheel.
    """
    try:
        name = parse_wheel_filename(path.name)[0]
    except InvalidWheelFilename as error:
        raise InputError(str(error), hint="restore the file name of the wheel") from None
    return Requirement(f"{name} @ {path.as_uri()}")


def applies(requirement: Requirement, target: Target, extras: Iterable[str] = ("",)) -> bool:
    """Return whether a requirement counts on a target, by its marker.

    Args:
        requirement: the requirement.
        target: the target.
        extras: the extras of the package that has the requirement, of which one must fit.

    Raises:
        InputError: the marker has no meaning, as ``os_name ~= "posix"`` has none.
    """
    if requirement.marker is None:
        return True
    environment = cast("dict[str, str]", target.environment())
    try:
        return any(requirement.marker.evaluate({**environment, "extra": one}) for one in extras)
    except (UndefinedComparison, UndefinedEnvironmentName):
        raise InputError(
            f"the marker of {requirement} has no meaning",
            hint="see https://packaging.python.org/specifications/dependency-specifiers",
        ) from None


def split_url(url: str) -> SplitResult:
    """Split a URL into its parts.

    Raises:
        InputError: it is none.
    """
    try:
        return urlsplit(url)
    except ValueError as error:
        raise InputError(f"{url} is no URL: {error}", hint="correct it") from None


def without_url(requirement: Requirement) -> Requirement:
    """Return the requirement without ``@ URL``: a wheelhouse has its package by name."""
    if requirement.url is None:
        return requirement
    named = Requirement(str(requirement))
    named.url = None
    return named


def existing_files(files: Iterable[Path], option: str = "-r") -> list[Path]:
    """Return files of requirements as absolute paths (so that none begins with ``-``).

    Raises:
        SourceError: one does not exist or is not a file.
    """
    found = []
    for file in files:
        if not file.is_file():
            raise SourceError(f"{file} is not a file", hint=f"check the path given with {option}")
        found.append(file.absolute())
    return found
