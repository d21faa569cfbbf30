"""Scripts and commands on every host, with a mounted directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.errors import InputError, SourceError
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Results
from wheelmount.hosts.spec import HostSpec
from wheelmount.operations.launch import Launch
from wheelmount.operations.mounts import on_mounts
from wheelmount.progress import Progress

LARGEST = 8 << 20
"""Largest script in bytes; it travels in one message."""

PYTHON = ("python3",)
"""Interpreter of Python scripts: that of a mounted environment, else the first on ``PATH``."""


def run(
    spec: HostSpec,
    source: Path,
    words: Sequence[str],
    text: bytes | None,
    mntpoint: str | None,
    launch: Launch,
    settings: Settings,
    progress: Progress,
) -> Results:
    """Mount a directory on all hosts and run a script or command on each, in that directory.

    Variables give it the mount point (``WHEELMOUNT_MOUNT``), the host's name
    (``WHEELMOUNT_HOST``) and its number (``WHEELMOUNT_RANK``). If the directory is a virtual
    environment, its programs come first on ``PATH``.

    Args:
        spec: the hosts.
        source: the directory.
        words: the script or command, and its arguments.
        text: content of the script; None for a command.
        mntpoint: where hosts mount the directory, as for ``remotemount``.
        launch: how to run it.
        settings: in force.
        progress: told about each step.
    """

    inside = is_environment(source)

    def command(_host: str, path: str) -> Command:
        environment = {**launch.variables, "WHEELMOUNT_MOUNT": path}
        through = tuple(words) if text is None else interpreter(text, words[0], environment=inside)
        if inside:
            through = activated(path, through, launch.variables)
        return Command(
            through if text is None else tuple(words[1:]),
            text,
            through,
            environment=environment,
            cwd=launch.within(path),
            timeout=launch.timeout,
        )

    return on_mounts(spec, source, mntpoint, command, settings, progress, "run", launch)


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


def activated(
    environment: str, argv: Sequence[str], given: Collection[str] = ()
) -> tuple[str, ...]:
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
