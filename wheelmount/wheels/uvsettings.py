"""Settings of uv that a download has to share: variables ``UV_*``, ``uv.toml``, ``[tool.uv]``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TRUE = ("1", "true", "yes", "on", "t", "y")


def text(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """A setting, such as ``keyring-provider``; empty where it is not set."""
    variable = environ.get(f"UV_{name.upper().replace('-', '_')}")
    if variable is not None:
        return variable
    for table in tables(environ):
        for settings in (table, table.get("pip", {})):
            if name in settings:
                return str(settings[name])
    return ""


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """A setting that is on or off, such as ``native-tls``."""
    return text(name, environ).lower() in _TRUE


def insecure_hosts(environ: Mapping[str, str] = os.environ) -> list[str]:
    """``HOST`` or ``HOST:PORT`` of those whose certificates are not looked at."""
    found = environ.get("UV_INSECURE_HOST", "").replace(",", " ").split()
    for table in tables(environ):
        found += map(str, table.get("allow-insecure-host", ()))
    return [host.partition("://")[2].rstrip("/") if "://" in host else host for host in found]


def tables(environ: Mapping[str, str] = os.environ) -> Iterator[dict[str, Any]]:
    """The tables of uv's configuration files, in the order in which they count.

    One that can't be read is passed over: uv says what is wrong with it.
    """
    for file in _files(environ):
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            continue
        if file.name == "pyproject.toml":
            table = table.get("tool", {}).get("uv", {})
        yield table


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
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
