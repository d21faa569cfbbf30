"""Credentials for downloads. uv writes none into a lock, so they are found where uv found them."""

from __future__ import annotations

import netrc
import os
import re
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from wheelmount.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")


class IndexAuth(httpx.Auth):
    """Basic authentication: of the URL itself, else by origin as the environment or netrc say.

    The environment is uv's variables, then its files.

    Args:
        environ: where ``UV_*INDEX*`` and ``NETRC`` are looked up.

    Raises:
        ConfigError: a netrc file that can't be parsed.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._by_origin = _index_credentials(environ)
        file = Path(environ.get("NETRC") or Path("~/.netrc").expanduser())
        try:
            self._netrc = netrc.netrc(file) if file.is_file() else None
        except netrc.NetrcParseError as error:
            raise ConfigError(f"{file}: {error}", hint="mend the file") from None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the header where credentials for the request's origin are known."""
        found = self._by_origin.get(_origin(str(request.url)))
        if request.url.username or request.url.password:
            found = request.url.username, request.url.password
        if found is None and self._netrc is not None:
            entry = self._netrc.authenticators(request.url.host)
            found = (entry[0], entry[2] or "") if entry else None
        if found is not None:
            yield from httpx.BasicAuth(*found).auth_flow(request)
        else:
            yield request


def _index_credentials(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """User and password by origin, from URLs and ``UV_INDEX_NAME_*``."""
    known: dict[str, tuple[str, str]] = {}
    for name, url in (*_of_environment(environ), *_of_files(environ)):
        parts = urlsplit(url)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if name:
            prefix = "UV_INDEX_" + re.sub(r"[^A-Za-z0-9]", "_", name).upper()
            user = environ.get(f"{prefix}_USERNAME", user)
            password = environ.get(f"{prefix}_PASSWORD", password)
        if user or password:
            known.setdefault(_origin(url), (user, password))
    return known


def _of_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name (or nothing) and URL of each index in ``[NAME=]URL`` lists."""
    for variable in _INDEX_VARIABLES:
        for entry in environ.get(variable, "").split():
            found = re.fullmatch(r"(?:([\w.-]+)=)?(.*)", entry)
            if found:
                yield found[1] or "", found[2]


def _of_files(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The same of uv's configuration, in the order in which it counts."""
    for file in _uv_files(environ):
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            continue  # uv says what is wrong with it
        if file.name == "pyproject.toml":
            table = table.get("tool", {}).get("uv", {})
        for settings in (table, table.get("pip", {})):
            for index in settings.get("index", ()):
                yield index.get("name", ""), index.get("url", "")
            for url in (settings.get("index-url", ""), *settings.get("extra-index-url", ())):
                yield "", url


def _uv_files(environ: Mapping[str, str]) -> Iterator[Path]:
    if "UV_CONFIG_FILE" in environ:
        yield Path(environ["UV_CONFIG_FILE"])
    elif "UV_NO_CONFIG" not in environ:
        here = Path.cwd()
        for folder in (here, *here.parents):
            yield folder / "uv.toml"
            yield folder / "pyproject.toml"
        home = Path(environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser())
        yield home / "uv" / "uv.toml"
        yield Path("/etc/uv/uv.toml")


def _origin(url: str) -> str:
    parts = urlsplit(url)
    port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    return f"{parts.scheme}://{parts.hostname}:{port}"
