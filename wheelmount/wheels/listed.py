"""List the versions of a package in an index (PEP 503 and 691)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
from packaging.utils import canonicalize_name

from wheelmount import typed
from wheelmount.errors import WheelmountError
from wheelmount.wheels.credentials import IndexAuth
from wheelmount.wheels.fetch import read_url
from wheelmount.wheels.missing import fitting
from wheelmount.wheels.target import Target

_ACCEPTED = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
_LARGEST = 1 << 26
_LINK = re.compile(r"""href\s*=\s*["']?([^"'\s>]+)""", re.IGNORECASE)


def offered_versions(package: str, index: str, target: Target) -> list[str]:
    """Return the versions of a package that have a wheel for a target, newest first.

    Args:
        package: its name.
        index: URL of the index, as in a lock.
        target: the target that wheels must fit.

    Returns:
        The versions; none if the index does not list them.
    """
    name = canonicalize_name(package)
    if not index.startswith(("http://", "https://")):
        return []
    url = f"{index.rstrip('/')}/{name}/"
    try:
        page, kind = read_url(url, IndexAuth().of(index), _LARGEST, {"Accept": _ACCEPTED})
        files = [Path(file) for file in _files(page, kind)]
    except (httpx.HTTPError, httpx.InvalidURL, WheelmountError, ValueError, KeyError, TypeError):
        return []
    found = {version for version, _ in fitting(files, target).get(name, ())}
    return [str(version) for version in sorted(found, reverse=True)]


def _files(page: bytes, kind: str) -> Iterator[str]:
    if "json" in kind:
        table = typed.decode(page, dict[str, Any])
        yield from (str(file["filename"]) for file in table["files"])
    else:
        links = (urlsplit(link).path for link in _LINK.findall(page.decode(errors="replace")))
        yield from (unquote(path.rpartition("/")[2]) for path in links)
