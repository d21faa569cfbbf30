"""Containers on hosts, as requested: the image of each host, and what the container sees."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from blake3 import blake3

from wheelmount.config import Settings
from wheelmount.containers import registry
from wheelmount.containers.order import PROGRAM, Order
from wheelmount.containers.overlay import Kind
from wheelmount.errors import InputError
from wheelmount.hosts import collection
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.spec import HostSpec
from wheelmount.mount.kernel.points import PRIVATE
from wheelmount.operations.launch import Launch
from wheelmount.wheels import redirect

ONE = "give --image; `wheelmount image build python` makes one"
"""What to do without an image."""

BESIDE = "img.sif"
"""Name of an image in a mounted directory, beside its ``packages/``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """Work in a container of each host.

    Attributes:
        paths: of the SIF, by name of the host; that of ``""`` is for all others. One inside the
            directory that is mounted is taken from the mount. Empty for the image beside
            ``packages/`` in that directory, or that of an instance that runs.
        overlay: name of the overlay that keeps changes; None for the image's own.
        overlay_kind: kind of the overlay; None for the best.
        overlay_size: bytes of an overlay in one file.
        instance: name of the instance to work in; None for a container that ends with the command.
        binds: source, target and whether writable, of further files of a host that it sees.
        nv: whether it may use NVIDIA devices.
        privileged: see `Container`.
        variables: to set for commands in it.
        memory: bytes that a container's processes may take; None for no bound.
        cpus: processors that they may keep busy; None for no bound.
        references: of images of registries (``docker://…``), by host as ``paths``; those have none
            for them until they are pulled.
    """

    paths: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    overlay: str | None = None
    overlay_kind: Kind | None = None
    overlay_size: int | None = None
    instance: str | None = None
    binds: Sequence[tuple[str, str, bool]] = ()
    nv: bool = False
    privileged: bool = False
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    references: Mapping[str, str] = dataclasses.field(default_factory=dict)
    memory: int | None = None
    cpus: float | None = None

    def own(self, host: str) -> Path:
        """The image that is named for ``host``.

        Raises:
            InputError: none is.
        """
        path = self.paths.get(host) or self.paths.get("")
        if path is None:
            raise InputError(
                f"no image is named for {host}",
                hint=f"give one for all others: --image OTHER.sif,{next(iter(self.paths))}=…",
            )
        return path

    def on(self, host: str, shown: Shown | None) -> str:
        """Where ``host`` finds its image; empty for that of an instance.

        Raises:
            InputError: none is named for it, and the directory that is mounted has none.
        """
        if not self.paths:
            if shown is not None and (shown.source / BESIDE).is_file():
                return shown.at(BESIDE)
            if self.instance is not None:
                return ""
            raise InputError(
                "no image to run it in",
                hint=f"{ONE}, or put one into the mounted directory as {BESIDE}",
            )
        path = self.own(host)
        if shown is None:
            return str(path.absolute())
        # As it is called if it is there, else as the directory calls it.
        inside = _inside(path if path.exists() else shown.source / path, shown.source)
        return str(path.absolute()) if inside is None else shown.at(inside)


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """A directory of this machine as a host has it.

    Attributes:
        source: the directory.
        mntpoint: where the host has it.
    """

    source: Path
    mntpoint: str

    def at(self, name: str) -> str:
        """Return the path on the host of ``name`` in the mounted directory."""
        return str(PurePosixPath(self.mntpoint, name))

    @property
    def packages(self) -> str:
        """Where the host has the wheels: the directory itself, or ``packages/`` in it."""
        inner = (self.source / "packages").is_dir() and not any(self.source.glob("*.whl"))
        return self.at("packages") if inner else self.mntpoint


