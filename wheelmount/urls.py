"""Remove credentials from URLs in texts that leave the process."""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

# The scheme is bounded, so that a long word is not read again from each of its letters.
_URL = re.compile(r"[a-z][a-z0-9+.\-]{0,40}://\S+", re.IGNORECASE)

# Names in a query whose values grant access: ?token=, &X-Amz-Signature=, ?sig=, ?apikey=.
_SECRET = re.compile(
    r"token|secret|passw|pwd|signature|credential|auth|session|jwt|api[-_]?key|access[-_]?key"
    r"|private[-_]?key|^(?:key|sig|sas|policy)$",
    re.IGNORECASE,
)

_T = TypeVar("_T")


def without_credentials(text: str) -> str:
    """Remove user, password and secrets of the query from each URL in a text.

    The user is kept where it is part of the address, as in ``ssh://git@github.com``.
    """
    return _URL.sub(lambda found: _public(found[0]), text)


def public(data: _T) -> _T:
    """Remove credentials from all texts in nested lists and tables, as of JSON or TOML."""
    changed: Any = data
    if isinstance(data, str):
        changed = without_credentials(data)
    elif isinstance(data, dict):
        changed = {name: public(value) for name, value in data.items()}
    elif isinstance(data, list | tuple):
        changed = type(data)(public(value) for value in data)
    return cast("_T", changed)


def _public(url: str) -> str:
    scheme, _, rest = url.partition("://")
    place, mark, fragment = rest.partition("#")
    place, asks, query = place.partition("?")
    authority, slash, path = place.partition("/")
    if "@" in rest and "@" not in authority and _is_broken(f"{scheme}://{authority}"):
        # The password has a character that ends an authority: remove all that may belong to it.
        return _public(f"{scheme}://{rest.rpartition('@')[2]}")
    user, at, host = authority.rpartition("@")
    if at and scheme.lower().endswith("ssh"):
        host = f"{user.partition(':')[0]}@{host}"
    query, fragment = _without_secrets(query), _without_secrets(fragment)
    asked = asks + query if query else ""
    return f"{scheme}://{host}{slash}{path}{asked}{mark + fragment if fragment else ''}"


def _is_broken(url: str) -> bool:
    """Return whether the port, or the host, of a URL is invalid."""
    try:
        return urlsplit(url).port is None and ":" in urlsplit(url).netloc.rpartition("]")[2]
    except ValueError:
        return True


def _without_secrets(query: str) -> str:
    kept = [one for one in query.split("&") if not _SECRET.search(unquote(one.partition("=")[0]))]
    return "&".join(kept)
