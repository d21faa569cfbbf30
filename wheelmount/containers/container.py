"""A container on this host: its command line, its private files, its life."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from wheelmount import disk
from wheelmount.config import private_directory
from wheelmount.containers import apptainer, sif
from wheelmount.containers.overlay import Overlay, remove_tree
from wheelmount.containers.privileges import of_command, write_profile
from wheelmount.containers.privileges import options as limits
from wheelmount.containers.process import Stream, attend, undisturbed
from wheelmount.containers.terminal import Terminal
from wheelmount.errors import InputError, SourceError, UnavailableError, WaitError

PACKAGES = "/packages"
"""Path of the wheelhouse in a container."""

GPU = Path("/dev/nvidiactl")
"""The file that NVIDIA's driver makes if there is a device."""

# The image's own may name the resolver of the machine that built it, apptainer's those of the host.
_NAMES = {
    "/etc/hosts": "127.0.0.1 localhost {host}\n::1 localhost\n",
    "/etc/resolv.conf": "# There is no network.\n",
}

DIAGNOSIS_TIMEOUT = 30.0
"""Seconds that it may take to find out whether a command failed by itself or did not start."""

_ENVIRONMENT = "env"
"""Name of the file with the environment of commands."""

_OF_SHELLS = "DIRSTACK", "EUID", "GID", "IFS", "OPTIND", "PWD", "UID"
"""Variables that shells set by themselves: that of apptainer, which reads the file, drops them."""

_REST = "_WHEELMOUNT_REST"
"""Variable with a shell script that sets the variables that apptainer's shell changes."""

NOT_STARTED = 255
"""Exit code of apptainer when it cannot start a container; a command may have the same code."""


class Bind(NamedTuple):
    """A file or directory of the host that a container sees."""

    source: Path
    target: str
    writable: bool = False


