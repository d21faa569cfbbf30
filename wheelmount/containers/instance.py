"""Instances: containers that keep running, so that several commands can run in them.

They are instances of apptainer's, each with its own configuration directory, so that a user's other
instances and their names are not affected. An instance has all its files in a private directory. A
lock is held as long as it runs, which tells it from the remains of a killed instance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from wheelmount import logs, shared, typed
from wheelmount.config import private_directory
from wheelmount.containers import apptainer, sif
from wheelmount.containers.container import NOT_STARTED, Container
from wheelmount.containers.overlay import check_name, remove_tree
from wheelmount.containers.process import Stream, attend
from wheelmount.containers.terminal import Terminal
from wheelmount.errors import ContainerError, WaitError
from wheelmount.lock import flock

START_TIMEOUT = 60.0
"""Seconds that an instance may take to start, or another start of it to end."""

STOP_TIMEOUT = 20.0
"""Seconds that an instance may take to end; its processes get a few to end by themselves."""

INSTANCES = "instances"
"""Name of the directory that holds all instances."""

_NAME = "wheelmount"
_PATIENCE = "3"


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The description of an instance.

    Attributes:
        image: path of its image.
        overlay: name of its overlay.
        packages: the wheelhouse it shows, or None.
        binds: further files of the host that it sees.
        nv: whether it has NVIDIA devices.
        privileged: see `Container`.
        identity: id of the image, see ``sif.identity``: another one may come to its path.
        since: when it was started, in seconds since the epoch.
        pid: the process that ends when it has ended.
        started: when that process was started; another one may have its number later.
    """

    image: str
    overlay: str
    packages: str | None
    binds: list[str]
    nv: bool
    since: float
    pid: int
    privileged: bool = False
    identity: str | None = None
    started: str | None = None


