"""Errors of the disk, as this package's own."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wheelmount.errors import SourceError, StoreError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Codes of errors where no room is left."""


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turn errors of the file system into our own, naming the directory."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StoreError(
                f"no space left for {directory}", hint="make room, or use another directory"
            ) from None
        raise SourceError(
            f"{error.filename or directory}: {error.strerror or error}",
            hint="check that it exists and that you may use it",
        ) from None
