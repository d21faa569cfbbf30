"""Start, find, ask and stop the serving processes of this machine, by their private directories.

Every mount of a host has a private directory below the user's runtime directory. It holds the whole
state of the mount, so any process of the user finds the mount there, even after its client ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wheelmount import entry, errors, shared
from wheelmount.child import last_words
from wheelmount.config import Settings, private_directory
from wheelmount.errors import MountError, UnavailableError
from wheelmount.hosts import process
from wheelmount.mount.kernel import points
from wheelmount.mount.serve import control
from wheelmount.mount.serve.control import PROCESS, Task
from wheelmount.mount.store import store as stores
from wheelmount.mount.store.store import Store

SHOW_TIMEOUT = 60.0
"""Seconds that a serving process may take to change to another generation."""

READS_TIMEOUT = 3.0
"""Seconds in which a serving process must tell what was read; without it, time is lost only."""

STOP_TIMEOUT = 15.0
"""Seconds that a serving process may take to answer, or to unmount and clean up."""


def directory(settings: Settings) -> Path:
    """Return the directory that holds the private directories of this user's mounts."""
    return private_directory(settings.private_runtime() / "mounts")


def identity(directory: Path) -> str:
    """Return the part of a directory's name that is the same on all hosts of a mount."""
    return directory.name.partition("-")[0]


def find(settings: Settings, *targets: str) -> list[Path]:
    """Return directories of this machine's mounts, sorted by name.

    Args:
        settings: settings, which name the user's runtime directory.
        targets: mount points, sources or identities of mounts; default all mounts.

    Raises:
        MountError: a target is not mounted.
    """
    found = []
    wanted = {*targets, *(points.same(each) for each in targets if each.startswith("/"))}
    for path in settings.listed("mounts"):
        try:
            task = Task.read(path)
        except (OSError, ValueError):  # a mount that is being made or removed
            continue
        if shared.elsewhere(path) and _process(path) is None:  # the name of this one may change
            continue
        names = {task.mntpoint, task.source, identity(path)}
        if not targets or names.intersection(wanted):
            found.append(path)
    if targets and not found:
        raise MountError(
            f"wheelmount has nothing mounted at {targets[0]}",
            hint="run `wheelmount status` for what is mounted",
        )
    return found


def task(directory: Path) -> Task:
    """Return the task of a mount that was found.

    Raises:
        MountError: the mount was taken down meanwhile.
    """
    try:
        return Task.read(directory)
    except FileNotFoundError:
        raise MountError(
            f"the mount {identity(directory)} is gone", hint="another command took it down"
        ) from None


@contextlib.contextmanager
def making(directory: Path) -> Iterator[None]:
    """Make a mount's directory; in the context, the mount does not count as dead."""
    directory.mkdir(mode=0o700)
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        shared.mark(directory)
        entry.make(directory)
        yield
    finally:
        os.close(descriptor)


def dead(directory: Path) -> bool:
    """Return whether a mount is dead: no process makes it or serves it, also elsewhere."""
    if shared.elsewhere(directory):
        return False
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    # Search processes rather than wait for an answer: one that takes over may not listen yet.
    numbers = (each.name for each in Path("/proc").glob("[0-9]*"))
    return directory.exists() and not any(_alive(int(number), directory) for number in numbers)


def clear(settings: Settings, mntpoint: str) -> None:
    """Remove what dead mounts of this user left at a mount point."""
    for path in settings.listed("mounts"):
        with contextlib.suppress(OSError, ValueError):
            task = Task.read(path)
            # The same path may belong to another mount in another mount namespace.
            if task.mntpoint == mntpoint and dead(path) and _shown(task):
                stop(path, force=True)


def _shown(task: Task) -> bool:
    """Return whether a dead mount is probably what its mount point shows."""
    found, device = points.find(task.mntpoint), Path(task.store).stat().st_dev
    if found is None or found.kind != points.FILE_SYSTEM:
        return found is not None and found.device == f"{os.major(device)}:{os.minor(device)}"
    try:
        os.statvfs(task.mntpoint)
    except OSError:  # a FUSE mount without a server
        return True
    return False


def status(directory: Path) -> control.Message:
    """Ask a serving process for the state of its mount, as ``Server.status`` returns it.

    Raises:
        MountError: its process is gone.
    """
    return control.ask(directory, {"op": "status"}, STOP_TIMEOUT)


def reads(directory: Path) -> list[Any]:
    """Ask a serving process, once, which parts of files were read first; see ``Trace.end``.

    Raises:
        MountError: its process is gone.
    """
    parts: list[Any] = control.ask(directory, {"op": "reads"}, READS_TIMEOUT)["reads"]
    return parts


def show(directory: Path, generation: int) -> None:
    """Have a serving process show a complete generation.

    Raises:
        MountError: it cannot be shown; the earlier generation still is.
    """
    try:
        answer = control.ask(directory, {"op": "show", "generation": generation}, SHOW_TIMEOUT)
    except MountError:
        if shown(directory) == generation:  # what answered has died, or took long
            return
        raise
    if not answer["ok"]:
        raise MountError(answer["message"])


