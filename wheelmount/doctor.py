"""Check this machine for missing features, and for remains of dead mounts and hosts."""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

import psutil

from wheelmount import linux, logind, shared
from wheelmount.config import MEMORY, Settings
from wheelmount.containers import apptainer, trial
from wheelmount.containers import leftovers as containers
from wheelmount.errors import UnavailableError, WheelmountError
from wheelmount.hosts import rdma, socketguard
from wheelmount.hosts.local import for_binds, namespaces_allowed
from wheelmount.hosts.worker import running
from wheelmount.mount.kernel import points
from wheelmount.mount.serve import adapters, processes
from wheelmount.mount.serve.control import TASK
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.store import capacity
from wheelmount.mount.store import store as stores

GOOD: Final = "good"
POOR: Final = "poor"
BAD: Final = "bad"
"""States of a check: works; works, but less well than possible; does not work."""

State = Literal["good", "poor", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        what: subject of the check.
        state: ``GOOD``, ``POOR`` or ``BAD``.
        text: the finding.
        hint: how to improve it.
    """

    what: str
    state: State
    text: str
    hint: str = ""


CONTAINER = "a container that is gone"

MOMENT = 2.0
"""Age in seconds below which a directory without an owner may belong to a starting process."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory, or processes, that a dead mount or host left behind.

    Attributes:
        path: the directory.
        text: description of its former use.
    """

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """The state of a machine.

    Attributes:
        findings: results of all checks.
        leftovers: remains of dead mounts and hosts.
        cleared: whether these were deleted.
        free: bytes available for mounts; 0 where there is no place for mounts.
        time: of the report, in seconds since the epoch.
        skew: seconds by which the clock is ahead of the client's.
    """

    findings: list[Finding]
    leftovers: list[Leftover]
    cleared: bool
    free: int
    time: float
    skew: float = 0.0


def report(settings: Settings, *, fix: bool = False) -> Report:
    """Check this machine, and find remains of dead mounts and hosts.

    Args:
        settings: the settings in force.
        fix: also delete the remains.

    Raises:
        MountError: the remains include a mount that is in use.
    """
    findings, left, free = examine(settings), leftovers(settings), 0
    with contextlib.suppress(WheelmountError, OSError):  # it is among the findings
        free = room(settings)[0]
    if fix:
        for each in left:
            clear(each)
    return Report(findings, left, fix, free, time.time())


def examine(settings: Settings) -> list[Finding]:
    """Check this machine for everything that mounts, hosts and containers need."""
    return [
        Finding("python", GOOD, f"{platform.python_version()} for {platform.machine()}"),
        Finding("versions", GOOD, _versions()),
        Finding("kernel", GOOD, platform.release()),
        _fuse(),
        _fusermount(),
        _adapter(),
        _store(settings),
        _shm(),
        _namespaces(),
        _apptainer(),
        _containers(settings),
        _rdma(settings),
        _sockets(),
    ]


def _versions() -> str:
    names = "wheelmount", "torchmonarch", "uv"
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def _fuse() -> Finding:
    try:
        points.available()
    except UnavailableError as error:
        return Finding("fuse", BAD, error.message, error.hint or "")
    return Finding("fuse", GOOD, "/dev/fuse can be used")


def _fusermount() -> Finding:
    if shutil.which("fusermount3") is not None:
        return Finding("fusermount3", GOOD, "ordinary users can mount by it")
    return Finding(
        "fusermount3", POOR, "not there: only root can mount", "install the package fuse3"
    )


def _adapter() -> Finding:
    lacks = adapters.lacking_for_bind()
    if for_binds():
        return Finding("adapter", GOOD, "bind, for what wheelmount runs; devfuse for other readers")
    if lacks:
        return Finding(
            "adapter",
            POOR,
            f"devfuse, not bind: {lacks}; what is read for the first time goes through a server, "
            "which reads big files at a third of the speed",
            "run it as root, or on hosts with a mount namespace of their own, on Linux 6.5",
        )
    # Linux can let a FUSE server pass files through since 6.9; bind needs no server at all.
    return Finding("adapter", GOOD, "bind: no server in the way, and so nothing to pass through")


def _store(settings: Settings) -> Finding:
    try:
        free, where = room(settings)
    except (WheelmountError, OSError) as error:
        return Finding("store", BAD, str(error), "set WHEELMOUNT_STORE to a directory of yours")
    return Finding("store", GOOD, f"{free >> 20} MiB free {where}")


def room(settings: Settings) -> tuple[int, str]:
    """Return the bytes available for mounts on this machine, and their place, in words.

    Raises:
        WheelmountError, OSError: there is no place for mounts.
    """
    if settings.store == MEMORY and linux.may_mount():
        return capacity.available(), "in memory, with huge pages"
    place = settings.private_store(mounted=False)
    return shutil.disk_usage(place).free, f"in {place}"


def fit(source: Path, free: int) -> Finding:
    """Check whether a directory fits on a host.

    Args:
        source: the directory.
        free: available bytes of the host, from ``room``.

    Raises:
        SourceError: the directory cannot be read.
    """
    inodes = scan(os.fsencode(source)).inodes.values()
    size = sum(inode.held for inode in inodes if inode.is_file)
    text = f"{source} is {size >> 20} MiB, {free >> 20} MiB are free"
    if size > free:
        return Finding(
            "source", BAD, text, "mount less of it, or set WHEELMOUNT_STORE to a larger disk"
        )
    return Finding("source", GOOD, text)


def _shm() -> Finding:
    """Check ``/dev/shm``: ordinary users' stores are there, and frameworks share tensors there."""
    place = logind.memory_place(os.getuid())
    try:
        size = shutil.disk_usage(place).total
    except OSError as error:
        return Finding("shm", POOR, f"{place}: {error.strerror}", "mount a tmpfs there")
    text = f"{place} is {size >> 20} MiB"
    if size < psutil.virtual_memory().total // 4:
        return Finding(
            "shm",
            POOR,
            f"{text}: mounts of ordinary users, which are there, must fit in it",
            "mount it larger (containers: --shm-size), or set WHEELMOUNT_STORE to a directory",
        )
    if place != Path("/tmp") and logind.clears_memory(os.getuid()):  # noqa: S108 - only compared
        return Finding(
            "shm",
            POOR,
            f"{text}: systemd-logind deletes what is yours there at your last logout (RemoveIPC), "
            "and mounts without a namespace of their own lose their files then",
            "run: loginctl enable-linger; or set WHEELMOUNT_STORE to a directory",
        )
    return Finding("shm", GOOD, text)


def _namespaces() -> Finding:
    if namespaces_allowed():
        return Finding("namespaces", GOOD, "hosts get a mount namespace where they need one")
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


def _containers(settings: Settings) -> Finding:
    """Check whether a container starts, and what this user may do in it."""
    try:
        apptainer.find()
    except UnavailableError:
        return Finding("containers", POOR, "none without apptainer", "see above")
    try:
        trial.start(settings.private_runtime())
    except WheelmountError as error:
        return Finding("containers", BAD, error.message, error.hint or "see apptainer's manual")
    if os.geteuid() == 0:
        return Finding("containers", GOOD, "they start, as root with what packages need")
    lines = Path("/etc/subuid").read_text().splitlines() if Path("/etc/subuid").exists() else []
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # neither the environment nor the system knows one
        name = str(os.getuid())
    known = {name, str(os.getuid())}
    if any(line.partition(":")[0] in known for line in lines):
        return Finding("containers", GOOD, "they start, by --fakeroot with users of their own")
    return Finding(
        "containers",
        POOR,
        "they start, with one user: packages of a distribution may not install in them",
        f"as root: apptainer config fakeroot --add {name}",
    )


RDMA_IN_USE = {
    "auto": "between two hosts with one, bytes travel by what is faster there",
    "rdma": "bytes travel by nothing else",
    "tcp": "but transport is tcp, and bytes travel by that",
}


def _rdma(settings: Settings) -> Finding:
    devices = rdma.devices()
    state: State = POOR
    cost = "bytes travel by TCP"
    if settings.transport == "rdma":
        state, cost = BAD, "transport is rdma, and deliveries fail"
    if not devices:
        hint = "if the machine has one (lspci), load its driver"
        return Finding("rdma", state, f"no device: {cost}", hint)
    names = ", ".join(f"{name} ({driver})" for name, driver in devices.items())
    if not rdma.CLAIMED.intersection(devices.values()):
        return Finding(
            "rdma",
            state,
            f"{names}: none that Monarch takes; {cost}",
            f"Monarch takes those of the drivers {' and '.join(sorted(rdma.CLAIMED))}",
        )
    return Finding("rdma", GOOD, f"{names}, which Monarch takes; {RDMA_IN_USE[settings.transport]}")


def _sockets() -> Finding:
    if socketguard.close():
        return Finding("sockets", GOOD, "closed to other users")
    return Finding(
        "sockets",
        POOR,
        "other users of this machine can connect to Monarch's, and run programs as you",
        "use machines without other users",
    )


def leftovers(settings: Settings) -> list[Leftover]:
    """Return the remains of this user's dead mounts and hosts, without those that are starting."""
    return list(_leftovers(settings))


def _leftovers(settings: Settings) -> Iterator[Leftover]:
    # In this order: a mount has its directory before it has a store, and hosts theirs before
    # processes.
    places = {settings.private_store(mounted=own): None for own in (True, False)}
    found = [store for place in places for store in sorted(place.iterdir()) if store.is_dir()]
    young = time.time() - MOMENT
    hosts = [
        directory
        for directory in sorted(settings.private_runtime().glob("hosts-*"))
        if _changed(directory) < young and not shared.elsewhere(directory)
    ]
    mounts = [each for each in sorted(processes.directory(settings).iterdir()) if each.is_dir()]
    for directory in mounts:
        if _changed(directory) < young and processes.dead(directory):
            yield Leftover(directory, "a mount whose serving process is gone")
    known = {directory.name for directory in mounts}
    for store in found:
        # A store in use is of a mount whose directory is in another ``runtime_dir``, or of another
        # machine.
        if store.name not in known and not stores.in_use(store):
            yield Leftover(store, "files of a mount that is gone")
    alive = running()
    for directory in hosts:
        if directory not in alive:
            yield Leftover(directory, "hosts that are gone")
    for container in containers.find(settings.private_runtime()):
        yield Leftover(container, CONTAINER)


def _changed(directory: Path) -> float:
    """Return the time of a directory's last change; that of one that just ended never passes."""
    try:
        return directory.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def clear(leftover: Leftover) -> None:
    """Delete the remains of a dead mount or host.

    Raises:
        MountError: they include a mount that is in use.
    """
    if (leftover.path / TASK).exists():
        processes.stop(leftover.path, force=True)
    if leftover.text == CONTAINER:
        containers.remove(leftover.path)
        return
    stores.remove(leftover.path)
