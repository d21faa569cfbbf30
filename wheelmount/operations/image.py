"""Containers on hosts, as requested: the image of each host, and what the container sees."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from blake3 import blake3

from wheelmount.containers import registry
from wheelmount.containers.order import PROGRAM, Order
from wheelmount.containers.overlay import Kind
from wheelmount.errors import InputError
from wheelmount.hosts import collection
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.spec import HostSpec
from wheelmount.mount.kernel.points import PRIVATE
from wheelmount.operations.launch import Launch
from wheelmount.operations.scripts import SCRIPT
from wheelmount.operations.site import Site
from wheelmount.wheels import redirect

ONE = "give --image; `wheelmount image build python` makes one"
"""Hint for a command without an image."""

BESIDE = "img.sif"
"""Name of an image in a mounted directory, beside its ``packages/``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """Work in a container of each host.

    Attributes:
        paths: path of the SIF by name of the host; ``""`` stands for all other hosts. An image
            inside the mounted directory is used from the mount. Empty for the image beside
            ``packages/`` in that directory, or for that of a running instance.
        overlay: name of the overlay that keeps changes; None for the default of the image.
        overlay_kind: kind of the overlay; None for the best.
        overlay_size: size of an overlay in one file, in bytes.
        instance: name of the instance to work in; None for a container that ends with the command.
        binds: further files of a host that it sees: source, target, and whether writable.
        nv: whether it may use NVIDIA devices.
        privileged: see `Container`.
        variables: environment variables of commands in it.
        memory: bytes that a container's processes may take; None for no limit.
        cpus: processors that they may keep busy; None for no limit.
        references: images of registries (``docker://…``), by host; ``paths`` has them after they
            were pulled.
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
        """Return the image for ``host``.

        Raises:
            InputError: no image is named for it.
        """
        path = self.paths.get(host) or self.paths.get("")
        if path is None:
            raise InputError(
                f"no image is named for {host}",
                hint=f"give one for all others: --image OTHER.sif,{next(iter(self.paths))}=…",
            )
        return path

    def found_in(self, folder: Path | None) -> Image:
        """Return this image with the paths that it has here, if a directory to mount holds it.

        Args:
            folder: the directory, in which ``on`` finds images; None for none.
        """
        if folder is None:
            return self
        if not self.paths and (folder / BESIDE).is_file():
            return dataclasses.replace(self, paths={"": folder / BESIDE})
        inside = {
            host: folder / path
            for host, path in self.paths.items()
            if not path.exists() and (folder / path).exists()
        }
        return dataclasses.replace(self, paths={**self.paths, **inside})

    def on(self, host: str, shown: Shown | None) -> str:
        """Return the path of the image on ``host``; empty for that of an instance.

        Raises:
            InputError: no image is named for it, and the mounted directory has none.
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
    """A mounted directory on a host.

    Attributes:
        source: the directory.
        mntpoint: its mount point on the host.
    """

    source: Path
    mntpoint: str

    def at(self, name: str) -> str:
        """Return the path on the host of ``name`` in the mounted directory."""
        return str(PurePosixPath(self.mntpoint, name))

    @property
    def packages(self) -> str:
        """Return the path of the wheels on the host: the directory, or ``packages/`` in it."""
        inner = (self.source / "packages").is_dir() and not any(self.source.glob("*.whl"))
        return self.at("packages") if inner else self.mntpoint


def parse_images(text: str) -> tuple[dict[str, Path], dict[str, str]]:
    """Read ``IMAGE`` or ``HOST=IMAGE,HOST=IMAGE,…``; an image without a host is for all others.

    Returns:
        Paths, and references to images of registries, by host.

    Raises:
        InputError: a host has two images, or a path is empty.
    """
    # What is in the working directory must not take the place of an image of a registry.
    if text and not any(scheme in text for scheme in registry.SCHEMES) and Path(text).exists():
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
        raise InputError(f"{text!r} is not a size", hint="give one such as 512M or 8G")
    return int(match[1]) << 10 * (" KMGT".index(match[2].upper()))


def parse_bind(text: str) -> tuple[str, str, bool]:
    """Read ``PATH[:TARGET[:rw]]``.

    Raises:
        InputError: the text is invalid.
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
    site: Site,
    *,
    there: bool = False,
    environment: str | None = None,
    script: bytes | None = None,
) -> Order:
    """Return the order for a host.

    Args:
        host: name of the host.
        image: the container.
        shown: a mounted directory on the host.
        launch: how to run a command.
        site: the hosts.
        there: whether commands start in that directory, which the container then shows at its own
            path, too, by default. ``WHEELMOUNT_MOUNT`` has that path.
        environment: path of a mounted environment on the host; the container shows it there.
        script: content of the file ``SCRIPT``; None for no such file.
    """
    usual = shown.mntpoint if there and shown is not None else None
    variables = {} if usual is None else {"WHEELMOUNT_MOUNT": usual}
    files = {redirect.PIP_CONF: redirect.pip_conf(), redirect.UV_TOML: redirect.uv_toml()}
    if script is not None:
        files[SCRIPT] = os.fsdecode(script)
    settings = site.settings
    # A directory of this machine is none of the hosts', unless the user says so.
    own = site.spec.kind == "local" or bool(settings.chosen("state_dir"))
    return Order(
        host=host,
        image=image.on(host, shown),
        overlay=image.overlay or "",
        state_dir=settings.state_dir if own else None,
        runtime_dir=settings.runtime_dir,
        overlay_kind=image.overlay_kind,
        overlay_size=image.overlay_size,
        instance=image.instance,
        packages=None if shown is None else shown.packages,
        binds=[*image.binds, *((path, path, False) for path in (environment, usual) if path)],
        environment={**redirect.environment(), **image.variables, **variables},
        files=files,
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
    """Return the command of a host that runs an order."""
    left = None if ordered.collect is None else collection.ARCHIVE
    return Command(
        PROGRAM, private_file=ordered.encode(argv), timeout=ordered.longest, collect=left
    )


def _inside(path: Path, folder: Path) -> str | None:
    """Return the relative path of ``path`` in ``folder``; None if it is not there."""
    try:
        return str(path.resolve().relative_to(folder.resolve()))
    except ValueError:
        return None


def packages_point(spec: HostSpec, packages: Path) -> str:
    """Return the mount point of a wheelhouse on hosts; the same for all commands if they stay."""
    return point_of(spec, packages, "packages")


def point_of(spec: HostSpec, directory: Path, kind: str) -> str:
    """Return the mount point of a directory in the user's own directory on hosts."""
    stays = spec.lasting
    mark = secrets.token_hex(4) if stays is None else stays + mark_of(directory)
    return f"{PRIVATE}/{kind}-{mark}-{{host}}"


def mark_of(directory: Path) -> str:
    """Return a name for a directory of this machine: for its path, by which mounts are known."""
    path = os.path.abspath(directory)  # noqa: PTH100 - as remotemount does
    return blake3(os.fsencode(path)).hexdigest(8)