def shown(directory: Path) -> int:
    """Return the generation that is shown, once no change to another one is in progress.

    Raises:
        MountError: the serving process is gone, or a change takes long.
    """
    answer: int = control.ask(directory, {"op": "shown"}, STOP_TIMEOUT)["generation"]
    return answer


def forget(directory: Path, made: Store) -> None:
    """Delete a generation, unless it is shown or its serving process does not tell.

    What stays is deleted with the mount, or by the next refresh if it is not shown.
    """
    with contextlib.suppress(MountError, OSError):
        if not directory.exists() or shown(directory) != made.generation:
            made.forget()


def drop(directory: Path, number: int) -> None:
    """Have the kernel drop cached bytes of a file that were replaced.

    Raises:
        MountError: its process is gone.
    """
    control.ask(directory, {"op": "drop", "number": number}, STOP_TIMEOUT)


def start(directory: Path, timeout: float) -> None:
    """Start a serving process and wait until it has mounted.

    Args:
        directory: private directory of the mount, with its task.
        timeout: seconds to wait.

    Raises:
        MountError: the mount did not come up in time.
        UnavailableError: the process cannot mount.
    """
    read, write = os.pipe()
    try:
        with (directory / "log").open("ab") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", process.SERVER, str(directory), str(write)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=process.environment(),
                cwd="/",
                start_new_session=True,
                pass_fds=(write,),
            )
    finally:
        os.close(write)
    try:
        if not select.select([read], [], [], timeout)[0]:
            server.kill()
            raise MountError(f"the mount did not come up within {timeout:g} s")
        word = os.read(read, 4096).decode(errors="replace")
    finally:
        os.close(read)
    if word != "ok":
        server.wait(timeout)
        if (error := errors.read(word)) is not None:
            raise error
        said = b""
        with contextlib.suppress(FileNotFoundError):  # the process has cleaned up
            said = (directory / "log").read_bytes()
        reason = word or last_words(said, "it said nothing")
        raise UnavailableError(
            f"cannot mount: {reason}",
            hint="FUSE must be allowed for you on the host",
        )
    server.returncode = 0  # it keeps running, and Python must not wait for it


def stop(directory: Path, *, force: bool) -> None:
    """Have a serving process unmount and end, and check that it did.

    Raises:
        MountError: the mount is in use (its users are named), or the process does not end.
    """
    try:
        task = Task.read(directory)
    except FileNotFoundError:
        return
    pid = _process(directory)
    if pid is not None:
        _ask_to_stop(directory, task, pid, force=force)
    if directory.exists():  # the process died before it cleaned up
        if (mount := points.to_take_down(directory)) is not None:
            try:
                points.take_down(mount, force=force)
            except MountError as error:
                raise _in_use(error.message, task) from None
        discard(directory, Path(task.store), task.mntpoint if task.made else None)


def _ask_to_stop(directory: Path, task: Task, pid: int, *, force: bool) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT
    answer: control.Message | None = None
    while answer is None and _alive(pid, directory):
        try:
            answer = control.ask(directory, {"op": "stop", "force": force}, STOP_TIMEOUT)
        except MountError:
            if time.monotonic() < deadline:  # it is ending, or another process takes over
                time.sleep(0.05)
            elif force:
                break
            else:
                raise MountError(
                    f"the serving process ({pid}) of {task.mntpoint} does not answer",
                    hint="let it go on if it was stopped, or end it and its mount with --force",
                ) from None
    if answer is not None and not answer["ok"]:
        raise _in_use(answer["message"], task)
    if not _ends(pid, directory, STOP_TIMEOUT if answer is not None else 0):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not _ends(pid, directory, STOP_TIMEOUT):
            raise MountError(
                f"the serving process ({pid}) of {task.mntpoint} was killed and does not end",
                hint="a disk or network file system that it waits for may hang: see dmesg",
            )


def _ends(pid: int, directory: Path, timeout: float) -> bool:
    """Wait for the end of a serving process; return False if it still runs."""
    deadline = time.monotonic() + timeout
    while _alive(pid, directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _in_use(message: str, task: Task) -> MountError:
    users = points.holders(task.mntpoint)
    return MountError(
        message + (f": in use by {', '.join(users)}" if users else ""),
        hint="end them, or detach the mount with --force",
    )


def _process(directory: Path) -> int | None:
    """Return the id of a serving process, which leads its group; None if it has ended."""
    try:
        pid = int((directory / PROCESS).read_text())
    except (OSError, ValueError):
        return None
    return pid if _alive(pid, directory) else None


def _alive(pid: int, directory: Path) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.fsencode(process.SERVER) in arguments and os.fsencode(directory) in arguments


def discard(directory: Path, store: Path, mntpoint: str | None) -> None:
    """Delete the directory, store and mount point that an unmounted mount left behind."""
    stores.remove(store)
    shutil.rmtree(directory, ignore_errors=True)
    if mntpoint is not None:
        with contextlib.suppress(OSError):
            Path(mntpoint).rmdir()
