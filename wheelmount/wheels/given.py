"""Read files of requirements from standard input or a URL."""

from __future__ import annotations

import atexit
import hashlib
import sys
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from wheelmount import disk
from wheelmount.errors import SourceError, TransferError
from wheelmount.owned import make_folders
from wheelmount.wheels.reqfile import anchored
from wheelmount.wheels.requirements import split_url
from wheelmount.wheels.scratch import is_scratch, scratch

_FETCHED = "fetched-"
"""Prefix of the directory of a file that was fetched from a URL."""

LARGEST = 1 << 24
"""Largest size of a file of requirements, in bytes."""


def file_of(text: str, folder: Path) -> Path:
    """Return the file that ``-r`` or ``-c`` names: ``-`` is standard input, a URL is fetched.

    Relative paths in standard input count from the working directory.

    Args:
        text: as it was typed.
        folder: a private directory for files that are made; they are gone when the process ends.

    Raises:
        InputError: it is no URL.
        SourceError: there is nothing at the URL, or too much for a file of requirements.
        TransferError: it did not arrive.
    """
    if text == "-":
        given = _keep(sys.stdin.buffer.read(), "given-", "requirements.txt", folder)
        disk.write(given, anchored(given, Path.cwd()))
        return given
    if text.startswith(("http://", "https://")):
        name = PurePosixPath(split_url(text).path).name or "index"
        return _keep(_get(text), _FETCHED, name, folder)
    return Path(text)


def recorded(file: Path) -> str:
    """Return the path by which a file is recorded; it is one for all files of the same content.

    Each process has a file of its own, in a directory that it deletes.
    """
    place = file.parent.parent
    if not is_scratch(place):
        return str(file)
    return str(place.parent / file.relative_to(place))


def is_fetched(file: Path) -> bool:
    """Return whether a file came from a URL, so that its content is a stranger's."""
    return file.parent.name.startswith(_FETCHED)


def _keep(data: bytes, kind: str, name: str, folder: Path) -> Path:
    make_folders(folder)
    held = ExitStack()
    atexit.register(held.close)
    # By its content: what is asked for again is the same, see ``recorded``.
    place = held.enter_context(scratch(folder)) / f"{kind}{hashlib.sha256(data).hexdigest()[:16]}"
    place.mkdir()
    disk.write(place / name, data)
    return place / name


def _get(url: str) -> bytes:
    import httpx  # takes long to load

    from wheelmount.wheels.credentials import IndexAuth
    from wheelmount.wheels.fetch import read_url

    try:
        return read_url(url, IndexAuth().of(), LARGEST)[0]
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        raise SourceError(f"{url} cannot be downloaded: {code}", hint="check the URL") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise TransferError(f"{url} did not arrive: {reason}", hint="check the network") from None
