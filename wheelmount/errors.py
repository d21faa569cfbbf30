"""The exceptions of wheelmount, each with the exit code that the command line ends with.

The codes 64-78 are those of ``sysexits.h``; they stay clear of the small codes that a user's own
script returns through ``wheelmount run`` and of 126 and above, which shells use. Only a
command that took too long ends with another, that of timeout(1).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from wheelmount.urls import without_credentials

FILE = "WHEELMOUNT_ERROR"
"""Variable of wheelmount's programs on hosts: path of the file that takes the error they end by."""


class WheelmountError(Exception):
    """Base of all errors that a user can act on.

    Args:
        message: the failure and its subject, in one line.
        hint: the remedy; None if there is none.
    """

    exit_code = 70  # EX_SOFTWARE: only where no subclass fits better

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        # Messages quote URLs of users and tools, which may contain credentials.
        self.message = without_credentials(message)
        self.hint = hint and without_credentials(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (an actor raises, the client reports): keep the hint.
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(kind: type[WheelmountError], message: str, hint: str | None) -> WheelmountError:
    return kind(message, hint=hint)


class InputError(WheelmountError):
    """An argument, option or requirement that cannot be understood."""

    exit_code = 64  # EX_USAGE


class ResolveError(WheelmountError):
    """Requirements that have no solution: unknown package, no wheel for the target, a conflict."""

    exit_code = 65  # EX_DATAERR


class WheelError(WheelmountError):
    """A wheel or wheelhouse that is damaged, incomplete or not what its hash says."""

    exit_code = 65  # EX_DATAERR


class SourceError(WheelmountError):
    """A directory, image or script that is missing or cannot be read."""

    exit_code = 66  # EX_NOINPUT


class HostError(WheelmountError):
    """A host that could not be started or reached, or that died."""

    exit_code = 68  # EX_NOHOST


class UnavailableError(WheelmountError):
    """Something this machine lacks: /dev/fuse, apptainer, a tool, a permission to use one."""

    exit_code = 69  # EX_UNAVAILABLE


class MountError(WheelmountError):
    """A mount point that cannot be used, or a mount that could not be made or taken down."""

    exit_code = 73  # EX_CANTCREAT


class StoreError(WheelmountError):
    """A host whose memory or disk cannot hold the bytes."""

    exit_code = 74  # EX_IOERR


class TransferError(WheelmountError):
    """Bytes that did not arrive, or did not arrive whole."""

    exit_code = 74  # EX_IOERR


class UnreachableError(TransferError):
    """A peer that could not be connected to; another route may work."""


class ContainerError(WheelmountError):
    """An image that does not build, or a container or overlay that does not start."""

    exit_code = 71  # EX_OSERR


class OverlayInUseError(ContainerError):
    """An overlay that another container writes to."""


class WaitError(WheelmountError):
    """A bounded wait that ran out."""

    exit_code = 75  # EX_TEMPFAIL


class CommandError(WheelmountError):
    """A command that did not end with exit code 0 on every host."""

    exit_code = 1


class OvertimeError(WaitError):
    """A command that exceeded its time limit and was ended."""

    exit_code = 124  # as timeout(1)


class ConfigError(WheelmountError):
    """A setting, in a file or the environment, that has no meaning."""

    exit_code = 78  # EX_CONFIG


def among(found: Iterable[object]) -> list[WheelmountError]:
    """Return the errors among results."""
    return [each for each in found if isinstance(each, WheelmountError)]


def hand_over(error: WheelmountError) -> bool:
    """Write an error where the client of this program on a host finds it; return whether it can."""
    if FILE not in os.environ:
        return False
    try:
        Path(os.environ[FILE]).write_text(written(error), encoding="utf-8")
    except OSError:  # its file system is full, which may be what the error says
        return False
    return True


def written(error: WheelmountError) -> str:
    """Return an error as text that ``read`` reads."""
    return json.dumps((type(error).__name__, error.message, error.hint))


def read(text: str) -> WheelmountError | None:
    """Return the error that ``written`` wrote; None if the text is another one."""
    try:
        kind, message, hint = json.loads(text)
        error = globals()[kind](message, hint=hint)
    except (ValueError, KeyError, TypeError):
        return None
    return error if isinstance(error, WheelmountError) else None


def handed_over(file: Path) -> WheelmountError | None:
    """Return the error that a program wrote to a file; None if it wrote none."""
    try:
        return read(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def tell(error: WheelmountError) -> int:
    """Hand an error over, or print it; return the exit code of a program that ends by it."""
    if not hand_over(error):
        hint = f"\nhint: {error.hint}" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)
    return error.exit_code
