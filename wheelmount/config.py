"""Settings: a flag overrides ``WHEELMOUNT_*`` in the environment, which overrides files.

There are two files. The user's own file may set everything. A project's file overrides it: the
nearest ``wheelmount.toml``, or ``pyproject.toml`` with a ``[tool.wheelmount]`` table, from the
working directory upwards. It may only set how bytes are sent and how long to wait, unless the user
trusts it (see ``trust``). The command line applies flags with ``dataclasses.replace``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from wheelmount import disk, logind, toml
from wheelmount.errors import ConfigError, SourceError, WheelmountError
from wheelmount.lock import has_locks
from wheelmount.owned import make_folders
from wheelmount.trust import (
    ALL_USERS,
    Found,
    Trusted,
    is_own,
    is_private,
    places,
    private,
    read,
    shared_above,
)

log = logging.getLogger("wheelmount")

MIB = 1 << 20

POD = "KUBERNETES_SERVICE_HOST"
"""Variable that Kubernetes sets in pods."""

POD_SECRETS = Path("/var/run/secrets/kubernetes.io")
"""Where Kubernetes places the credentials of a pod."""

FILE = "wheelmount.toml"
"""Name of a file that holds only settings."""

OF_PROJECTS = frozenset(
    {
        "adapter",
        "block_size",
        "compress",
        "fanout",
        "fetch_timeout",
        "in_flight",
        "queue_timeout",
        "racks",
        "read_timeout",
        "ring",
        "start_timeout",
        "transport",
        "verify_rate",
    }
)
"""Settings allowed in a project's file that is not trusted: none chooses code or where it runs."""

MEMORY = "memory"
"""Value of ``store`` for stores in memory."""

ADAPTERS = ("auto", "bind", "devfuse", "pyfuse3")
"""Values of ``adapter``."""

