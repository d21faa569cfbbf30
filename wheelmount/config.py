"""Settings: a flag beats ``WHEELMOUNT_*`` in the environment, which beats a file.

The file is the nearest from the working directory upwards: ``wheelmount.toml``, or a
``pyproject.toml`` that has a ``[tool.wheelmount]`` table. Flags are applied by the command line
with ``dataclasses.replace``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from wheelmount.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MIB = 1 << 20

FILE = "wheelmount.toml"
"""Name of a file with nothing but settings."""

MEMORY = "memory"
"""Value of ``store``: not on a disk."""


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
    """Bytes that travel, are hashed and arrive as one: a multiple of 4096, or 0 to choose by size
    and number of hosts."""

    in_flight: int = 6
    """Blocks that one host fetches at the same time, shared by all trees; two in each at least."""

    ring: int = 32
    """Blocks the client keeps staged in memory: its bound is ``ring * block_size`` bytes."""

    fanout: int = 0
    """Hosts that one host sends a block to; 0 to choose by size and number of hosts."""

    compress: str = "auto"
    """Whether bytes travel compressed: ``auto`` where that is faster, ``always`` or ``never``."""

    read_timeout: float = 60.0
    """Seconds a read in the mount waits for its bytes before it fails with EIO."""

    fetch_timeout: float = 30.0
    """Seconds one block may take to travel before it is asked for again."""

    start_timeout: float = 60.0
    """Seconds a host, a mount or a container may take to come up."""

    queue_timeout: float = 86400.0
    """Seconds a Slurm job may wait in the queue, or pods until they run."""

    store: str = MEMORY
    """Where each host keeps what it receives: ``memory``, or a directory."""

    adapter: str = "auto"
    """How a mount is shown: ``auto`` for the best way a host allows, else the name of one."""

    runtime_dir: str = "/tmp"  # noqa: S108 - a private 0700 directory is made in it
    """Directory under which sockets, logs and the state of sessions are kept.

    ``/tmp`` and not ``$XDG_RUNTIME_DIR``: that one goes away at logout, mounts do not.
    """

    cache_dir: str = dataclasses.field(
        default_factory=lambda: platformdirs.user_cache_dir("wheelmount")
    )
    """Directory for wheelhouses and images that can be made again."""

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
        for name in ("read_timeout", "fetch_timeout", "start_timeout", "queue_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give seconds above 0")

    def private_runtime(self) -> Path:
        """The user's own runtime directory, made 0700 if it is not there."""
        return private_directory(Path(self.runtime_dir) / f"wheelmount-{os.getuid()}")

    def private_store(self, *, mounted: bool) -> Path:
        """The user's own store directory, made 0700 if it is not there.

        Args:
            mounted: whether stores in memory are file systems of their own, mounted there.
        """
        if self.store == MEMORY and mounted:
            return private_directory(self.private_runtime() / "stores")
        place = "/dev/shm" if self.store == MEMORY else self.store  # noqa: S108 - private, see above
        return private_directory(Path(place) / f"wheelmount-{os.getuid()}")


def private_directory(path: Path) -> Path:
    """Make ``path`` (and its parents) with mode 0700, or check that it is ours already.

    Raises:
        ConfigError: somebody else owns it, it is a symlink, or others may enter it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{path} is not a private directory of yours",
                hint="remove it, or set WHEELMOUNT_RUNTIME_DIR and WHEELMOUNT_STORE elsewhere",
            ) from None
    return path


DEFAULT = "default"
"""Origin of a setting that nobody has set."""


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
    where, table = _table(directory or Path.cwd())
    for name, value in table.items():
        values[name] = _convert(name, value, where)
        origins[name] = where
    for name in list(origins):
        variable = f"WHEELMOUNT_{name.upper()}"
        if variable in environ:
            values[name] = _convert(name, environ[variable], variable)
            origins[name] = variable
    return Settings(**values), origins


def _table(directory: Path) -> tuple[str, dict[str, Any]]:
    """Where settings stand, in words, and what they are."""
    for folder in (directory, *directory.parents):
        own, project = folder / FILE, folder / "pyproject.toml"
        if own.is_file():
            return str(own), _read(own)
        if project.is_file():
            table = _read(project).get("tool", {}).get("wheelmount")
            if table is not None:
                return f"[tool.wheelmount] in {project}", table
    return "", {}


def _read(file: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}", hint="mend the file") from None
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
    return converted  # type: ignore[no-any-return]
