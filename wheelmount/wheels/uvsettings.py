"""Read uv's settings for downloads: variables ``UV_*``, ``uv.toml``, ``[tool.uv]``."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit

from wheelmount import toml, typed
from wheelmount.errors import ConfigError
from wheelmount.urls import public, without_credentials

_OF_INDEXES = frozenset(
    {
        *("index", "index-url", "extra-index-url", "find-links", "no-index", "index-strategy"),
        *("keyring-provider", "allow-insecure-host", "native-tls", "system-certs", "offline"),
        *("cache-dir", "no-cache", "prerelease", "exclude-newer"),
    }
)

_INDEX_VARIABLES = (
    "UV_DEFAULT_INDEX",
    "UV_INDEX",
    "UV_INDEX_URL",
    "UV_EXTRA_INDEX_URL",
    "UV_FIND_LINKS",
)

_INDEX_SETTINGS = ("index", "index-url", "extra-index-url", "find-links", "no-index")

_OVERRIDES = "override-dependencies"

PROJECT_NAME = "pyproject.toml"

_OF_CHOICE = (
    *("resolution", "prerelease", "exclude-newer", "exclude-newer-package", "index-strategy"),
    *("no-deps", "no-sources", "torch-backend", "constraint-dependencies", _OVERRIDES),
    *("exclude-dependencies", "dependency-metadata"),
)

_TRUE = ("1", "true", "yes", "on", "t", "y")


class _Index(TypedDict, total=False):
    name: str
    url: str


_Pip = TypedDict(
    "_Pip",
    {
        "index": list[_Index],
        "index-url": str,
        "extra-index-url": list[str],
        "find-links": list[str],
        "allow-insecure-host": list[str],
        "override-dependencies": list[str],
    },
    total=False,
)


class _Settings(_Pip, total=False):
    pip: _Pip


class _Tools(TypedDict, total=False):
    uv: dict[str, Any]


class _Project(TypedDict, total=False):
    tool: _Tools


def text(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a setting, such as ``keyring-provider``; empty if it is not set."""
    variable = environ.get(f"UV_{name.upper().replace('-', '_')}")
    if variable is not None:
        return variable
    for table in tables(environ):
        for settings in (table, table.get("pip", {})):
            if name in settings:
                return str(settings[name])
    return ""


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return a setting that is on or off, such as ``native-tls``."""
    return text(name, environ).lower() in _TRUE


def insecure_hosts(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return ``HOST`` or ``HOST:PORT`` of hosts whose certificates are not verified."""
    found = environ.get("UV_INSECURE_HOST", "").replace(",", " ").split()
    for table in tables(environ):
        found += map(str, table.get("allow-insecure-host", ()))
    return [host.partition("://")[2].rstrip("/") if "://" in host else host for host in found]


def of_indexes(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the settings of indexes in uv's configuration, as one table."""
    found: dict[str, Any] = {}
    for table in tables(environ):
        for settings in (table, table.get("pip", {})):
            for name in _OF_INDEXES & settings.keys():
                if isinstance(settings[name], list):
                    found[name] = [*found.get(name, ()), *settings[name]]
                else:
                    found.setdefault(name, settings[name])
    return found


def of_variables(environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str, str]]:
    """Yield variable, name (maybe empty) and URL or path of each index that variables list.

    Those of ``UV_FIND_LINKS`` are directories and pages with links to wheels.
    """
    for variable in _INDEX_VARIABLES:
        for entry in re.split(r"[\s,]+", environ.get(variable, "")):
            found = re.fullmatch(r"(?:([\w.-]+)=)?(.+)", entry)
            if found:
                yield variable, found[1] or "", found[2]


def addresses(environ: Mapping[str, str] = os.environ) -> list[object]:
    """Return where uv looks for packages, by variables and by its configuration.

    There are no credentials among them, so that a new password makes no other request.
    """
    found: list[object] = [
        (variable, name, without_credentials(url) if "://" in url else str(Path(url).absolute()))
        for variable, name, url in of_variables(environ)
    ]
    settings = of_indexes(environ)
    found += [(name, public(settings[name])) for name in _INDEX_SETTINGS if name in settings]
    return [*found, flag("no-index", environ)]