_DIRECTORIES = ("store", "store_keep", "runtime_dir", "cache_dir", "state_dir")
"""Settings that are paths of directories."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set, with its default."""

    hosts: str = ""
    """Hosts to use when ``--hosts`` is not given; by default the session ``default`` if it is up,
    otherwise the Slurm allocation in which the command runs, otherwise ``local:1``."""

    python: str = ""
    """Python with wheelmount on hosts that ssh or Slurm starts; default the path of this one, and
    in pods ``python``."""

    block_size: int = 0
    """Bytes of a block, the unit that is sent and hashed: a multiple of 4096, or 0 to choose."""

    in_flight: int = 6
    """Blocks that one host fetches at the same time, shared by all trees; fewer over a slow link,
    more over a long one, or over a very fast one to a host with many processors."""

    ring: int = 32
    """Blocks that the client keeps in memory for sending, ``ring * block_size`` bytes at most."""

    fanout: int = 0
    """Hosts that one host sends a block to; 0 to choose by size and number of hosts."""

    racks: str = ""
    """Hosts of each rack, racks apart by spaces: ``node[01-32] node[33-64]``. Most bytes then stay
    within a rack. By default as Slurm says, if it knows switches (``SLURM_TOPOLOGY_ADDR``)."""

    compress: str = "auto"
    """Whether bytes are sent compressed: ``auto`` if that is faster, ``always`` or ``never``."""

    transport: str = "auto"
    """How bytes of files travel: ``rdma`` only by RDMA devices, ``tcp`` never by them, ``auto`` by
    the faster way between two hosts that both have a device."""

    read_timeout: float = 60.0
    """Seconds that a read in the mount waits for its bytes before it fails with EIO."""

    fetch_timeout: float = 30.0
    """Seconds without a byte after which a block is requested again."""

    start_timeout: float = 60.0
    """Seconds that a host, a mount or a container may take to start."""

    queue_timeout: float = 86400.0
    """Seconds that a Slurm job may wait in the queue, or that pods may take to run."""

    store: str = MEMORY
    """Place of each host's copy of mounted files: ``memory``, or a directory."""

    store_keep: str = ""
    """Directory on each host's disk where blocks stay for the mounts of later jobs; empty for
    none."""

    store_keep_size: int = 0
    """Bytes that blocks in ``store_keep`` may take on a host, for each user; 0 for a tenth of the
    disk."""

    verify_rate: float = 0.0
    """MB a second at which hosts verify stores on a disk repeatedly; 0 to not verify them."""

    adapter: str = "auto"
    """The adapter that shows a mount: ``auto`` for the best that a host allows, or its name."""

    access: str = "source"
    """Which users may enter root's mounts: ``source`` for those that may enter the source,
    ``private`` for the owner, ``public`` for all users of a host."""

    runtime_dir: str = "/tmp"  # noqa: S108 - a private 0700 directory is made in it
    """Directory under which sockets, logs and the state of sessions are kept.

    ``/tmp`` rather than ``$XDG_RUNTIME_DIR``, which is deleted at logout, while mounts stay.
    """

    cache_dir: str = dataclasses.field(
        default_factory=lambda: platformdirs.user_cache_dir("wheelmount")
    )
    """Directory for what can be made again: wheelhouses, unpacked wheels, environments, images of
    registries, bundles for hosts without wheelmount, and records of what programs read first."""

    cache_size: int = 0
    """Bytes to which ``wheelmount install`` reduces the cache at its end; 0 for no limit."""

    state_dir: str = dataclasses.field(
        default_factory=lambda: platformdirs.user_state_dir("wheelmount")
    )
    """Directory for persistent data: overlays of containers, credentials, and which projects'
    settings are trusted."""

    def __post_init__(self) -> None:
        for name in _DIRECTORIES:
            if os.path.isabs(getattr(self, name)):  # noqa: PTH117 - may be a word
                disk.note(Path(getattr(self, name)), name)
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
        if self.adapter not in ADAPTERS:
            raise ConfigError(
                f"adapter is {self.adapter!r}", hint=f"give one of {', '.join(ADAPTERS)}"
            )
        if self.transport not in ("auto", "rdma", "tcp"):
            raise ConfigError(f"transport is {self.transport!r}", hint="give auto, rdma or tcp")
        if self.access not in ("source", "private", "public"):
            raise ConfigError(f"access is {self.access!r}", hint="give source, private or public")
        if self.cache_size < 0:
            raise ConfigError(
                f"cache_size is {self.cache_size}", hint="give bytes, or 0 for no limit"
            )
        if self.store_keep_size < 0:
            raise ConfigError(
                f"store_keep_size is {self.store_keep_size}",
                hint="give bytes, or 0 for a tenth of the disk",
            )
        if self.verify_rate < 0:
            raise ConfigError(f"verify_rate is {self.verify_rate}", hint="give MB a second, or 0")
        for name in ("read_timeout", "fetch_timeout", "start_timeout", "queue_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give seconds above 0")

    def chosen(self, *names: str) -> dict[str, str]:
        """Return the variables that hand some settings on to hosts, unless they are the defaults.

        Hosts have defaults of their own, of the user and the home directory there.
        """
        changed = self.changed(*names).items()
        return {f"WHEELMOUNT_{name.upper()}": str(value) for name, value in changed}

    def changed(self, *names: str) -> dict[str, Any]:
        """Return those of some settings that are not the defaults, by name."""
        usual, values = Settings(), {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value != getattr(usual, name)}

    def private_runtime(self) -> Path:
        """Return the user's own runtime directory; made with mode 0700 if it is missing.

        Raises:
            ConfigError: it cannot be private, or its file system has no locks.
        """
        directory = _private_place(Path(self.runtime_dir), "runtime_dir")
        _check_locks(directory)
        return directory

    def listed(self, name: str) -> list[Path]:
        """Return the entries of a directory in the user's runtime directory, sorted.

        There are none if it is missing and there is no room to make it: what only looks needs none.
        """
        try:
            directory = private_directory(self.private_runtime() / name)
        except WheelmountError:
            if disk.unwritable(Path(self.runtime_dir)):
                return []
            raise
        return sorted(directory.iterdir())

    def private_store(self, *, mounted: bool) -> Path:
        """Return the user's own store directory; made with mode 0700 if it is missing.

        Args:
            mounted: whether each store in memory is a file system of its own, mounted there.
        """
        if self.store == MEMORY and mounted:
            return private_directory(self.private_runtime() / "stores")
        if self.store != MEMORY:
            return _private_place(Path(self.store), "store")
        place = logind.memory_place(os.getuid())
        disk.note(place, "store")
        return _private_place(place)  # a pod has it without the sticky bit, for itself alone

    def private_kept(self) -> Path:
        """Return the user's own directory in ``store_keep``; made with mode 0700 if it is missing.

        Raises:
            ConfigError: it belongs to another user, is a symlink, or is open to others; or others
                may replace it.
            OSError: it cannot be made.
        """
        path = Path(self.store_keep) / f"wheelmount-kept-{os.getuid()}"
        check_place(path, "store_keep")
        return _checked(path, _make(path))

    def own_cache(self) -> Path:
        """Return the cache directory, which only this user may write to; made if it is missing.

        Code is run from the cache, and clearing it deletes files without further checks.

        Raises:
            ConfigError: others may write to the directory, or replace it, or it cannot be made.
            StoreError: there is no room for it.
        """
        cache = Path(self.cache_dir)
        try:
            check_place(cache, "cache_dir")
            make_folders(cache)
            own = is_own(cache)
        except OSError as error:
            raise disk.unusable(cache, error) from None
        if not own:
            raise ConfigError(
                f"{cache} is not a directory that only you may write to",
                hint=f"run: chmod go-w {cache}; or set WHEELMOUNT_CACHE_DIR elsewhere",
            )
        return cache


