"""Write to file systems that may be full or read-only, and say which one is.

An error of a write names no file, and an error of a program no directory. The directories of the
settings are noted here, so that the one that is full or read-only can be found and named.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from wheelmount.errors import ConfigError, SourceError, StoreError, WheelmountError
from wheelmount.owned import FILE

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers that mean that no space is left."""

UNWRITABLE = (*FULL, errno.EROFS)
"""Error numbers that mean that nothing can be written to a file system."""

LITTLE = 1 << 16
"""Free bytes below which a file system counts as full, if a write failed on one."""

_settings: dict[Path, str] = {}
"""The variable that sets a directory, by directory; the last noted comes last."""


def note(directory: Path, setting: str) -> None:
    """Note that a directory is the value of a setting."""
    _settings.pop(directory, None)
    _settings[directory] = f"WHEELMOUNT_{setting.upper()}"


def write(file: Path, data: bytes | str, *, mode: int = FILE) -> None:
    """Write a file atomically, and leave no other file behind.

    Args:
        file: the file; its old content stays if this fails.
        data: its content.
        mode: its permissions, within the umask.

    Raises:
        OSError: it cannot be written; the error names it.
    """
    # Random, as machines that share a directory have processes of equal numbers. Only digits, by
    # which ``clear_fresh`` knows those of killed processes.
    fresh = file.with_name(f".{file.name}.{secrets.randbits(32)}")
    content = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    with about(file):
        # Other users may have put a link there.
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
            fresh.replace(file)
        except BaseException:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise


@contextlib.contextmanager
def about(path: Path) -> Iterator[None]:
    """Name a path in errors of the context that name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def explained(directory: Path | None = None) -> Iterator[None]:
    """Convert errors of full and read-only file systems in the context, as ``explain`` does.

    Args:
        directory: the directory that is written to, if it is known.
    """
    try:
        yield
    except OSError as error:
        explanation = explain(error, directory)
        if explanation is None:
            raise
        raise explanation from None


def explain(error: OSError, directory: Path | None = None) -> WheelmountError | None:
    """Return the error for users that a write to a full or read-only file system stands for.

    Must be called on the machine of the file system.

    Args:
        error: the error of the write.
        directory: the directory that is written to, if it is known.

    Returns:
        An error that names the directory and the reason; None if the error is another one.
    """
    if error.errno == errno.ENOENT and "temporary directory" in (error.strerror or ""):
        return StoreError(  # as Python's ``tempfile`` says it
            str(error.strerror), hint="free some space in one of them, or set TMPDIR to another"
        )
    if error.errno not in UNWRITABLE:
        return None
    return no_room(error.errno, _place(error, directory))


def no_room(number: int, directory: Path | None) -> WheelmountError:
    """Return an error that says that nothing can be written.

    Args:
        number: one of ``UNWRITABLE``.
        directory: where; None if that is unknown.
    """
    place = "a file" if directory is None else str(directory)
    setting = None if directory is None else _setting(directory)
    another = _another(setting)
    if number == errno.EROFS:
        kind = ConfigError if setting else SourceError
        return kind(f"{place} is on a read-only file system", hint=another)
    if number == errno.EDQUOT:
        return StoreError(
            f"no space left for {place}: your quota is used up",
            hint=f"delete some of your files there, or {another}",
        )
    if directory is not None and _lacks(directory, inodes=True):
        return StoreError(
            f"no inodes left for {place}: its file system cannot hold more files",
            hint=f"delete some files there, or {another}",
        )
    return StoreError(f"no space left for {place}", hint=f"free some space there, or {another}")


def unwritable(directory: Path) -> bool:
    """Return whether a directory's file system is full or read-only."""
    return any(_is(directory, number) for number in (errno.ENOSPC, errno.EROFS))


def full(*directories: Path) -> Path | None:
    """Return the first of some directories, and those of settings, that is full; None if none is.

    For programs that only say that something is.
    """
    candidates = (*directories, *reversed(_settings), *_temporary())
    return next((each for each in candidates if _is(each, errno.ENOSPC)), None)


def unusable(directory: Path, error: OSError) -> WheelmountError:
    """Return the error for users that says why a directory cannot be made or used."""
    setting = _setting(directory)
    kind = ConfigError if setting else SourceError
    return explain(error, directory) or kind(
        f"{directory} cannot be used: {error.strerror or error}",
        hint=f"set {setting} to a directory that you may write to"
        if setting
        else "check the path, and that you may write there",
    )


def without_locks(directory: Path) -> WheelmountError:
    """Return the error that says that files in a directory cannot be locked."""
    setting = _setting(directory)
    kind = ConfigError if setting else SourceError
    return kind(
        f"{directory} is on a file system without locks",
        hint=f"{_another(setting)}, or have it mounted with locks (as by flock for Lustre)",
    )


def _another(setting: str | None) -> str:
    return f"set {setting} to another directory" if setting else "use another directory"


def _place(error: OSError, directory: Path | None) -> Path | None:
    """Return the directory that an error is about; None if it is unknown."""
    named = error.filename2 or error.filename
    if isinstance(named, str | bytes | os.PathLike):
        path = Path(os.fsdecode(named)).absolute()
        above = path if path.is_dir() else path.parent
        candidates = [each for each in (directory, *_settings) if each and _holds(each, above)]
        return max(candidates, key=lambda each: len(each.parts), default=above)
    known = [*([directory] if directory else []), *reversed(_settings), *_temporary()]
    return next((each for each in known if _is(each, error.errno or 0)), directory)


def _setting(directory: Path) -> str | None:
    """Return the variable that sets a directory, or one above it."""
    above = [each for each in _settings if _holds(each, directory)]
    return _settings[max(above, key=lambda each: len(each.parts))] if above else None


def _holds(above: Path, path: Path) -> bool:
    return path == above or above in path.parents


def _temporary() -> list[Path]:
    """Return the directories of temporary files."""
    found = [Path(given)] if (given := os.environ.get("TMPDIR")) else []
    with contextlib.suppress(FileNotFoundError):  # none can be written to
        found.append(Path(tempfile.gettempdir()))
    return found


def _is(directory: Path, number: int) -> bool:
    """Return whether a file system is in the state that an error number names."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    if number == errno.EROFS:
        with contextlib.suppress(OSError):
            return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)
        return False
    return _lacks(directory, inodes=False) or _lacks(directory, inodes=True)


def _lacks(directory: Path, *, inodes: bool) -> bool:
    """Return whether a file system has no free inodes, or next to no free bytes."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        state = os.statvfs(directory)
    except OSError:
        return False
    if inodes:
        return state.f_files > 0 and state.f_favail == 0  # some file systems do not count
    return state.f_blocks > 0 and state.f_bavail * state.f_frsize < LITTLE
