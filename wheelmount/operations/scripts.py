"""Scripts and commands on every host, with a mounted directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.errors import InputError, SourceError
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Results
from wheelmount.operations.launch import Launch
from wheelmount.operations.mounts import hosts_for
from wheelmount.operations.site import Site

LARGEST = 8 << 20
"""Largest script in bytes; it travels in one message."""

PYTHON = ("python3",)
"""Interpreter of Python scripts: that of a mounted environment, else the first on ``PATH``."""


SCRIPT = "/run/wheelmount/script"
"""Path of the script in a container."""


@dataclass(frozen=True, slots=True)
class Program:
    """A script of this machine, or a command, with its arguments.

    Attributes:
        words: name of the script, or the command; and the arguments.
        text: content of the script; None for a command.
    """

    words: tuple[str, ...]
    text: bytes | None = None

    def through(self, *, environment: bool = False) -> tuple[str, ...]:
        """Return the interpreter of the script, see ``interpreter``; or the whole command."""
        if self.text is None:
            return self.words
        return interpreter(self.text, self.words[0], environment=environment)

    def inside(self, through: tuple[str, ...]) -> tuple[str, ...]:
        """Return the words that run it in a container, which has a script at ``SCRIPT``.

        Args:
            through: result of the method of this name.
        """
        return through if self.text is None else (*through, SCRIPT, *self.words[1:])

    def command(
        self,
        through: tuple[str, ...],
        variables: Mapping[str, str],
        launch: Launch,
        usual: str | None,
        settings: Settings,
    ) -> Command:
        """Return the command that runs it on a host.

        Args:
            through: result of the method of this name, maybe ``activated``.
            variables: environment variables to set.
            launch: how to run it.
            usual: directory in which it starts by default, as for ``Launch.within``.
            settings: those of the mounts that it may start in.
        """
        return Command(
            through if self.text is None else self.words[1:],
            self.text,
            through,
            environment=variables,
            cwd=launch.within(usual),
            runtime_dir=settings.runtime_dir,
            timeout=launch.timeout,
        )


def run(
    site: Site, source: Path, program: Program, mntpoint: str | None, launch: Launch
) -> Results:
    """Mount a directory on all hosts and run a script or command on each, in that directory.

    Variables give it the mount point (``WHEELMOUNT_MOUNT``), the host's name
    (``WHEELMOUNT_HOST``) and its number (``WHEELMOUNT_RANK``). If the directory is a virtual
    environment, its programs come first on ``PATH``.

    Args:
        site: the hosts.
        source: the directory.
        program: the script or command.
        mntpoint: where hosts mount the directory, as for ``remotemount``.
        launch: how to run it.
    """

    inside = is_environment(source)

    def command(_host: str, path: str) -> Command:
        through = program.through(environment=inside)
        if inside:
            through = activated(path, through, launch.variables)
        variables = {**launch.variables, "WHEELMOUNT_MOUNT": path}
        return program.command(through, variables, launch, path, site.settings)

    with hosts_for(site, mntpoint) as pool:
        return pool.run_on_mounts(source, mntpoint, command, "run", launch)


def interpreter(script: bytes, name: str = "", *, environment: bool = False) -> tuple[str, ...]:
    """Return the interpreter of a script: that of its first line after ``#!``, as in execve(2).

    A script without such a line is run by Python if its name ends in ``.py``, else by bash.

    Args:
        script: content of the script.
        name: its file name.
        environment: the script runs in a virtual environment, whose Python runs every script whose
            name ends in ``.py``, whatever its first line.
    """
    first = script.partition(b"\n")[0]
    words = os.fsdecode(first[2:]).strip().split(None, 1) if first.startswith(b"#!") else []
    python = name.endswith(".py")
    if environment and python:
        return PYTHON
    return tuple(words) or (PYTHON if python else ("bash",))


def activated(environment: str, argv: Sequence[str], given: Collection[str]) -> tuple[str, ...]:
    """Return a command that runs in an activated virtual environment.

    Args:
        environment: where the environment is mounted.
        argv: the command.
        given: names of variables that the user set. ``PYTHONHOME`` and ``PYTHONPATH`` are removed
            unless they are among them.
    """
    removed = [name for name in ("PYTHONHOME", "PYTHONPATH") if name not in given]
    shell = (
        'VIRTUAL_ENV=$0 PATH="$0/bin:$PATH"; export VIRTUAL_ENV PATH; '
        f'unset {" ".join(removed)}; exec "$@"'
    )
    return "sh", "-c", shell, environment, *argv


def is_environment(source: Path) -> bool:
    """Return whether a directory is a virtual environment."""
    return (source / "pyvenv.cfg").is_file()


def read(path: str) -> bytes:
    """Return the content of a script, or of standard input if ``path`` is ``-``.

    Raises:
        SourceError: the script cannot be read.
        InputError: the script is too large.
    """
    try:
        text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise SourceError(
            f"cannot read the script {path}: {error.strerror}",
            hint="give a script, or - for stdin",
        ) from None
    if len(text) > LARGEST:
        raise InputError(
            f"the script is larger than {LARGEST >> 20} MiB",
            hint="put what is large into the directory that is mounted",
        )
    return text