def private_directory(path: Path) -> Path:
    """Make a directory (and its parents) with mode 0700, or check that it is private already.

    Raises:
        ConfigError: the directory belongs to another user, is a symlink, or is open to others; or
            it cannot be made in the directory of a setting.
        SourceError: it cannot be made elsewhere.
        StoreError: there is no room for it.
    """
    try:
        return _checked(path, _make(path))
    except OSError as error:
        raise disk.unusable(path, error) from None


TRIES = 1000
"""How often a directory is made that is not there afterwards."""


def _make(path: Path) -> os.stat_result:
    """Make a directory with mode 0700, unless there is one; return its state."""
    for left in reversed(range(TRIES)):
        try:
            make_folders(path.parent)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            return path.lstat()
        except FileNotFoundError:  # just removed by another process, or it cannot be made
            if not left:
                raise
    raise AssertionError


def _checked(path: Path, found: os.stat_result) -> Path:
    if not private(found):
        ours = found.st_uid == os.getuid()
        raise ConfigError(
            f"{path} is not a private directory of yours",
            hint=f"run: chmod 700 {path}; or remove it"
            if ours
            else "set WHEELMOUNT_RUNTIME_DIR, WHEELMOUNT_STORE or WHEELMOUNT_STORE_KEEP elsewhere",
        )
    return path


def check_place(path: Path, setting: str) -> None:
    """Check that no other user can replace a private directory: that would make it theirs.

    If only a group may, such as that of a project, or the owner of a directory that not any user
    can have made, a line warns. In a pod there are no other users, and volumes may be writable for
    all.

    Args:
        path: the directory, which may be missing.
        setting: the setting that it is in.

    Raises:
        ConfigError: any user may replace it.
        OSError: a directory above it cannot be looked at.
    """
    if _in_pod():
        return
    for shared, others, anyone in shared_above(path):
        text = f"{others} may rename and replace what is in {shared}, where {setting} is"
        if not anyone:
            _warn(f"security: {text}")
            continue
        remedy = f"run: chmod +t {shared}; or " if others == ALL_USERS else ""
        raise ConfigError(text, hint=f"{remedy}set WHEELMOUNT_{setting.upper()} elsewhere")


def _in_pod() -> bool:
    # A shell of ssh has no such variable.
    return POD in os.environ or POD_SECRETS.exists()


@functools.cache
def _warn(text: str) -> None:
    """Warn, once in a process."""
    log.warning("%s", text)


