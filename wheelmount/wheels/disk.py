"""Convert file system errors to wheelmount's errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wheelmount.errors import SourceError, StoreError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers that mean that no space is left."""


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Convert file system errors in the context to errors that name the directory."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StoreError(
                f"no space left for {directory}", hint="free some space, or use another directory"
            ) from None
        raise SourceError(
            f"{error.filename or directory}: {error.strerror or error}",
            hint="check that it exists and that you may use it",
        ) from None