def parse_images(text: str) -> tuple[dict[str, Path], dict[str, str]]:
    """Read ``IMAGE`` or ``HOST=IMAGE,HOST=IMAGE,…``, where one may be for all other hosts.

    Returns:
        Paths, and references to images of registries, by host.

    Raises:
        InputError: a host or the others are named twice, or a path is empty.
    """
    if Path(text).exists():
        return {"": Path(text)}, {}
    paths: dict[str, Path] = {}
    references: dict[str, str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(?:([\w.-]+)=)?(.+)", part, re.DOTALL)
        if match is None or (match[1] or "") in {**paths, **references}:
            raise InputError(
                f"invalid --image {text!r}",
                hint="give one path, or one a host: --image host0=a.sif,host1=b.sif",
            )
        if match[2].startswith(registry.SCHEMES):
            references[match[1] or ""] = match[2]
        else:
            paths[match[1] or ""] = Path(match[2])
    return paths, references


def parse_size(text: str) -> int:
    """Read a size such as ``512M`` or ``8G``, in bytes; powers of 1024.

    Raises:
        InputError: it is none.
    """
    match = re.fullmatch(r"(\d{1,9})([KMGT])(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise InputError(f"{text!r} is no size", hint="give one such as 512M or 8G")
    return int(match[1]) << 10 * (" KMGT".index(match[2].upper()))


def parse_bind(text: str) -> tuple[str, str, bool]:
    """Read ``PATH[:TARGET[:rw]]``.

    Raises:
        InputError: it is nothing that can be shown.
    """
    path, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not path or mode not in ("", "ro", "rw"):
        raise InputError(
            f"{text!r} cannot be shown", hint="give PATH, or PATH:TARGET, or :rw added"
        )
    where = str(Path(path).absolute())
    return where, target or where, mode == "rw"


def order(
    host: str,
    image: Image,
    shown: Shown | None,
    launch: Launch,
    settings: Settings,
    usual: str | None = None,
) -> Order:
    """What to order from a host.

    Args:
        host: its name.
        image: the container.
        shown: a directory as it has it.
        launch: how to run a command.
        settings: in force.
        usual: where commands start if nothing else is said; default the home directory.
    """
    return Order(
        host=host,
        image=image.on(host, shown),
        overlay=image.overlay or "",
        state_dir=settings.state_dir,
        runtime_dir=settings.runtime_dir,
        overlay_kind=image.overlay_kind,
        overlay_size=image.overlay_size,
        instance=image.instance,
        packages=None if shown is None else shown.packages,
        binds=image.binds,
        environment={**redirect.environment(), **image.variables},
        files={redirect.PIP_CONF: redirect.pip_conf(), redirect.UV_TOML: redirect.uv_toml()},
        nv=image.nv,
        privileged=image.privileged,
        memory=image.memory,
        cpus=image.cpus,
        cwd=launch.within(usual),
        timeout=launch.timeout,
        collect=None if launch.collect is None or launch.collect.output else launch.collect.path,
        output=launch.collect is not None and launch.collect.output,
    )


def carry_out(ordered: Order, argv: Sequence[str]) -> Command:
    """The command of a host that carries out an order."""
    left = None if ordered.collect is None else collection.ARCHIVE
    return Command(PROGRAM, note=ordered.encode(argv), collect=left)


def _inside(path: Path, folder: Path) -> str | None:
    """What ``path`` is called in ``folder``, if it is in it."""
    try:
        return str(path.resolve().relative_to(folder.resolve()))
    except ValueError:
        return None


def packages_point(spec: HostSpec, packages: Path) -> str:
    """Where a wheelhouse is mounted on hosts: always there in a session, whose mounts stay."""
    return point_of(spec, packages, "packages")


def point_of(spec: HostSpec, directory: Path, kind: str) -> str:
    """Where a directory of some kind is mounted on hosts, in the user's own; see above."""
    mark = secrets.token_hex(4) if spec.session is None else mark_of(directory)
    return f"{PRIVATE}/{kind}-{mark}-{{host}}"


def mark_of(directory: Path) -> str:
    """A name for a directory of this machine."""
    return blake3(os.fsencode(directory.resolve())).hexdigest(8)
