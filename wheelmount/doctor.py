"""What this machine can do, what it lacks, and what dead mounts and hosts have left on it."""

from __future__ import annotations

import ctypes
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from wheelmount.config import MEMORY, Settings
from wheelmount.containers import apptainer
from wheelmount.containers import leftovers as containers
from wheelmount.errors import MountError, UnavailableError, WheelmountError
from wheelmount.hosts import gate
from wheelmount.hosts.local import namespaces_allowed
from wheelmount.hosts.worker import host_of
from wheelmount.mount import adapter, kernel, point, serving
from wheelmount.mount import store as stores
from wheelmount.mount.task import TASK

GOOD, POOR, BAD = "good", "poor", "bad"
"""All is well; something works less well than it could; something does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: was looked at.
        state: ``GOOD``, ``POOR`` or ``BAD``.
        text: what was found.
        hint: what to do about it.
    """

    what: str
    state: str
    text: str
    hint: str = ""


CONTAINER = "a container that is gone"


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that nobody uses any more.

    Attributes:
        path: a directory.
        text: what it is of.
    """

    path: Path
    text: str


def examine(settings: Settings) -> list[Finding]:
    """Look at what mounts, hosts and containers need here."""
    return [
        Finding("python", GOOD, f"{platform.python_version()} for {platform.machine()}"),
        Finding("versions", GOOD, _versions()),
        Finding("kernel", GOOD, platform.release()),
        _fuse(),
        _adapter(),
        _store(settings),
        _namespaces(),
        _apptainer(),
        _rdma(),
        _sockets(),
    ]


def _versions() -> str:
    names = "wheelmount", "torchmonarch", "uv"
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def _fuse() -> Finding:
    try:
        point.available()
    except UnavailableError as error:
        return Finding("fuse", BAD, error.message, error.hint or "")
    return Finding("fuse", GOOD, "/dev/fuse can be used")


def _adapter() -> Finding:
    lacks = adapter.lacking_for_bind()
    if lacks:
        return Finding("adapter", POOR, f"devfuse; not bind: {lacks}")
    return Finding("adapter", GOOD, "bind")


def _store(settings: Settings) -> Finding:
    if settings.store == MEMORY and kernel.may_mount():
        free = psutil.virtual_memory().available
        return Finding("store", GOOD, f"{free >> 20} MiB of memory free, with huge pages")
    try:
        place = settings.private_store(mounted=False)
    except (WheelmountError, OSError) as error:
        return Finding("store", BAD, str(error), "set WHEELMOUNT_STORE to a directory of yours")
    free = shutil.disk_usage(place).free
    return Finding("store", GOOD, f"{free >> 20} MiB free in {place}")


def _namespaces() -> Finding:
    if namespaces_allowed():
        return Finding("namespaces", GOOD, "hosts on this machine get a mount namespace each")
    return Finding(
        "namespaces",
        POOR,
        "not allowed: hosts on this machine share its paths",
        "as root: sysctl kernel.unprivileged_userns_clone=1, and install util-linux",
    )


def _apptainer() -> Finding:
    try:
        return Finding("apptainer", GOOD, apptainer.version())
    except UnavailableError as error:
        return Finding("apptainer", POOR, error.message, error.hint or "")


def _rdma() -> Finding:
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if not devices:
        return Finding("rdma", POOR, "no device: bytes travel by TCP")
    if missing := [name for name in ("libibverbs.so.1", "libmlx5.so.1") if not _loads(name)]:
        return Finding(
            "rdma",
            POOR,
            f"{', '.join(devices)}, but no {missing[0]}: bytes travel by TCP",
            "install rdma-core",
        )
    return Finding("rdma", GOOD, f"{', '.join(devices)}; Monarch takes those of Mellanox and EFA")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _sockets() -> Finding:
    if gate.close():
        return Finding("sockets", GOOD, "closed to other users")
    return Finding(
        "sockets",
        POOR,
        "other users of this machine can connect to Monarch's, and run programs as you",
        "use machines where nobody else is",
    )


def leftovers(settings: Settings) -> list[Leftover]:
    """What dead mounts and hosts of this user left; nothing that may still be in the making."""
    young = time.time() - settings.start_timeout
    return [each for each in _leftovers(settings) if each.path.stat().st_mtime < young]


def _leftovers(settings: Settings) -> Iterator[Leftover]:
    mounts = serving.directory(settings)
    known = set()
    for directory in sorted(mounts.iterdir()):
        if not directory.is_dir():
            continue
        known.add(directory.name)
        try:
            serving.status(directory)
        except MountError:
            yield Leftover(directory, "a mount whose serving process is gone")
    for own in (True, False):
        for store in sorted(settings.private_store(mounted=own).iterdir()):
            if store.is_dir() and store.name not in known:
                yield Leftover(store, "files of a mount that is gone")
    sockets = map(host_of, psutil.process_iter())
    alive = {Path(socket).parent for socket in sockets if socket}
    for hosts in sorted(settings.private_runtime().glob("hosts-*")):
        if hosts not in alive:
            yield Leftover(hosts, "hosts that are gone")
    for container in containers.find(settings.private_runtime()):
        yield Leftover(container, CONTAINER)


def clear(leftover: Leftover) -> None:
    """Delete what is left.

    Raises:
        MountError: it is a mount that is in use.
    """
    if (leftover.path / TASK).exists():
        serving.stop(leftover.path, force=True)
    if leftover.text == CONTAINER:
        containers.remove(leftover.path)
        return
    stores.remove(leftover.path)
