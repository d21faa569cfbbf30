"""A container on this host: its command line, its private files, its life."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from wheelmount.config import private_directory
from wheelmount.containers import apptainer, image
from wheelmount.containers.overlay import Overlay, remove_tree
from wheelmount.errors import InputError, SourceError, WaitError

PACKAGES = "/packages"
"""Where a container sees the wheelhouse."""

Stream = int | IO[bytes] | IO[str] | None

# Ends a container whose owner died: standard input is a pipe that only the owner can write to.
_GUARD = 'read -r _; kill -s TERM -- "-$1"; sleep "$2"; kill -s KILL -- "-$1"'

# What apptainer ends with when it cannot start a container; a command may end with it too.
_NOT_STARTED = 255


class Bind(NamedTuple):
    """Something of the host that a container sees."""

    source: Path
    target: str
    writable: bool = False


@dataclasses.dataclass(frozen=True)
class Container:
    """A container that sees no network, nothing of the host, and what is named here.

    Args:
        image: the SIF, a local path.
        workdir: directory of the container on the host, made by `prepare` and removed by
            `cleanup`: generated files, ``/tmp`` and the home directory lie in it.
        overlay: keeps what is written to the container's file system from run to run; without one
            that goes when the container is cleaned up.
        packages: the mounted wheelhouse, shown read-only at ``/packages``.
        binds: what else of the host it sees.
        env: its environment, besides what the image sets. Nothing comes from the host's.
        files: texts it finds at these absolute paths, read-only: pip's and uv's configuration.

    Raises:
        InputError: a path or a name that could be taken for something else on a command line.
    """

    image: Path
    workdir: Path
    overlay: Overlay | None = None
    packages: Path | None = None
    binds: Sequence[Bind] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in (self.workdir, self._writer.path):
            _refuse_specials(str(path.absolute()))
        for bind in self._binds():
            _refuse_specials(str(bind.source.absolute()))
            _refuse_specials(bind.target)
            if not bind.target.startswith("/"):
                raise InputError(
                    f"cannot bind to {bind.target!r} in a container", hint="give an absolute path"
                )
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise InputError(
                    f"{name!r} cannot name an environment variable",
                    hint="use letters, digits and underscores",
                )

    # --- the command line -------------------------------------------------------------------------

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` in this container, once it is prepared.

        Raises:
            InputError: there is no command in ``argv``.
            UnavailableError: apptainer is missing.
        """
        if not argv:
            raise InputError("no command to run in the container", hint="name one, such as: python")
        command = [str(apptainer.find()), "--silent", "exec", *apptainer.exec_privileges()]
        # --no-eval: else the environment's values are expanded by a shell.
        command += ["--containall", "--no-eval", "--network", "none"]
        command += ["--workdir", str(self._scratch), "--overlay", str(self._writer.path.absolute())]
        for source, target, writable in self._binds():
            command += ["--bind", f"{source.absolute()}:{target}:{'rw' if writable else 'ro'}"]
        command += ["--env-file", str(self._env_file)]
        # Absolute, so that it can be neither an option nor a URI.
        return [*command, str(self.image.absolute()), *argv]

    def _binds(self) -> Iterator[Bind]:
        if self.packages is not None:
            yield Bind(self.packages, PACKAGES)
        yield from self.binds
        for number, target in enumerate(self.files):
            yield Bind(self._files / str(number), target)

    @property
    def _writer(self) -> Overlay:
        return self.overlay or Overlay(self.workdir, "temporary", "here")

    @property
    def _files(self) -> Path:
        return self.workdir.absolute() / "files"

    @property
    def _env_file(self) -> Path:
        # A file: in a command line every user of the machine could read it.
        return self.workdir.absolute() / "env"

    @property
    def _scratch(self) -> Path:
        return self.workdir.absolute() / "scratch"

    # --- its life ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the private directory with everything `command` refers to, and the overlay.

        Raises:
            SourceError: the image, the wheelhouse or something bound is missing.
            ConfigError: somebody else's directory is in the way.
        """
        image.check(self.image)
        for bind in (*self.binds, *([Bind(self.packages, PACKAGES)] if self.packages else ())):
            try:
                bind.source.stat()
            except OSError as error:
                raise SourceError(
                    f"{bind.source} cannot be shown in a container at {bind.target}: "
                    f"{error.strerror}",
                    hint="check that it exists, and that it is mounted on this host",
                ) from None
        private_directory(self.workdir)
        self._scratch.mkdir(exist_ok=True)
        self._files.mkdir(exist_ok=True)
        for number, text in enumerate(self.files.values()):
            (self._files / str(number)).write_text(text, encoding="utf-8")
        self._env_file.write_text(
            "".join(f"{name}={shlex.quote(value)}\n" for name, value in self.env.items()),
            encoding="utf-8",
        )
        self._writer.create()

    def cleanup(self) -> None:
        """Remove the private directory; the overlay stays.

        Raises:
            ContainerError: some of it belongs to another user.
        """
        if self.workdir.is_dir():
            remove_tree(self.workdir)

    def __enter__(self) -> Container:
        try:
            self.prepare()
        except BaseException:
            self.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def run(
        self,
        argv: Sequence[str],
        *,
        stdout: Stream = None,
        stderr: Stream = None,
        stdin: Stream = subprocess.DEVNULL,
        timeout: float | None = None,
    ) -> int:
        """Run a command and wait for it.

        Whatever it started ends with it, with an exception here, and with this process.

        Args:
            argv: the command and its arguments, as the container's ``exec`` gets them.
            stdout: as for `subprocess.Popen`, and so are ``stderr`` and ``stdin``.
            stderr: the same; apptainer's own errors go there too.
            stdin: the same; nothing by default.
            timeout: seconds it may take.

        Returns:
            The command's exit code; 128 and the signal's number where one ended it.

        Raises:
            ContainerError: the overlay is in use, or the container does not start.
            UnavailableError: apptainer is missing.
            WaitError: the time ran out.
        """
        command = self.command(argv)
        with self._writer.lock(shlex.join(argv)[:200]) as lock:
            # The lock is inherited: it holds until the container has ended.
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=apptainer.environment(),
                start_new_session=True,
                pass_fds=[lock],
            )
            with _ended_with_this_process(process):
                try:
                    code = process.wait(timeout)
                except subprocess.TimeoutExpired:
                    raise WaitError(
                        f"{argv[0]} was stopped: it took longer than {timeout:g} s",
                        hint="give it more time, or look at what it printed",
                    ) from None
            if code == _NOT_STARTED:
                self._check_start()
        return code if code >= 0 else 128 - code

    def _check_start(self) -> None:
        """Tell a command that ended with 255 from a container that did not start."""
        attempt = subprocess.run(
            self.command(["/bin/sh", "-c", ":"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=apptainer.environment(),
            text=True,
            errors="replace",
            check=False,
        )
        if attempt.returncode == _NOT_STARTED:
            raise apptainer.start_error(self.image, attempt.stderr)


@contextlib.contextmanager
def _ended_with_this_process(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop ``process``, a session's leader, when the context fails or this process dies."""
    reading, writing = os.pipe()
    guard = None
    try:
        guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", str(process.pid), str(apptainer.GRACE)],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        yield
    except BaseException:
        apptainer.stop(process.pid)
        process.wait()
        raise
    finally:
        # Killed before the pipe is closed: it must not wake up for a session that has ended.
        if guard is not None:
            guard.kill()
            guard.wait()
        os.close(reading)
        os.close(writing)


def _refuse_specials(path: str) -> None:
    """Refuse what apptainer's options read as the end of a path.

    Raises:
        InputError: ``path`` has such a character.
    """
    if found := re.search(r"[:,\"\\\x00-\x1f]", path):
        raise InputError(
            f"{path!r} cannot be shown in a container: it has a {found[0]!r} in it",
            hint="rename it, or reach it through a symbolic link with a plain name",
        )