def _private_place(parent: Path, setting: str | None = None) -> Path:
    """Return this user's own directory in one that all users may write to, the same each time.

    If another user has made a directory of that name, a random name is used instead.

    Args:
        parent: the directory that all users may write to.
        setting: the setting that names it; None if wheelmount chose it.

    Raises:
        ConfigError: the directory cannot be made private, see ``private_directory``; or others may
            replace it.
    """
    path = parent / f"wheelmount-{os.getuid()}"
    if setting is not None:
        check_place(path, setting)
    if is_private(path):
        return path
    # Oldest first, because that one is in use, even if the plain name is free again.
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


@functools.cache
def _check_locks(directory: Path) -> None:
    with contextlib.suppress(OSError):  # a full file system: other messages name it
        if not has_locks(directory):
            raise disk.without_locks(directory)


DEFAULT = "default"
"""Origin of a setting with its default value."""


def load(environ: Mapping[str, str] = os.environ, directory: Path | None = None) -> Settings:
    """Read the settings in force.

    Args:
        environ: environment with ``WHEELMOUNT_*``.
        directory: directory at which the search for a project's file starts; default the working
            directory.

    Raises:
        ConfigError: a name is unknown or a value has the wrong type; the message names its origin.
            Or this user has no home directory.
    """
    return load_with_origins(environ, directory)[0]


def load_with_origins(
    environ: Mapping[str, str] = os.environ, directory: Path | None = None
) -> tuple[Settings, dict[str, str]]:
    """Read the settings in force, and the origin of each by name; arguments as of ``load``."""
    if not Path(os.path.expanduser("~")).is_absolute():  # noqa: PTH111 - does not fail
        raise ConfigError(
            f"the home directory of user {os.getuid()} is unknown",
            hint="set HOME to an absolute path, such as a directory in /tmp",
        )
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
    """Return the path of the user's own file of settings, which may be missing."""
    return platformdirs.user_config_path("wheelmount") / FILE


def trust(directory: Path, *, trusted: bool = True) -> tuple[Path, dict[str, Any]]:
    """Trust the project's file of settings for a directory, as long as its content is unchanged.

    A trusted file may set everything.

    Args:
        directory: directory at which the search for the file starts, as in ``load``.
        trusted: False to withdraw the trust.

    Returns:
        The file, and its settings.

    Raises:
        SourceError: there is no such file.
        ConfigError: the file cannot be read, or the user's state directory cannot be used.
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
    """Return the settings in the user's own file."""
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
    disk.note(Path(str(given)), "state_dir")
    return Trusted(Path(str(given)) / "trusted")


def _of_project(directory: Path | None, trusted: Trusted) -> tuple[dict[str, Any], str]:
    """Return the settings of the nearest project's file that counts, and their origin in words."""
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
    """Yield project's files for a directory, the nearest first, each with its settings."""
    try:
        start = (directory or Path.cwd()).resolve()
        folders = list(places(start))
    except OSError:  # the directory is gone
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
                continue  # none of its settings would count
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
        raise ConfigError(f"{file.path}: tool.wheelmount is not a table", hint="correct the file")
    return table


@functools.cache
def _tell(text: str) -> None:  # cached, because settings are read repeatedly
    log.warning("settings: %s", text)


def _parse(file: Found) -> dict[str, Any]:
    try:
        return toml.loads(file.content.decode())
    except ValueError as error:  # of TOML and of UTF-8
        raise ConfigError(f"{file.path}: {error}", hint="correct the file") from None


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
    converted = _as(kind, value)
    if converted is None:
        wanted = {str: "text", int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"{name} is {value!r} ({where})", hint=f"give {wanted}")
    word = {"store": MEMORY, "store_keep": ""}.get(name)
    if name in _DIRECTORIES and converted != word and not Path(str(converted)).is_absolute():
        # Processes of one mount have other working directories than the command that made it.
        also = f", or {word!r}" if word is not None else ""
        raise ConfigError(
            f"{name} is {value!r}, no absolute path ({where})",
            hint=f"give the path of a directory from / on{also}",
        )
    return converted


def _as(kind: type, value: object) -> str | int | float | None:
    """Return a value of a file or the environment as a type; None if it has no such meaning."""
    if kind is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None  # such as true, which Python takes for 1
    try:
        number = float(value) if kind is float else int(value)
        whole = kind is float or isinstance(value, str) or number == value
        return number if whole and math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None
