"""Mounts that stay, and mounts to do something on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.errors import MountError, TransferError, WaitError, WheelmountError
from wheelmount.hosts import runtime
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client.remote import RemoteMount, remotemount
from wheelmount.mount.client.seen import Seen
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Message
from wheelmount.mount.snapshot import access
from wheelmount.mount.store.verify import Verified
from wheelmount.operations import pools
from wheelmount.operations.records import Refreshed
from wheelmount.operations.site import Site
from wheelmount.progress import Progress

ATTENTION = 200
"""Milliseconds after which a watch yields without a change, so that it can be interrupted."""


def mount(
    site: Site, source: Path, mntpoint: str | None
) -> tuple[dict[str, str], WheelmountError | None]:
    """Mount a directory that stays mounted; return when all bytes have arrived.

    Returns:
        Where it is, by host, and an error that names the files which cannot be read there.

    Raises:
        MountError: the session has the mount already, with another access or adapter.
        WheelmountError: it could not be; nothing stays mounted.
    """
    spec, settings, progress = site.spec, site.settings, site.progress
    if settings.access == access.SOURCE and os.getuid() == 0 and (above := access.closed(source)):
        progress.log(f"only root may come in, as {above} is closed to others; or give --public")
    if spec.session is not None:
        with (
            pools.at(site, namespaces=True) as pool,
            pool.mount(source, mntpoint) as standing,
        ):
            mount, other = standing, standing.differs()
            if spec.kind != "local" and _apart(mount):
                progress.log("only what wheelmount runs on these hosts sees it, see `status`")
        if other is not None:
            raise MountError(
                f"{source} is mounted in session {spec.session} already, with another {other}",
                hint=f"run `wheelmount umount {mount.identity}` first",
            )
        return mount.mntpoints, mount.shortfall()
    # A node of a job may be this machine, which has the directory at that path.
    alike = spec.shared or (mntpoint is None and spec.kind != "local")
    namespaces = alike and "{host}" not in (mntpoint or "")
    started = spec.make(settings, namespaces=namespaces, visible=True, progress=progress)
    try:
        with started as hosts:
            made = remotemount(hosts, source, mntpoint, settings=settings, progress=progress)
            made.open()
            try:
                made.keep()
                if not hosts.killed:  # hosts that go on would keep the agents for a minute
                    made.release()
            except BaseException:
                made.clear()
                raise
    finally:
        runtime.stop(killed=started.killed)
    return made.mntpoints, made.shortfall()


def _apart(mount: RemoteMount) -> bool:
    """Return whether a host has the mount in a mount namespace of its own."""
    states = (each for each in mount.status().values() if isinstance(each, dict))
    return any(state["apart"] for state in states)


def refresh(
    directories: Sequence[Path],
    settings: Settings,
    progress: Progress,
    occasions: Iterable[object] = (None,),
    seen: Seen | None = None,
) -> Iterator[Refreshed | TransferError]:
    """Refresh an existing mount repeatedly, also after a file was edited while it was copied.

    Args:
        directories: private directories of the mount, one for each host, all on this machine.
        settings: in force.
        progress: told about each step.
        occasions: the mount is refreshed for each item; the first comes at once.
        seen: see ``RemoteMount.adopt``.
    """
    with _standing(directories, settings, progress, seen) as mount:
        for _ in occasions:
            try:
                changed = mount.refresh(warn=False)
            except TransferError as error:
                yield error
            else:
                yield Refreshed(changed, mount.mntpoints, mount.shortfall())


@contextlib.contextmanager
def _standing(
    directories: Sequence[Path],
    settings: Settings,
    progress: Progress,
    seen: Seen | None = None,
) -> Iterator[RemoteMount]:
    """Reattach to an existing mount of this machine during the context.

    Raises:
        WaitError: another process still delivers it.
    """
    within = {}
    for directory in directories:
        task = processes.task(directory)
        within[task.host] = _settled(directory, settings)["pid"]
    identity = processes.identity(directories[0])
    try:
        with LocalHosts(len(within), settings, within=within) as hosts:
            mount = RemoteMount(hosts, task.source, None, settings, progress, identity=identity)
            mount.adopt(seen=seen)
            yield mount
    finally:
        runtime.stop(killed=True)


def _settled(directory: Path, settings: Settings) -> Message:
    """Return the state of a mount when no other process delivers it: two would disturb each other.

    Args:
        directory: private directory of the mount.
        settings: in force.

    Raises:
        WaitError: another process still delivers it.
    """
    deadline = time.monotonic() + settings.start_timeout
    while (status := processes.status(directory))["fed"] and not status["finished"]:
        if time.monotonic() > deadline:
            raise WaitError(
                f"another process still delivers {status['mntpoint']}",
                hint="wait for it, or end it",
            )
        time.sleep(pools.POLL_INTERVAL)
    return status


def refreshed(
    directories: Sequence[Path], settings: Settings, seen: Seen | None, progress: Progress
) -> Refreshed:
    """Refresh an existing mount once; ``seen`` as of ``RemoteMount.adopt``."""
    (found,) = refresh(directories, settings, progress, seen=seen)
    if isinstance(found, TransferError):
        raise found
    return found


def verified(
    directories: Sequence[Path], repair: bool, settings: Settings, progress: Progress
) -> tuple[dict[str, Verified], dict[str, str]]:
    """Have the hosts of an existing mount verify their bytes.

    Args:
        directories: see ``refresh``.
        repair: see ``RemoteMount.verify``.
        settings: in force.
        progress: told about each step.

    Returns:
        The findings and the mount point, by host.
    """
    with _standing(directories, settings, progress) as mount:
        return mount.verify(repair=repair), mount.mntpoints


def changes(source: Path) -> Iterator[None]:
    """Now, and whenever something changed in a directory, some moments after it did."""
    import watchfiles  # its library takes its time

    watch = watchfiles.watch(
        source, watch_filter=None, rust_timeout=ATTENTION, yield_on_timeout=True
    )
    next(watch)  # no later change is missed
    yield
    for changed in watch:
        if changed:
            yield


def hosts_for(
    site: Site, mntpoint: str | None
) -> contextlib.AbstractContextManager[pools.HostPool]:
    """Hosts that can have a directory at a mount point, or at its own path.

    Hosts on this machine need mount namespaces for the latter.
    """
    namespaces = mntpoint is None or (site.spec.shared and "{host}" not in mntpoint)
    return pools.at(site, namespaces=namespaces)
