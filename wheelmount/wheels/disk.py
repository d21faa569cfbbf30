"""Convert file system errors to wheelmount's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wheelmount.disk import FULL, no_room
from wheelmount.errors import SourceError


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Convert file system errors in the context to errors that name the directory."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise no_room(error.errno, directory) from None
        raise SourceError(
            f"{error.filename or directory}: {error.strerror or error}",
            hint="check that it exists and that you may use it",
        ) from None
