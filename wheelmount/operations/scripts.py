"""Scripts, run on every host where a directory is mounted."""

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
"""Bytes of a script, which travels in one message."""

PYTHON = ("python3",)
"""What runs scripts of Python, of an environment or else the first on ``PATH``."""


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
    """Mount a directory on all hosts and run a script on each, in the mounted directory.

    The script finds the mount point in ``WHEELMOUNT_MOUNT``, its host's name and place in
    ``WHEELMOUNT_HOST`` and ``WHEELMOUNT_RANK``. If the directory is a virtual environment, its
    programs come first.

    Args:
        spec: the hosts.
        source: the directory.
        words: the script or command, and its arguments.
        text: of the script; None for a command.
        mntpoint: see ``remotemount``.
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

    Without such a line that is Python where the script's name ends in ``.py``, else bash.

    Args:
        script: its text.
        name: what it is called.
        environment: whether it runs in an environment of Python, whose own Python then runs what
            ends in ``.py``, whatever its first line.
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
    """Return a command that finds an environment's programs before all others.

    Args:
        environment: where the environment is mounted.
        argv: the command.
        given: names of variables that are set for this command; others that would lead its Python
            elsewhere are removed.
    """
    removed = [name for name in ("PYTHONHOME", "PYTHONPATH") if name not in given]
    shell = (
        'VIRTUAL_ENV=$0 PATH="$0/bin:$PATH"; export VIRTUAL_ENV PATH; '
        f'unset {" ".join(removed)}; exec "$@"'
    )
    return "sh", "-c", shell, environment, *argv


def is_environment(source: Path) -> bool:
    """Whether a directory is a virtual environment."""
    return (source / "pyvenv.cfg").is_file()


def read(path: str) -> bytes:
    """Text of a script file, or of standard input where ``path`` is ``-``.

    Raises:
        SourceError: there is none.
        InputError: it is too large.
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