@dataclasses.dataclass(frozen=True)
class Instance:
    """One instance of one host.

    Args:
        runtime: the user's private directory there.
        name: the user's name of the instance.
        host: the host's name.

    Raises:
        InputError: a name that is no plain file name.
    """

    runtime: Path
    name: str
    host: str

    def __post_init__(self) -> None:
        for what, value in (("an instance", self.name), ("a host", self.host)):
            check_name(what, value)

    @classmethod
    def all(cls, runtime: Path) -> list[Instance]:
        """Every instance under ``runtime``, by name and host, also those that were killed."""
        folders = sorted((runtime / INSTANCES).glob("*/[!.]*"))
        return [cls(runtime, f.parent.name, f.name) for f in folders if f.is_dir()]

    @property
    def path(self) -> Path:
        """Its private directory."""
        return self.runtime / INSTANCES / self.name / self.host

    @property
    def workdir(self) -> Path:
        """The directory of its container."""
        return self.path / "container"

    def logs(self) -> list[Path]:
        """Files that its start, and what its image starts by itself, write to."""
        own = self.path / "config" / "instances" / "logs"
        return [path for path in (self.path / "log", *sorted(own.rglob("*"))) if path.is_file()]

    def record(self) -> Record | None:
        """Return the description of the instance if it runs, otherwise None."""
        with contextlib.suppress(FileNotFoundError), self._lock_file.open("rb") as file:
            if not flock(file.fileno(), fcntl.LOCK_SH):
                return self.remembered()
        return None

    def remembered(self) -> Record | None:
        """Return the description of the instance, even if it was killed; None if it has none."""
        with contextlib.suppress(OSError, ValueError):
            return typed.decode(self._record_file.read_bytes(), Record)
        return None

    def find(self, container: Container) -> Record:
        """Return the description of the running instance.

        Args:
            container: what commands in it ask for. Only what is given there is compared, and its
                image is not.

        Raises:
            ContainerError: the instance does not run, or with another overlay or wheelhouse, or
                without something that is asked for.
        """
        found = self.record()
        if found is None:
            raise ContainerError(
                f"there is no instance {self.name} on {self.host}",
                hint="give --image to start one; see `wheelmount instance ls`",
            )
        self._compare_given(found, container)
        return found

    def ensure(self, container: Container) -> Record:
        """Start the instance unless it runs.

        Args:
            container: the container to start, with `workdir` as its working directory.

        Returns:
            The description of the running instance.

        Raises:
            ContainerError: the instance runs with another image, overlay or wheelhouse; it does not
                start; or the overlay is in use.
            SourceError: the image or a bound file is missing.
            WaitError: another start of the instance does not end.
        """
        with self._alone():
            found = self.record()
            if found is None:
                return self._start(container)
            self._compare_all(found, container)
            return found

    def run(
        self,
        container: Container,
        argv: Sequence[str],
        *,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        timeout: float | None = None,
        terminal: Terminal | None = None,
    ) -> int:
        """Run a command in the instance, and wait for its exit code; as `Container.run`.

        Raises:
            ContainerError: the instance has ended.
        """
        with container.joining() as own:
            code = attend(
                container.join_command(_NAME, argv, own),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                timeout=timeout,
                terminal=terminal,
                environment=self._environment,
                directory=own,
                confined=container.confined,
            )
            if code == NOT_STARTED and self.record() is None:
                raise ContainerError(
                    f"instance {self.name} on {self.host} has ended",
                    hint="run the command again with --image to start it",
                )
            if code == NOT_STARTED:
                return container.why_in(_NAME, argv, own, self._environment)
        return code

    def stop(self) -> bool:
        """End the instance and all its processes, and delete its files except for the overlay.

        Returns:
            Whether there was something to end or to delete.

        Raises:
            ContainerError: it was started on another machine, and may run there.
            WaitError: it does not end.
        """
        if not self.path.is_dir():
            return False
        with self._alone():
            there = self.path.is_dir()  # or another process has done it meanwhile
            self._end()
            self._forget()
        return there

    def discard(self) -> None:
        """Delete what a killed process left of the instance, unless it has been started since.

        Raises:
            WaitError: another process starts or stops it for too long.
        """
        if not self.path.is_dir():
            return
        with self._alone():
            if self.record() is None:
                self._end()
                self._forget()

    def _forget(self) -> None:
        """Remove the files of locks, and the directory of this name if this was the last one.

        The instance must be locked: one that is just starting has the same files.
        """
        for file in (self._lock_file, self._start_file):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    # ----------------------------------------------------------------------------------------------

    def _start(self, container: Container) -> Record:
        self._end()  # left by a killed instance
        container = dataclasses.replace(container, env={})  # each command brings its own
        private_directory(self.path)
        try:
            shared.mark(self.path)
            (self.path / "config").mkdir()
            container.prepare()
            with (
                container.writer.lock(f"instance {self.name}") as overlay,
                self._lock_file.open("wb") as lock,
                (self.path / "log").open("w+", encoding="utf-8", errors="replace") as log,
            ):
                # Others hold it for a moment, to look whether the instance runs.
                self._await(lambda: flock(lock.fileno(), fcntl.LOCK_EX))
                held = [overlay, lock.fileno()]
                code = attend(
                    container.start_command(_NAME),
                    stdout=log,
                    stderr=log,
                    timeout=START_TIMEOUT,
                    pass_fds=held,
                    environment=self._environment,
                    directory=self.path,
                    stays=True,
                    confined=container.confined,
                )
                if code:
                    log.seek(0)
                    raise apptainer.start_error(container.image, log.read())
                record = self._describe(container)
                # An ordinary user's instance closes inherited descriptors. So another process holds
                # the locks for it, notes how long the overlay is used, and bounds apptainer's logs
                # of what the image's program prints.
                said = str(self.path / "config" / "instances" / "logs")
                arguments = str(record.pid), said, str(overlay)
                subprocess.Popen(
                    [sys.executable, "-I", "-S", logs.__file__, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=apptainer.environment(),  # without the mark of the command's own processes
                    cwd="/",
                    start_new_session=True,
                    pass_fds=held,
                ).returncode = 0  # it runs on, and this process does not wait for it
                self._record_file.write_text(
                    json.dumps(dataclasses.asdict(record)), encoding="utf-8"
                )
            return record
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if not self.path.is_dir():
            return
        deadline = time.monotonic() + STOP_TIMEOUT
        runs = self._process_runs()
        if shared.elsewhere(self.path) and not runs:
            raise ContainerError(
                f"instance {self.name} of {self.host} was started on another machine, which shares "
                f"{self.runtime}",
                hint=f"stop it there, or if it does not run any more, delete {self.path}",
            )
        if runs:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it does not end, see below
                subprocess.run(
                    [str(apptainer.find()), "instance", "stop", "--timeout", _PATIENCE, _NAME],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    env={**apptainer.environment(), **self._environment},
                    timeout=STOP_TIMEOUT,
                    check=False,
                )
        # First apptainer's process ends, then, within the second, the process with the locks.
        while self._process_runs() or self.record() is not None:
            if time.monotonic() > deadline:
                raise WaitError(
                    f"instance {self.name} on {self.host} does not end",
                    hint="something in it waits for a device or a file system; try again later",
                )
            time.sleep(0.02)
        remove_tree(self.path)

    def _describe(self, container: Container) -> Record:
        process = self._process()
        if process is None:
            raise ContainerError(
                f"instance {self.name} on {self.host} ended as soon as it was started",
                hint="run the command without --instance to see what its image says",
            )
        return Record(
            image=str(container.image.absolute()),
            overlay=container.writer.name,
            packages=None if container.packages is None else str(container.packages),
            binds=_binds(container),
            nv=container.nv,
            since=time.time(),
            pid=process["ppid"],
            privileged=container.privileged,
            identity=sif.identity(container.image),
            started=_start_of(process["ppid"]),
        )

    def _compare_given(self, found: Record, container: Container) -> None:
        """Refuse what the running instance lacks of all that is given."""
        overlay, packages = container.overlay, container.packages
        if overlay is not None and overlay.name == found.overlay:
            overlay.check()
        if (
            (overlay is not None and overlay.name != found.overlay)
            or (packages is not None and str(packages) != found.packages)
            or (container.binds and _binds(container) != found.binds)
            or (container.nv and not found.nv)
            or (container.privileged and not found.privileged)
        ):
            raise self._other(found)

    def _compare_all(self, found: Record, container: Container) -> None:
        """Refuse the running instance unless it is of this container."""
        self._compare_given(found, container)
        image = str(container.image.absolute())
        wanted = image, container.writer.name, container.nv, container.privileged
        if (found.image, found.overlay, found.nv, found.privileged) != wanted:
            raise self._other(found)
        if found.identity is not None and found.identity != sif.identity(container.image):
            raise self._other(found, "an earlier ")

    def _other(self, found: Record, earlier: str = "") -> ContainerError:
        shown = f"{earlier}{found.image} with the overlay {found.overlay}"
        shown += f" and {found.packages} at /packages" if found.packages else ""
        shown += ", with NVIDIA devices" if found.nv else ""
        shown += ", privileged" if found.privileged else ""
        return ContainerError(
            f"instance {self.name} on {self.host} is another one: it runs {shown}",
            hint=f"use another name, or first: wheelmount instance stop {self.name}",
        )

    def _process(self) -> dict[str, Any] | None:
        """Return apptainer's record: ``pid`` of the first process, ``ppid`` of its parent."""
        files = self.path.glob(f"config/instances/app/*/*/{_NAME}/{_NAME}.json")
        for file in files:
            with contextlib.suppress(OSError, ValueError):
                return typed.decode(file.read_bytes(), dict[str, Any])
        return None

    def _process_runs(self) -> bool:
        """Return whether apptainer's process of this instance runs.

        Its number alone does not tell: once it has ended, another process may have it.
        """
        process, record = self._process(), self.remembered()
        if process is None:
            return False
        started = _start_of(process["ppid"])
        if record is None or record.started is None:  # its start was killed, or of an old version
            return started is not None and _is_instance(process["ppid"])
        return started == record.started

    @property
    def _environment(self) -> dict[str, str]:
        return {"APPTAINER_CONFIGDIR": str(self.path / "config")}

    @property
    def _record_file(self) -> Path:
        return self.path / "instance.json"

    @property
    def _lock_file(self) -> Path:
        return self.path.with_name(f".{self.host}.lock")

    @property
    def _start_file(self) -> Path:
        return self.path.with_name(f".{self.host}.start")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the instance during the context: no other process starts or stops it.

        Raises:
            WaitError: another process starts or stops it for too long.
        """
        with contextlib.ExitStack() as held:
            self._await(lambda: self._try(held))
            yield

    def _try(self, held: contextlib.ExitStack) -> bool:
        """Try to lock the instance until ``held`` is closed; return whether it is locked."""
        private_directory(self.runtime / INSTANCES)
        private_directory(self.path.parent)
        try:
            file = held.enter_context(self._start_file.open("wb"))
            locked = flock(file.fileno(), fcntl.LOCK_EX)
            # Another process may have removed the file, or also made it again, since it was opened.
            if locked and os.path.samestat(os.fstat(file.fileno()), self._start_file.stat()):
                return True
        except FileNotFoundError:
            pass
        held.close()
        return False

    def _await(self, locked: Callable[[], bool]) -> None:
        """Try until a lock of the instance is held."""
        deadline = time.monotonic() + START_TIMEOUT
        while not locked():
            if time.monotonic() > deadline:
                raise WaitError(
                    f"instance {self.name} on {self.host} is being started or stopped by "
                    "another process, which does not end",
                    hint="look for another wheelmount that hangs",
                )
            time.sleep(0.02)


def _binds(container: Container) -> list[str]:
    return [f"{bind.source}:{bind.target}:{bind.writable}" for bind in container.binds]


def _start_of(pid: int) -> str | None:
    """Return when a process that runs was started; None if there is none of this number.

    No other process of the number ever gave the same.
    """
    try:
        # The name, in brackets, may hold anything; the state follows, and proc(5)'s starttime.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if stat[0] in "ZX" else f"{boot} {stat[19]}"


def _is_instance(pid: int) -> bool:
    """Return whether a process is one of apptainer's for instances of this name."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()  # Apptainer instance: USER [NAME]
    except OSError:
        return False
    return b" instance: " in title and f"[{_NAME}]".encode() in title