@dataclasses.dataclass(frozen=True)
class Container:
    """A container without a network, which sees only the host's files that are named here.

    Args:
        image: the SIF, a local path.
        workdir: directory of the container on the host, made by `prepare` and removed by
            `cleanup`: generated files, ``/tmp`` and the home directory lie in it.
        overlay: keeps changes of the container's file system from run to run; without one
            they are deleted with the container.
        packages: the mounted wheelhouse, shown read-only at ``/packages``.
        binds: further files of the host that the container sees.
        env: environment variables, besides those of the image. None comes from the host.
        files: texts by absolute path, shown read-only: pip's and uv's configuration.
        cwd: working directory of commands; default the home directory of the container's user.
        nv: allow the host's NVIDIA devices, with the host's driver.
        privileged: if root starts the container, keep all of root's privileges in it.
        memory: bytes that its processes may take together; None for no limit.
        cpus: processors that its processes may keep busy together; None for no limit.

    Raises:
        InputError: a path or a name has characters with a special meaning on a command line.
    """

    image: Path
    workdir: Path
    overlay: Overlay | None = None
    packages: Path | None = None
    binds: Sequence[Bind] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cwd: str | None = None
    nv: bool = False
    privileged: bool = False
    memory: int | None = None
    cpus: float | None = None

    def __post_init__(self) -> None:
        for path in (self.workdir, self.writer.path):
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
            if name in _OF_SHELLS:
                raise InputError(
                    f"{name} cannot be set in a container: shells have their own value for it",
                    hint="use another name, or set it in the command: env NAME=VALUE COMMAND",
                )

    # --- the command line -------------------------------------------------------------------------

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs a command in this container, once it is prepared.

        Raises:
            InputError: there is no command in ``argv``.
            UnavailableError: apptainer is missing.
        """
        options = self.options([] if apptainer.own_ids() else None)
        inside = self._inside(self._env_file)
        command = [str(apptainer.find()), "--silent", "exec", *options, *inside]
        # Absolute, so that it can be neither an option nor a URI.
        return [*command, str(self.image.absolute()), *self._started(argv)]

    def start_command(self, instance: str) -> list[str]:
        """Return the command line that starts the container as an instance of apptainer's."""
        command = [str(apptainer.find()), "--silent", "instance", "start", *self.options()]
        return [*command, str(self.image.absolute()), instance]

    def join_command(self, instance: str, argv: Sequence[str], own: Path) -> list[str]:
        """Return the command line that runs a command in a started instance of this container.

        Args:
            instance: apptainer's name of the instance.
            argv: the command.
            own: directory of this command alone, as made by `joining`.
        """
        # An ordinary user enters an instance as the root that it was started with.
        privileges = [] if os.geteuid() != 0 else apptainer.exec_privileges()
        if self.confined:
            privileges = of_command(self._profile)
        command = [str(apptainer.find()), "--silent", "exec", *privileges, "--cleanenv"]
        inside = self._inside(own / _ENVIRONMENT)
        return [*command, "--no-eval", *inside, f"instance://{instance}", *self._started(argv)]

    def _started(self, argv: Sequence[str]) -> list[str]:
        """Return a command that sets what apptainer cannot set, and then is the given one."""
        if not any(_changes(*variable) for variable in self.env.items()):
            return _checked(argv)
        script = f'eval "${_REST}"; unset {_REST}; exec "$@"'
        return ["/bin/sh", "-c", script, "sh", *_checked(argv)]

    def options(self, privileges: list[str] | None = None) -> list[str]:
        """Return apptainer's options that isolate the container, and its binds.

        Args:
            privileges: options that let this user be root inside it; default what is needed here.
        """
        # --no-eval, because otherwise a shell expands the values of the environment.
        if privileges is None:
            privileges = apptainer.exec_privileges()
        if self.confined:
            privileges = limits(self._profile, nv=self.nv)
        options = [*privileges, "--containall", "--no-eval", "--network", "none"]
        # Leave out the binds that the machine's configuration gives every container.
        options += ["--no-mount", "bind-paths"]
        options += ["--workdir", str(self._scratch), "--overlay", str(self.writer.layer.absolute())]
        for source, target, writable in self._binds():
            options += ["--bind", f"{source.absolute()}:{target}:{'rw' if writable else 'ro'}"]
        if self.memory is not None:
            options += ["--memory", str(self.memory)]
        if self.cpus is not None:
            options += ["--cpus", f"{self.cpus:g}"]
        return [*options, "--nv"] if self.nv else options

    def _inside(self, env_file: Path) -> list[str]:
        where = [] if self.cwd is None else ["--pwd", self.cwd]
        return ["--env-file", str(env_file), *where]

    def _binds(self) -> Iterator[Bind]:
        if self.packages is not None:
            yield Bind(self.packages, PACKAGES)
        yield from self.binds
        for number, target in enumerate(self._texts):
            yield Bind(self._files / str(number), target)

    @property
    def _texts(self) -> dict[str, str]:
        host = socket.gethostname()
        return {**{path: text.format(host=host) for path, text in _NAMES.items()}, **self.files}

    @property
    def writer(self) -> Overlay:
        """The overlay that the container writes to."""
        return self.overlay or Overlay(self.workdir, "temporary", "here")

    @property
    def _files(self) -> Path:
        return self.workdir.absolute() / "files"

    @property
    def _env_file(self) -> Path:
        # In a file, because every user of the machine can read a command line.
        return self.workdir.absolute() / _ENVIRONMENT

    @property
    def _profile(self) -> Path:
        return self.workdir.absolute() / "seccomp.json"

    @property
    def confined(self) -> bool:
        """Whether root in the container has fewer rights than root of the host."""
        return os.geteuid() == 0 and not self.privileged

    @property
    def _scratch(self) -> Path:
        return self.workdir.absolute() / "scratch"

    # --- its life ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the private directory with everything `command` refers to, and the overlay.

        Raises:
            SourceError: the image, the wheelhouse or something bound is missing.
            ConfigError: another user's directory has this name.
            UnavailableError: there is no device for ``nv``.
        """
        sif.check(self.image)
        if self.nv and not GPU.exists():
            raise UnavailableError(
                f"{socket.gethostname()} has no NVIDIA device: there is no {GPU}",
                hint="leave --nv out, or choose hosts with one; the driver must be loaded there",
            )
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
        for number, text in enumerate(self._texts.values()):
            (self._files / str(number)).write_bytes(text.encode(errors="surrogateescape"))
        self._write_environment(self._env_file)
        if self.confined:
            write_profile(self._profile)
        self.writer.create()

    @contextlib.contextmanager
    def joining(self) -> Iterator[Path]:
        """Make a directory for one command in a started instance, with its environment.

        Other commands start in the instance at the same time, with other environments.
        """
        made = Path(tempfile.mkdtemp(prefix="command-", dir=self.workdir.absolute()))
        try:
            self._write_environment(made / _ENVIRONMENT)
            yield made
        finally:
            with undisturbed():
                shutil.rmtree(made, ignore_errors=True)  # the instance may end with all its files

    def _write_environment(self, file: Path) -> None:
        kept = {name: value for name, value in self.env.items() if not _changes(name, value)}
        rest = [
            f'{_spelled(value)}\nexport {name}="$_wheelmount_word"'
            for name, value in self.env.items()
            if name not in kept
        ]
        if rest:
            kept[_REST] = "\n".join(rest)
        lines = (f"{name}={shlex.quote(value)}\n" for name, value in kept.items())
        disk.write(file, "".join(lines), mode=0o600)

    def cleanup(self) -> None:
        """Remove the private directory; the overlay stays.

        Raises:
            ContainerError: some of it belongs to another user.
        """
        if self.workdir.is_dir():
            with undisturbed():
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

    def lock(self, argv: Sequence[str]) -> contextlib.AbstractContextManager[int]:
        """Lock the overlay during the context, for a command and for others after it.

        Raises:
            ContainerError: the overlay is in use.
        """
        return self.writer.lock(shlex.join(argv)[:200])

    def run(
        self,
        argv: Sequence[str],
        *,
        stdout: Stream = None,
        stderr: Stream = None,
        stdin: Stream = subprocess.DEVNULL,
        timeout: float | None = None,
        terminal: Terminal | None = None,
        lock: int | None = None,
    ) -> int:
        """Run a command and wait for its end.

        All processes that it started end with the command, with an exception here, and with this
        process.

        Args:
            argv: the command and its arguments, as the container's ``exec`` gets them.
            stdout: as for `subprocess.Popen`, like ``stderr`` and ``stdin``.
            stderr: also receives apptainer's own errors.
            stdin: empty by default.
            timeout: seconds that the command may take; default no limit.
            terminal: terminal of the command, in place of all three streams.
            lock: what ``lock`` yielded; by default the overlay is locked for this command alone.

        Returns:
            The command's exit code; 128 and the signal's number where one ended it.

        Raises:
            ContainerError: the overlay is in use, or the container does not start.
            UnavailableError: apptainer is missing.
            OvertimeError: the time ran out.
        """
        command = self.command(argv)
        with contextlib.nullcontext(lock) if lock is not None else self.lock(argv) as lock:
            # Child processes inherit the lock, so it is held until the container has ended.
            code = attend(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                timeout=timeout,
                terminal=terminal,
                pass_fds=[lock],
                directory=self.workdir.absolute(),
                confined=self.confined,
                ids=apptainer.own_ids(),
            )
            if code == NOT_STARTED:
                return self._why(self.command(_look(argv[0])), [lock])
        return code

    def _why(self, look: Sequence[str], pass_fds: Sequence[int]) -> int:
        """Find out why a command ended with 255: by itself, not found, or no container started."""
        with tempfile.TemporaryFile(dir=self.workdir) as said:
            try:
                code = attend(
                    look,
                    stderr=said,
                    pass_fds=pass_fds,
                    timeout=DIAGNOSIS_TIMEOUT,
                    confined=self.confined,
                    ids=apptainer.own_ids(),
                )
            except WaitError:
                return NOT_STARTED
            if code == NOT_STARTED:
                said.seek(0)
                raise apptainer.start_error(self.image, said.read().decode(errors="replace"))
        return code or NOT_STARTED

    def why_in(
        self, instance: str, argv: Sequence[str], own: Path, environment: Mapping[str, str]
    ) -> int:
        """Find out why a command ended with 255 in a running instance; return the exit code."""
        look = self.join_command(instance, _look(argv[0]), own)
        try:
            code = attend(
                look,
                stderr=subprocess.DEVNULL,
                environment=environment,
                timeout=DIAGNOSIS_TIMEOUT,
                confined=self.confined,
            )
        except WaitError:
            return NOT_STARTED
        return code or NOT_STARTED


def _look(program: str) -> list[str]:
    """Return a command that ends with 127 if there is no such program, else with 0."""
    return _checked(["/bin/sh", "-c", 'command -v -- "$1" >/dev/null || exit 127', "sh", program])


def _checked(argv: Sequence[str]) -> list[str]:
    """Return a command in a form that apptainer can pass on.

    Raises:
        InputError: the command is empty.
    """
    if not argv:
        raise InputError("no command to run in the container", hint="name one, such as: python")
    if all(map(_is_text, argv)):
        return list(argv)
    # apptainer passes words on as JSON, which can hold only text.
    return ["/bin/sh", "-c", "\n".join(["set --", *map(_word, argv), 'exec "$@"']), "sh"]


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _word(word: str) -> str:
    """Return the line of a shell script that adds a word, of any bytes, to its arguments."""
    if _is_text(word):
        return f'set -- "$@" {shlex.quote(word)}'
    return f'{_spelled(word)}\nset -- "$@" "$_wheelmount_word"'


def _spelled(word: str) -> str:
    """Return lines of a shell script, of plain text, that set ``_wheelmount_word`` to any bytes."""
    spelled = "".join(
        chr(byte) if chr(byte).isalnum() and byte < 128 else f"\\{byte:03o}"
        for byte in os.fsencode(word)
    )
    # The x protects line ends at the end of a word, which the substitution would drop.
    return f"_wheelmount_word=$(printf '{spelled}x')\n_wheelmount_word=${{_wheelmount_word%x}}"


def _changes(name: str, value: str) -> bool:
    """Return whether apptainer's shell would change or refuse the value of a variable."""
    own = name == "HOME" or (name == "PATH" and not value)
    return own or "\r" in value or not _is_text(value)


def _refuse_specials(path: str) -> None:
    """Refuse characters that apptainer's options read as the end of a path.

    Raises:
        InputError: ``path`` has such a character.
    """
    if found := re.search(r"[:,\"\\\x00-\x1f]", path):
        raise InputError(
            f"{path!r} cannot be shown in a container: it has a {found[0]!r} in it",
            hint="rename it, or reach it through a symbolic link with a plain name",
        )
