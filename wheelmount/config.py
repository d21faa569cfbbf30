"""Settings: a flag beats ``WHEELMOUNT_*`` in the environment, which beats a file.

There are two files. The user's own may set everything. That of a project, the nearest from the
working directory upwards (``wheelmount.toml``, or a ``pyproject.toml`` that has a
``[tool.wheelmount]`` table), beats it, but may only set how bytes travel and how long to wait,
unless the user trusts it: see ``trust``. Flags are applied by the command line with
``dataclasses.replace``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from wheelmount import logind
from wheelmount.errors import ConfigError, SourceError
from wheelmount.trust import Found, Trusted, is_own, is_private, places, private, read

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger("wheelmount")

MIB = 1 << 20

FILE = "wheelmount.toml"
"""Name of a file with nothing but settings."""

OF_PROJECTS = frozenset(
    {
        "adapter",
        "block_size",
        "compress",
        "fanout",
        "fetch_timeout",
        "in_flight",
        "queue_timeout",
        "read_timeout",
        "ring",
        "start_timeout",
        "transport",
        "verify_rate",
    }
)
"""What a project's file may set by itself: nothing that says where code runs, or which."""

MEMORY = "memory"
"""Value of ``store``: not on a disk."""

_DIRECTORIES = ("store", "runtime_dir", "cache_dir", "state_dir")
"""Settings that are paths of directories."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set, with its default."""

    hosts: str = ""
    """Where hosts come from when ``--hosts`` is not given; default the session ``default`` if it is
    up, else ``local:1``."""

    python: str = ""
    """Python with wheelmount on hosts that ssh or Slurm starts; default the path of this one, and
    in pods ``python``."""

    block_size: int = 0
    """Bytes that travel, are hashed and arrive as one: a multiple of 4096, or 0 to choose."""

    in_flight: int = 6
    """Blocks that one host fetches at the same time, shared by all trees; fewer over a slow link,
    more over a long one."""

    ring: int = 32
    """Blocks the client keeps staged in memory: its bound is ``ring * block_size`` bytes."""

    fanout: int = 0
    """Hosts that one host sends a block to; 0 to choose by size and number of hosts."""

    compress: str = "auto"
    """Whether bytes travel compressed: ``auto`` where that is faster, ``always`` or ``never``."""

    transport: str = "auto"
    """How bytes of files travel: ``rdma`` by RDMA devices and in no other way, ``tcp`` by none, or
    ``auto`` for what is faster from one host to another, where both have a device."""

    read_timeout: float = 60.0
    """Seconds a read in the mount waits for its bytes before it fails with EIO."""

    fetch_timeout: float = 30.0
    """Seconds without a byte after which a block is asked for again."""

    start_timeout: float = 60.0
    """Seconds a host, a mount or a container may take to come up."""

    queue_timeout: float = 86400.0
    """Seconds a Slurm job may wait in the queue, or pods until they run."""

    store: str = MEMORY
    """Where each host keeps what it receives: ``memory``, or a directory."""

    verify_rate: float = 0.0
    """MB a second at which hosts verify stores on a disk over and over; 0 for not at all."""

    adapter: str = "auto"
    """How a mount is shown: ``auto`` for the best way a host allows, else the name of one."""

    access: str = "source"
    """Which users may enter root's mounts: ``source`` for those that may enter the source,
    ``private`` for the owner, ``public`` for all users of a host."""

    runtime_dir: str = "/tmp"  # noqa: S108 - a private 0700 directory is made in it
    """Directory under which sockets, logs and the state of sessions are kept.

    ``/tmp`` and not ``$XDG_RUNTIME_DIR``: that one goes away at logout, mounts do not.
    """

    cache_dir: str = dataclasses.field(
        default_factory=lambda: platformdirs.user_cache_dir("wheelmount")
    )
    """Directory for wheelhouses and images that can be made again."""

    cache_size: int = 0
    """Bytes that ``wheelmount install`` lets the cache grow to; 0 for no bound."""

    state_dir: str = dataclasses.field(
        default_factory=lambda: platformdirs.user_state_dir("wheelmount")
    )
    """Directory for what should stay: overlays of containers."""

    def __post_init__(self) -> None:
        if self.block_size < 0 or self.block_size % 4096:
            raise ConfigError(
                f"block_size is {self.block_size}",
                hint="give a positive multiple of 4096 bytes, or 0 to choose",
            )
        for name in ("in_flight", "ring"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give 1 or more")
        if self.fanout < 0:
            raise ConfigError(f"fanout is {self.fanout}", hint="give 1 or more, or 0 to choose")
        if self.compress not in ("auto", "always", "never"):
            raise ConfigError(f"compress is {self.compress!r}", hint="give auto, always or never")
        if self.transport not in ("auto", "rdma", "tcp"):
            raise ConfigError(f"transport is {self.transport!r}", hint="give auto, rdma or tcp")
        if self.access not in ("source", "private", "public"):
            raise ConfigError(f"access is {self.access!r}", hint="give source, private or public")
        if self.verify_rate < 0:
            raise ConfigError(f"verify_rate is {self.verify_rate}", hint="give MB a second, or 0")
        for name in ("read_timeout", "fetch_timeout", "start_timeout", "queue_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give seconds above 0")

    def private_runtime(self) -> Path:
        """The user's own runtime directory, made 0700 if it is not there."""
        return _private_place(Path(self.runtime_dir))

    def private_store(self, *, mounted: bool) -> Path:
        """The user's own store directory, made 0700 if it is not there.

        Args:
            mounted: whether stores in memory are file systems of their own, mounted there.
        """
        if self.store == MEMORY and mounted:
            return private_directory(self.private_runtime() / "stores")
        memory = self.store == MEMORY
        return _private_place(logind.memory_place(os.getuid()) if memory else Path(self.store))

    def own_cache(self) -> Path:
        """The cache, made if it is not there. Only this user may write to it.

        Code is taken from there, and what is cleared is removed without another look.

        Raises:
            ConfigError: others may write there, or it cannot be made.
        """
        cache = Path(self.cache_dir)
        try:
            cache.mkdir(mode=0o755, parents=True, exist_ok=True)
            own = is_own(cache)
        except OSError as error:
            raise ConfigError(
                f"{cache} cannot be used: {error.strerror}", hint="set WHEELMOUNT_CACHE_DIR"
            ) from None
        if not own:
            raise ConfigError(
                f"{cache} is not a directory that only you may write to",
                hint=f"run: chmod go-w {cache}; or set WHEELMOUNT_CACHE_DIR elsewhere",
            )
        return cache


def private_directory(path: Path) -> Path:
    """Make ``path`` (and its parents) with mode 0700, or check that it is ours already.

    Raises:
        ConfigError: another user owns it, it is a symlink, or others may enter it.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            found = path.lstat()
            break
    if not private(found):
        ours = found.st_uid == os.getuid()
        raise ConfigError(
            f"{path} is not a private directory of yours",
            hint=f"run: chmod 700 {path}; or remove it"
            if ours
            else "set WHEELMOUNT_RUNTIME_DIR and WHEELMOUNT_STORE elsewhere",
        )
    return path


def _private_place(parent: Path) -> Path:
    """This user's own directory in one that all may write to, the same each time.

    Where another user has made one of its name, it has a name that none could foresee.

    Raises:
        ConfigError: see ``private_directory``.
    """
    path = parent / f"wheelmount-{os.getuid()}"
    if is_private(path):
        return path
    # By age, for the first of them is in use; also where the name is free again.
    for other in sorted(parent.glob(f"{path.name}-*")):
        if is_private(other):
            return other
    try:
        taken = path.lstat().st_uid != os.getuid()
    except FileNotFoundError:
        taken = False
    if not taken:
        return private_directory(path)
    log.warning("security: %s was made by another user; another name is taken", path)
    return private_directory(
        path.with_name(f"{path.name}-{int(time.time()):x}-{secrets.token_hex(4)}")
    )


DEFAULT = "default"
"""Origin of a setting that has its default."""


def load(environ: Mapping[str, str] = os.environ, directory: Path | None = None) -> Settings:
    """Read the settings in force.

    Args:
        environ: the environment to look for ``WHEELMOUNT_*`` in.
        directory: where the search for a file starts; default the working directory.

    Raises:
        ConfigError: an unknown name or a value of the wrong type, naming where it stands.
    """
    return load_with_origins(environ, directory)[0]


def load_with_origins(
    environ: Mapping[str, str] = os.environ, directory: Path | None = None
) -> tuple[Settings, dict[str, str]]:
    """Read the settings in force, and by name where each comes from: see ``load``."""
    values: dict[str, Any] = {}
    origins = {field.name: DEFAULT for field in dataclasses.fields(Settings)}

    def take(table: Mapping[str, Any], where: str) -> None:
        for name, value in table.items():
            values[name] = _convert(name, value, where)
            origins[name] = where

    environment = {
        name: environ[variable]
        for name in origins
        if (variable := f"WHEELMOUNT_{name.upper()}") in environ
    }
    own = _own()
    take(own, str(own_file()))
    take(*_of_project(directory, _trusted(environ, own)))
    for name, value in environment.items():
        take({name: value}, f"WHEELMOUNT_{name.upper()}")
    return Settings(**values), origins


def own_file() -> Path:
    """The user's own file of settings; need not be there."""
    return platformdirs.user_config_path("wheelmount") / FILE


def trust(directory: Path, *, trusted: bool = True) -> tuple[Path, dict[str, Any]]:
    """Let the file of settings for a directory set everything, as long as it stays as it is.

    Args:
        directory: as the working directory of ``load``.
        trusted: else let it no longer.

    Returns:
        The file, and what it sets.

    Raises:
        SourceError: there is none.
        ConfigError: it cannot be read, or the user's state directory not be used.
    """
    for file, table in _candidates(directory):
        known = _trusted(os.environ, _own())
        private_directory(known.directory)
        if trusted:
            for name, value in table.items():
                _convert(name, value, str(file.path))
            known.add(file)
        else:
            known.remove(file.path)
        return file.path, table
    raise SourceError(
        f"there are no settings for {directory}",
        hint=f"write {FILE}, or a table [tool.wheelmount] in pyproject.toml",
    )


def _own() -> dict[str, Any]:
    """What the user's own file sets."""
    file = own_file()
    try:
        found = read(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", hint="make it readable") from None
    if found is not None and found.doubt:
        _tell(f"{found.path} is passed over: {found.doubt}")
        return {}
    return {} if found is None else _parse(found)


def _trusted(environ: Mapping[str, str], own: Mapping[str, Any]) -> Trusted:
    given = environ.get("WHEELMOUNT_STATE_DIR") or own.get("state_dir") or Settings().state_dir
    return Trusted(Path(str(given)) / "trusted")


def _of_project(directory: Path | None, trusted: Trusted) -> tuple[dict[str, Any], str]:
    """What the nearest file that counts sets, and where that stands, in words."""
    for file, table in _candidates(directory):
        if file in trusted:
            return table, str(file.path)
        hint = f"if you trust it, run `wheelmount config trust {file.path.parent}`"
        if file.doubt:
            _tell(f"{file.path} is passed over: {file.doubt}; {hint}")
            continue
        kept = [name for name in table if name in _types() and name not in OF_PROJECTS]
        if kept:
            _tell(f"{file.path} may not set {', '.join(kept)}, which is passed over; {hint}")
        return {name: value for name, value in table.items() if name not in kept}, str(file.path)
    return {}, ""


def _candidates(directory: Path | None) -> Iterator[tuple[Found, dict[str, Any]]]:
    """Files with settings for a directory, the nearest first, and what they set."""
    try:
        start = (directory or Path.cwd()).resolve()
        folders = list(places(start))
    except OSError:  # it is not there any more
        return
    for folder in folders:
        for name in (FILE, "pyproject.toml"):
            try:
                file = read(folder / name)
            except OSError as error:
                _tell(f"{folder / name} is passed over: {error.strerror}")
                continue
            if file is None:
                continue
            try:
                table = _table(file, name)
            except ConfigError:
                if not file.doubt:
                    raise
                continue  # nothing of it would count
            if table is not None:
                yield file, table


def _table(file: Found, name: str) -> dict[str, Any] | None:
    table: object = _parse(file)
    if name != FILE:
        for key in ("tool", "wheelmount"):
            if not isinstance(table, dict) or key not in table:
                return None
            table = table[key]
    if not isinstance(table, dict):
        raise ConfigError(f"{file.path}: tool.wheelmount is no table", hint="correct the file")
    return table


@functools.cache
def _tell(text: str) -> None:  # once, as settings are read again and again
    log.warning("settings: %s", text)


def _parse(file: Found) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(file.content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file.path}: {error}", hint="correct the file") from None
    return table


@functools.cache
def _types() -> dict[str, type]:
    return {
        f.name: {"str": str, "int": int, "float": float}[str(f.type)]
        for f in dataclasses.fields(Settings)
    }


def _convert(name: str, value: object, where: str) -> str | int | float:
    kind = _types().get(name)
    if kind is None:
        raise ConfigError(
            f"unknown setting {name!r} ({where})", hint=f"known: {', '.join(sorted(_types()))}"
        )
    try:
        converted = kind(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name} is {value!r} ({where})",
            hint=f"give {'a number' if kind is not str else 'text'}",
        ) from None
    if name in _DIRECTORIES and converted != MEMORY and not Path(converted).is_absolute():
        # Processes of one mount have other working directories than the command that made it.
        also = f", or {MEMORY!r}" if name == "store" else ""
        raise ConfigError(
            f"{name} is {value!r}, no absolute path ({where})",
            hint=f"give the path of a directory from / on{also}",
        )
    return converted  # type: ignore[no-any-return]