def of_choice(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the settings, except indexes, that change which versions uv chooses."""
    names = {f"UV_{name.upper().replace('-', '_')}" for name in _OF_CHOICE}
    found: dict[str, Any] = {name: environ[name] for name in sorted(names & environ.keys())}
    for table in tables(environ):
        for settings in (table, table.get("pip", {})):
            for name in _OF_CHOICE:
                if name in settings:
                    found.setdefault(name, []).append(settings[name])
    return found


def overrides(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the requirements of ``override-dependencies``."""
    return [str(one) for table in tables(environ) for one in table.get(_OVERRIDES, ())]


def files(variable: str, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the files that a variable of uv lists, such as ``UV_CONSTRAINT``, without URLs."""
    return [Path(one) for one in environ.get(variable, "").split() if "://" not in one]


def use_indexes(default: str, more: Sequence[str], links: Sequence[str]) -> None:
    """Make uv and downloads of this process use indexes of the command line.

    They are passed as variables: other users can see the arguments of uv.

    Args:
        default: URL of the default index; empty for PyPI.
        more: URLs of indexes that are searched before it.
        links: URLs or paths of directories and pages with links to wheels.
    """
    if default:
        os.environ["UV_DEFAULT_INDEX"] = default
    if more:
        os.environ["UV_INDEX"] = " ".join((*more, os.environ.get("UV_INDEX", ""))).strip()
    if links:
        given = [one if "://" in one else str(Path(one).absolute()) for one in links]
        before = os.environ.get("UV_FIND_LINKS", "")
        os.environ["UV_FIND_LINKS"] = ",".join((*given, *([before] if before else [])))


def passed_over(environ: Mapping[str, str] = os.environ) -> str:
    """Return a warning if only pip's configuration names an index; empty otherwise."""
    own = [name for name in environ if re.fullmatch(r"UV_(?:DEFAULT_)?INDEX(?:_URL)?", name)]
    if own or any(
        {"index", "index-url"} & {*table, *table.get("pip", {})} for table in tables(environ)
    ):
        return ""
    for where, url in _of_pip(environ):
        with contextlib.suppress(ValueError):  # it is no URL
            if urlsplit(url).hostname not in (None, "pypi.org"):
                return (
                    f"{where} names the index {url}, which uv does not read: set UV_DEFAULT_INDEX"
                )
    return ""


def _of_pip(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if "PIP_INDEX_URL" in environ:
        yield "PIP_INDEX_URL", environ["PIP_INDEX_URL"]
    home = Path("~").expanduser()
    places = [Path(sys.prefix, "pip.conf"), home / ".pip" / "pip.conf"]
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    places += [config / "pip" / "pip.conf", Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf")]
    if "PIP_CONFIG_FILE" in environ:
        places.insert(0, Path(environ["PIP_CONFIG_FILE"]))
    for file in places:
        parser = configparser.RawConfigParser()
        with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
            parser.read(file, encoding="utf-8")
            for section in ("global", "install", "download"):
                if url := parser.get(section, "index-url", fallback=""):
                    yield str(file), url


def tables(environ: Mapping[str, str] = os.environ) -> Iterator[dict[str, Any]]:
    """Yield the tables of uv's configuration files, by precedence.

    Of the root of the project's workspace and the directories above it, only the nearest with
    settings counts, and in it ``uv.toml``. Relative paths of indexes are made absolute: they start
    at the directory of their file. Unreadable and malformed files are skipped: uv reports them.

    Raises:
        ConfigError: uv would wait for a file, which is a pipe.
    """
    if "UV_CONFIG_FILE" in environ:
        yield from _read(Path(environ["UV_CONFIG_FILE"]))
    elif "UV_NO_CONFIG" not in environ:
        here = Path.cwd()
        names = ("uv.toml", PROJECT_NAME)
        for folder in (here, *here.parents):  # uv opens more of them than it takes settings from
            for name in names:
                _refuse_pipe(folder / name)
        root = _workspace_root(here)
        files = [folder / name for folder in (root, *root.parents) for name in names]
        yield from next(filter(None, map(_read, files)), [])
        home = Path(environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser())
        yield from _read(home / "uv" / "uv.toml")
        yield from _read(Path("/etc/uv/uv.toml"))


def _workspace_root(here: Path) -> Path:
    """Return the root of the workspace of the project that a directory is in; else the directory.

    A project that is no member of a workspace is its own root.
    """
    above = (here, *here.parents)
    project = next((each for each in above if (each / PROJECT_NAME).is_file()), here)
    own = _project_table(project)
    for folder in (project, *project.parents):
        workspace: Any = own if folder == project else _project_table(folder)
        for name in ("tool", "uv", "workspace"):
            workspace = workspace.get(name) if isinstance(workspace, dict) else None
        if isinstance(workspace, dict):
            inside = _matches(project, folder, workspace.get("members"))
            outside = _matches(project, folder, workspace.get("exclude"))
            if folder == project or (inside and not outside):
                return folder
            break
    return project if "project" in own else here


def _project_table(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return toml.read(folder / PROJECT_NAME) or {}
    return {}


def _matches(project: Path, root: Path, patterns: object) -> bool:
    with contextlib.suppress(OSError, ValueError, NotImplementedError):
        return any(
            project in root.glob(pattern)
            for pattern in (patterns if isinstance(patterns, list) else ())
            if isinstance(pattern, str)
        )
    return False


def _refuse_pipe(file: Path) -> None:
    with contextlib.suppress(OSError):
        if file.is_fifo():  # maybe of another user, in a directory such as /tmp
            raise ConfigError(
                f"{file} is a pipe, which uv would wait for",
                hint="remove it, work in another directory, or set UV_NO_CONFIG=1",
            )


def _read(file: Path) -> list[dict[str, Any]]:
    """Return the table of a configuration file; none if it has no settings."""
    _refuse_pipe(file)
    try:
        table = toml.read(file)
        if table is not None and file.name == PROJECT_NAME:
            table = typed.convert(table, _Project).get("tool", {}).get("uv")
        if table is None:
            return []
        typed.convert(table, _Settings)
    except (OSError, ValueError):
        return []
    for settings in (table, table.get("pip", {})):
        _anchor(settings, file.parent.absolute())
    return [table]


def _anchor(settings: dict[str, Any], folder: Path) -> None:
    """Make relative paths of indexes absolute."""

    def at(place: str) -> str:
        return place if "://" in place else str(folder / place)

    for name in ("extra-index-url", "find-links"):
        if name in settings:
            settings[name] = [at(one) for one in settings[name]]
    if "index-url" in settings:
        settings["index-url"] = at(settings["index-url"])
    for index in settings.get("index", ()):
        if "url" in index:
            index["url"] = at(index["url"])
