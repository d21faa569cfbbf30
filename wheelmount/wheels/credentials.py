"""Find credentials for downloads, in the same places as uv, which writes none into a lock."""

from __future__ import annotations

import netrc
import os
import re
import subprocess
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from wheelmount import child
from wheelmount.errors import ConfigError
from wheelmount.urls import without_credentials
from wheelmount.wheels import uvsettings
from wheelmount.wheels.reqfile import INDEX_OPTIONS, read_lines

KEYRING_TIMEOUT = 30.0
"""Seconds that ``keyring`` may take to answer."""

_REFUSED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND)


@dataclass(frozen=True, slots=True)
class _Index:
    """An index with user and password; empty where none are given."""

    url: str
    user: str = field(repr=False)
    password: str = field(repr=False)


class IndexAuth:
    """Basic authentication from uv's sources: URLs, variables, files, netrc and keyring.

    Args:
        environ: environment with ``UV_*`` and ``NETRC``.
        files: files of requirements, whose ``--index-url`` and so on may contain credentials.

    Raises:
        ConfigError: a netrc file cannot be read.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, files: Iterable[Path] = ()) -> None:
        self._indexes = list(_indexes(environ, files))
        self._keyring = uvsettings.text("keyring-provider", environ) == "subprocess"
        self._asked: dict[tuple[str, str], tuple[str, str] | None] = {}
        self._lock = threading.Lock()
        file = Path(environ.get("NETRC") or Path("~/.netrc").expanduser())
        try:
            self._netrc = netrc.netrc(file) if file.is_file() else None
        except (netrc.NetrcParseError, OSError, UnicodeDecodeError) as error:
            reason = "it is no UTF-8"
            if isinstance(error, netrc.NetrcParseError):  # whose text may have a password
                reason = f"its syntax is wrong at line {error.lineno or 'unknown'}"
            elif isinstance(error, OSError):
                reason = error.strerror or str(error)
            raise ConfigError(
                f"{file} cannot be read: {reason}",
                hint="correct the file, or name another one in NETRC",
            ) from None

    def of(self, index: str = "") -> httpx.Auth:
        """Return the authentication for downloads of files.

        Args:
            index: URL of the files' index, as in a lock; empty if the lock has none.
        """
        return _Auth(self, index)

    def candidates(self, url: httpx.URL, index: str) -> Iterator[tuple[str, str]]:
        """Yield users and passwords for a URL, the likeliest first, none of another origin."""
        if url.username or url.password:
            yield url.username, url.password
        near = [one for one in self._indexes if _origin(one.url) == _origin(str(url))]
        near.sort(key=lambda one: _nearness(one.url, str(url)), reverse=True)
        near.sort(key=lambda one: one.url.rstrip("/") != index.rstrip("/"))
        for one in near:
            if one.password:
                yield one.user, one.password
        if self._netrc is not None and (entry := self._netrc.authenticators(url.host)):
            yield entry[0], entry[2] or ""
        for one in near:
            if one.user and not one.password:
                yield self._ask(one.url, url.host, one.user) or (one.user, "")
        if self._keyring:
            for one in near or [_Index(str(url.copy_with(userinfo=b"")), "", "")]:
                if not one.user and (found := self._ask(one.url, url.host, "")):
                    yield found

    def _ask(self, url: str, host: str, user: str) -> tuple[str, str] | None:
        """Look up user and password of an index, or of its host, in the keyring."""
        if not self._keyring:
            return None
        with self._lock:
            if (url, user) not in self._asked:
                found = (_keyring(place, user) for place in (url, host))
                self._asked[url, user] = next(filter(None, found), None)
            return self._asked[url, user]


class _Auth(httpx.Auth):
    def __init__(self, known: IndexAuth, index: str) -> None:
        self._known = known
        self._index = index

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Try the credentials known for the request's origin, one after the other."""
        tried = set()
        # One by one: to ask a keyring for what is not needed may take long.
        for user, password in self._known.candidates(request.url, self._index):
            if (user, password) in tried:
                continue
            tried.add((user, password))
            response = yield next(httpx.BasicAuth(user, password).auth_flow(request))
            # A private index answers 404 without credentials.
            if response.status_code not in _REFUSED:
                return
        if not tried:
            yield request


def _indexes(environ: Mapping[str, str], files: Iterable[Path]) -> Iterator[_Index]:
    lines = (line for line in read_lines(files) if line.option in INDEX_OPTIONS)
    named = [("", line.text) for line in lines]
    variables = [(name, url) for _, name, url in uvsettings.of_variables(environ)]
    for name, url in (*variables, *named, *_of_files(environ)):
        try:
            parts = urlsplit(url)
        except ValueError:
            continue  # uv reports the fault
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if name:
            prefix = "UV_INDEX_" + re.sub(r"[^A-Za-z0-9]", "_", name).upper()
            user = environ.get(f"{prefix}_USERNAME", user)
            password = environ.get(f"{prefix}_PASSWORD", password)
        if parts.scheme in ("http", "https"):
            yield _Index(without_credentials(url), user, password)


def _of_files(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name (maybe empty) and URL of each index in uv's configuration files, by precedence."""
    for table in uvsettings.tables(environ):
        for settings in (table, table.get("pip", {})):
            for index in settings.get("index", ()):
                yield index.get("name", ""), index.get("url", "")
            for url in (
                settings.get("index-url", ""),
                *settings.get("extra-index-url", ()),
                *settings.get("find-links", ()),
            ):
                yield "", url


def _keyring(place: str, user: str) -> tuple[str, str] | None:
    """Run ``keyring`` as uv does; return user and password."""
    command = ["keyring", "get", place, user]
    if not user:
        command = ["keyring", "--mode", "creds", "get", place]
    try:
        done = child.run(command, timeout=KEYRING_TIMEOUT)
    except (OSError, subprocess.SubprocessError):
        return None
    said = done.stdout.splitlines()
    if done.code or len(said) < (1 if user else 2):
        return None
    return (user, said[0]) if user else (said[0], said[1])


def _nearness(index: str, url: str) -> int:
    """Count the leading path components that the URLs of an index and a file have in common."""
    ones, others = (urlsplit(one).path.strip("/").split("/") for one in (index, url))
    common = 0
    for one, other in zip(ones, others, strict=False):
        if one != other:
            break
        common += 1
    return common


def _origin(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.hostname}:{port}"
