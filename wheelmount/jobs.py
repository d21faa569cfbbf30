"""The work that crosses rooms: a mount, hosts, and something to do on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.errors import SourceError, WheelmountError
from wheelmount.hosts import engine
from wheelmount.hosts.runner import Command, Result, Runners
from wheelmount.hosts.spec import HostSpec
from wheelmount.mount.remote import RemoteMount, remotemount
from wheelmount.progress import Progress

Results = Mapping[str, Result | WheelmountError]


def mount(
    spec: HostSpec, source: Path, mntpoint: str | None, settings: Settings, progress: Progress
) -> RemoteMount:
    """Mount a directory and leave it standing; returns when all bytes are there.

    Raises:
        WheelmountError: it could not be; nothing stays mounted.
    """
    namespaces = spec.shared and "{host}" not in (mntpoint or "")
    with spec.make(settings, namespaces=namespaces) as hosts:
        made = remotemount(hosts, source, mntpoint, settings=settings, progress=progress)
        made.open()
        try:
            made.keep()
        except BaseException:
            made.close(force=True)
            raise
        finally:
            engine.stop()
    return made


def run(
    spec: HostSpec,
    source: Path,
    script: str,
    arguments: Sequence[str],
    mntpoint: str | None,
    settings: Settings,
    progress: Progress,
) -> Results:
    """Mount a directory on all hosts and run a bash script on each, in the mounted directory.

    The script finds the mount point in ``WHEELMOUNT_MOUNT``, its host's name and place in
    ``WHEELMOUNT_HOST`` and ``WHEELMOUNT_RANK``.
    """
    namespaces = mntpoint is None or (spec.shared and "{host}" not in mntpoint)
    with spec.make(settings, namespaces=namespaces) as hosts:
        try:
            with (
                remotemount(hosts, source, mntpoint, settings=settings, progress=progress) as mount,
                Runners(list(hosts), settings.start_timeout) as runners,
                progress.task("run", unit="hosts") as task,
            ):
                results = runners.run(
                    {
                        name: Command(
                            tuple(arguments), script, {"WHEELMOUNT_MOUNT": path}, cwd=path
                        )
                        for name, path in mount.mntpoints.items()
                    }
                )
                task.advance(len(results))
                return results
        finally:
            engine.stop()


def read_script(path: str) -> str:
    """Text of a script file.

    Raises:
        SourceError: there is none.
    """
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SourceError(
            f"cannot read the script {path}: {reason}", hint="give a bash script, or - for stdin"
        ) from None
